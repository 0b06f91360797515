"""Torch twin of attention cut at the last block boundary of the reduction tree, for folded branches.

A row's states over the tiles before the one that holds its block depend on its query and its sample's cache alone; the
own tile is reduced on top of them with the keys and values of the row's branch. The two halves give the bits of
``block_attention`` where every row is its own source.

Shapes: P packed rows, N segments of L tokens, Hq query heads, Hkv key heads, d head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.kernels.attention.reference import AttentionPlan, State, finish_own_tile, prefix_states


class Boundary(NamedTuple):
    """Online-softmax states of P rows before the tile that holds their block, fp32 [2, P, Hq] (outputs with d).

    Entry 0: the splits before the last one, merged. Entry 1: the last split's tiles before the own one. Of an empty
    part the maximum is -inf, the total 0, the output 0.
    """

    maximum: Tensor
    total: Tensor
    output: Tensor


def attend_prefix(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
) -> Boundary:
    """The states of ``queries`` [N, L, Hq, d] over the cached tiles before the one that holds their block: P = N L.

    Segments of the plan may be any L rows of one sample whose blocks start at one position.
    """
    num, length, num_heads, width = queries.shape
    if (num, length) != (plan.num_segments, plan.block_length):
        raise ValueError(f"attend_prefix: the plan is for {plan.num_segments} blocks of {plan.block_length}")
    num_kv_heads = key_cache.shape[2]
    rows = _by_key_head(queries, num_kv_heads).float() * (width**-0.5 if scale is None else scale)
    if plan.order is not None:
        rows = rows[plan.order]
    maximum = rows.new_full((2, *rows.shape[:3]), -torch.inf)
    total, output = torch.zeros_like(maximum), rows.new_zeros((2, *rows.shape))
    for tiles in plan.groups:
        part = slice(tiles.first, tiles.stop)
        for entry, state in enumerate(prefix_states(rows[part], key_cache, value_cache, tiles)):
            if state is not None:
                maximum[entry, part], total[entry, part], output[entry, part] = state
    found = (maximum, total, output)
    if plan.inverse is not None:
        found = (maximum[:, plan.inverse], total[:, plan.inverse], output[:, plan.inverse])
    group = num_heads // num_kv_heads
    by_row = [
        part.unflatten(3, (group, length)).movedim(4, 2).reshape(2, num * length, num_heads, *part.shape[4:])
        for part in found
    ]
    return Boundary(*by_row)


def attend_block(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    row_map: Tensor,
    boundary: Boundary,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Finish attention over the tile that holds each segment's block, on top of stored states.

    Args:
        queries: [P, Hq, d], ``keys`` and ``values`` [P, Hkv, d]: packed rows, as computed.
        row_map: integer [N, L], the packed row that stands for each position of each segment: its query, its
            ``boundary`` states and its key and value.

    Returns:
        Output [N, L, Hq, d] in the queries' dtype and log-sum-exp [N, L, Hq].
    """
    num, length = row_map.shape
    num_heads, width = queries.shape[1:]
    num_kv_heads = keys.shape[1]
    if (num, length) != (plan.num_segments, plan.block_length):
        raise ValueError(f"attend_block: the plan is for {plan.num_segments} blocks of {plan.block_length}")
    if plan.order is not None:
        row_map = row_map[plan.order]
    index = row_map.long()
    rows = _by_key_head(queries[index], num_kv_heads).float() * (width**-0.5 if scale is None else scale)
    states = [
        tuple(_by_key_head(part[entry][index], num_kv_heads) for part in boundary) for entry in range(2)
    ]
    own_keys, own_values = keys[index], values[index]
    output, log_sums = torch.empty_like(rows), rows.new_empty(rows.shape[:3])
    for tiles in plan.groups:
        part = slice(tiles.first, tiles.stop)
        before, within = ([one[part] for one in state] for state in states)
        output[part], log_sums[part] = finish_own_tile(
            rows[part], own_keys[part], own_values[part], key_cache, value_cache, tiles, _state(before), _state(within)
        )  # fmt: skip
    group = num_heads // num_kv_heads
    shape = (num, num_kv_heads, group, length)
    attended = output.view(*shape, width).permute(0, 3, 1, 2, 4).reshape(num, length, num_heads, width)
    sums = log_sums.view(shape).permute(0, 3, 1, 2).reshape(num, length, num_heads)
    attended = attended.to(queries.dtype)
    if plan.inverse is not None:
        attended, sums = attended[plan.inverse], sums[plan.inverse]
    return attended, sums


def _state(parts: list[Tensor]) -> State:
    maximum, total, output = parts
    return maximum, total, output


def _by_key_head(rows: Tensor, num_kv_heads: int) -> Tensor:
    """[N, L, Hq, ...] as [N, Hkv, G * L, ...]: the rows that share a key head."""
    num, _, num_heads = rows.shape[:3]
    grouped = rows.unflatten(2, (num_kv_heads, num_heads // num_kv_heads)).movedim(1, 3)
    by_head: Tensor = grouped.reshape(num, num_kv_heads, -1, *rows.shape[3:])
    return by_head
