"""Triton block attention, with the reduction tree of the torch twin.

    s = scale * q · k
    tile    TILE_KEYS absolute keys; split: its tiles in ascending order by online softmax (Milakov and Gimelshein,
            arXiv 1805.02867); row: its splits merged in ascending order; all in fp32

Rows of one launch are grouped by (slot, block start). A program holds a tile of the rows that share a key head, of
one group or of a part of it, so a prefix tile serves every branch in it; the own block's tile is visited once for
each branch that the row tile touches. The splits of a row run in one program after another or in programs of their
own that a second kernel merges: the same additions in the same order, so the same bits.

Legend: N segments of L tokens, Hq query heads, Hkv key heads, G = Hq / Hkv, d head width, R = N · L rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.attention.launch_plan import LaunchPlan
from dlmgrid.kernels.attention.reference import SPLIT_KEYS, TILE_KEYS, TILES_PER_SPLIT
from dlmgrid.kernels.triton_support import (
    check_float_type,
    check_one_device,
    check_rows_contiguous,
    power_of_two,
)

HEAD_WIDTHS = (64, 80, 96, 128, 192)
"""Head widths that are tested; others are refused."""


class Boundary(NamedTuple):
    """Online-softmax states of R rows before the tile that holds their block, [2, R, Hq] fp32 (outputs [2, R, Hq, d]).

    Entry 0: the splits before the last one, merged. Entry 1: the last split's tiles before the own one. Of an empty
    part the maximum is -inf, the total 0, the output 0.
    """

    maximum: Tensor
    total: Tensor
    output: Tensor


@triton.jit
def _step(queries, keys, values, present, scale, maximum, total, output):
    """One key tile: keys [d, TILE], values [TILE, d], ``present`` [1, TILE] true where a key exists."""
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    scores = tl.where(present, scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    decay = tl.exp(maximum - new_maximum)
    weights = tl.exp(scores - new_maximum[:, None])
    total = total * decay + tl.sum(weights, 1)
    output = tl.dot(weights.to(values.dtype), values, output * decay[:, None], input_precision="ieee")
    return new_maximum, total, output


@triton.jit
def _merge(maximum, total, output, next_maximum, next_total, next_output):
    """Two splits, the earlier one first; one of them may be empty, not both."""
    joint = tl.maximum(maximum, next_maximum)
    first = tl.exp(maximum - joint)
    second = tl.exp(next_maximum - joint)
    total = total * first + next_total * second
    output = output * first[:, None] + next_output * second[:, None]
    return joint, total, output


@triton.jit
def _cached_tiles(
    queries, cached_keys, cached_values, tile_stride, first, stop, scale, maximum, total, output,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tiles first…stop that lie whole in the cache of one (slot, key head)."""
    offsets = tl.arange(0, TILE)
    columns = tl.arange(0, PADDED_WIDTH)
    inside = columns < WIDTH
    present = (offsets >= 0)[None, :]
    for tile in range(first, stop):
        base = tile.to(tl.int64) * tile_stride
        keys = tl.load(
            cached_keys + base + offsets[None, :] * WIDTH + columns[:, None], mask=inside[:, None], other=0.0
        )
        values = tl.load(
            cached_values + base + offsets[:, None] * WIDTH + columns[None, :],
            mask=inside[None, :],
            other=0.0,
        )
        maximum, total, output = _step(queries, keys, values, present, scale, maximum, total, output)
    return maximum, total, output


@triton.jit
def _own_tile(
    queries, in_group, num_group_rows, first_row, cached_keys, cached_values, keys, values, row_map, segments,
    first_segment, kv_head, start, scale, maximum, total, output, own_stride, own_head_stride,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The tile with the own block, for every segment that the row tile touches.

    Positions before the block come from the cache (pointers to this tile), the block's own from ``keys`` and
    ``values``, where ``row_map`` (MAPPED) says which of their rows holds the key of a segment's position.
    """
    offsets = tl.arange(0, TILE)
    columns = tl.arange(0, PADDED_WIDTH)
    inside = columns < WIDTH
    block_at = start % TILE
    is_cached = offsets < block_at
    is_own = (offsets >= block_at) & (offsets < block_at + L)
    present = (offsets < block_at + L)[None, :]
    position = tl.where(is_own, offsets - block_at, 0)
    last_row = tl.minimum(first_row + ROWS, num_group_rows) - 1
    for member in range(first_row // (L * GROUP), last_row // (L * GROUP) + 1):
        segment = tl.load(segments + first_segment + member).to(tl.int64)
        own_row = segment * L + position
        if MAPPED:
            own_row = tl.load(row_map + own_row, mask=is_own, other=0).to(tl.int64)
        own_at = own_row * own_stride + kv_head * own_head_stride
        cache_at = offsets * WIDTH
        key_tile = tl.load(
            cached_keys + cache_at[None, :] + columns[:, None],
            mask=is_cached[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        own_keys = tl.load(
            keys + own_at[None, :] + columns[:, None], mask=is_own[None, :] & inside[:, None], other=0.0
        )
        value_tile = tl.load(
            cached_values + cache_at[:, None] + columns[None, :],
            mask=is_cached[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        own_values = tl.load(
            values + own_at[:, None] + columns[None, :], mask=is_own[:, None] & inside[None, :], other=0.0
        )
        key_tile = tl.where(is_own[None, :], own_keys, key_tile)
        value_tile = tl.where(is_own[:, None], own_values, value_tile)
        new_maximum, new_total, new_output = _step(
            queries, key_tile, value_tile, present, scale, maximum, total, output
        )
        chosen = in_group == member
        maximum = tl.where(chosen, new_maximum, maximum)
        total = tl.where(chosen, new_total, total)
        output = tl.where(chosen[:, None], new_output, output)
    return maximum, total, output


@triton.jit
def _empty(ROWS: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    maximum = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    return maximum, tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS, PADDED_WIDTH), dtype=tl.float32)


@triton.jit
def _rows_of_tile(
    tiles, segments, tile_id, kv_head,
    L: tl.constexpr, GROUP: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the plan says of a row tile, and of each of its rows: the packed row, the query head, its segment."""
    entry = tiles + tile_id * FIELDS
    first_segment = tl.load(entry)
    first_row = tl.load(entry + 1)
    num_group_rows = tl.load(entry + 2)
    slot = tl.load(entry + 3)
    start = tl.load(entry + 4)
    row = first_row + tl.arange(0, ROWS)
    held = row < num_group_rows
    in_group = row // (L * GROUP)
    within = row % (L * GROUP)
    segment = tl.load(segments + first_segment + in_group, mask=held, other=0)
    packed = segment.to(tl.int64) * L + within // GROUP
    head = kv_head * GROUP + within % GROUP
    return first_segment, first_row, num_group_rows, slot, start, held, in_group, packed, head


@triton.jit
def _attention_kernel(
    q, k, v, key_cache, value_cache, out, log_sums, state_max, state_total, state_out, tiles, segments,
    q_stride, q_head_stride, own_stride, own_head_stride, slot_stride, tile_stride, head_stride, num_heads, scale,
    num_states,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, SEQUENTIAL: tl.constexpr,
    BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, key heads, splits or 1).

    SEQUENTIAL: all splits of a row tile in one program. Otherwise split s of the grid's third axis goes into entry s
    of the states [splits, rows, ...]. BOUNDARY: the own tile is left out and the states before it are kept, the
    merged splits before the last in entry 0, the last split's in entry 1.
    """
    kv_head = tl.program_id(1)
    first_segment, first_row, num_group_rows, slot, start, held, in_group, packed, head = _rows_of_tile(
        tiles, segments, tl.program_id(0), kv_head, L, GROUP, FIELDS, ROWS
    )
    columns = tl.arange(0, PADDED_WIDTH)
    mask = held[:, None] & (columns < WIDTH)[None, :]
    queries = tl.load(
        q + packed[:, None] * q_stride + head[:, None].to(tl.int64) * q_head_stride + columns[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    at_head = slot.to(tl.int64) * slot_stride + kv_head * head_stride
    cached_keys = key_cache + at_head
    cached_values = value_cache + at_head
    own_tile = start // TILE
    last_split = own_tile // TILES_PER_SPLIT
    maximum, total, output = _empty(ROWS, PADDED_WIDTH)
    state_row = packed * num_heads + head
    if SEQUENTIAL:
        for split in range(0, last_split):
            next_maximum, next_total, next_output = _empty(ROWS, PADDED_WIDTH)
            next_maximum, next_total, next_output = _cached_tiles(
                queries, cached_keys, cached_values, tile_stride, split * TILES_PER_SPLIT,
                (split + 1) * TILES_PER_SPLIT, scale, next_maximum, next_total, next_output,
                WIDTH, PADDED_WIDTH, TILE,
            )  # fmt: skip
            maximum, total, output = _merge(maximum, total, output, next_maximum, next_total, next_output)
        split = last_split
    else:
        split = tl.program_id(2)
        if split > last_split:
            return
    within_maximum, within_total, within_output = _empty(ROWS, PADDED_WIDTH)
    within_maximum, within_total, within_output = _cached_tiles(
        queries, cached_keys, cached_values, tile_stride, split * TILES_PER_SPLIT,
        tl.minimum((split + 1) * TILES_PER_SPLIT, own_tile), scale, within_maximum, within_total, within_output,
        WIDTH, PADDED_WIDTH, TILE,
    )  # fmt: skip
    if not BOUNDARY:
        if split == last_split:
            base = own_tile.to(tl.int64) * tile_stride
            within_maximum, within_total, within_output = _own_tile(
                queries, in_group, num_group_rows, first_row, cached_keys + base, cached_values + base, k, v, k,
                segments, first_segment, kv_head, start, scale, within_maximum, within_total, within_output,
                own_stride, own_head_stride, L, GROUP, WIDTH, PADDED_WIDTH, TILE, ROWS, False,
            )  # fmt: skip
    if SEQUENTIAL and not BOUNDARY:
        maximum, total, output = _merge(maximum, total, output, within_maximum, within_total, within_output)
        tl.store(
            out + state_row[:, None] * WIDTH + columns[None, :],
            (output / total[:, None]).to(out.dtype.element_ty), mask=mask,
        )  # fmt: skip
        tl.store(log_sums + state_row, maximum + tl.log(total), mask=held)
        return
    if SEQUENTIAL:
        tl.store(state_max + state_row, maximum, mask=held)
        tl.store(state_total + state_row, total, mask=held)
        tl.store(state_out + state_row[:, None] * WIDTH + columns[None, :], output, mask=mask)
        at = num_states + state_row
    else:
        at = split.to(tl.int64) * num_states + state_row
    tl.store(state_max + at, within_maximum, mask=held)
    tl.store(state_total + at, within_total, mask=held)
    tl.store(state_out + at[:, None] * WIDTH + columns[None, :], within_output, mask=mask)


@triton.jit
def _merge_kernel(
    split_max, split_total, split_out, out, log_sums, state_max, state_total, state_out, tiles, segments,
    num_heads, num_states,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, key heads): the splits of each row in ascending order."""
    _, _, _, _, start, held, _, packed, head = _rows_of_tile(
        tiles, segments, tl.program_id(0), tl.program_id(1), L, GROUP, FIELDS, ROWS
    )
    columns = tl.arange(0, PADDED_WIDTH)
    mask = held[:, None] & (columns < WIDTH)[None, :]
    state_row = packed * num_heads + head
    last_split = start // TILE // TILES_PER_SPLIT
    maximum, total, output = _empty(ROWS, PADDED_WIDTH)
    at = state_row
    for _ in range(0, last_split):
        maximum, total, output = _merge(
            maximum, total, output,
            tl.load(split_max + at, mask=held, other=0.0),
            tl.load(split_total + at, mask=held, other=1.0),
            tl.load(split_out + at[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0),
        )  # fmt: skip
        at += num_states
    last_maximum = tl.load(split_max + at, mask=held, other=0.0)
    last_total = tl.load(split_total + at, mask=held, other=1.0)
    last_output = tl.load(split_out + at[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    if BOUNDARY:
        tl.store(state_max + state_row, maximum, mask=held)
        tl.store(state_total + state_row, total, mask=held)
        tl.store(state_out + state_row[:, None] * WIDTH + columns[None, :], output, mask=mask)
        at = num_states + state_row
        tl.store(state_max + at, last_maximum, mask=held)
        tl.store(state_total + at, last_total, mask=held)
        tl.store(state_out + at[:, None] * WIDTH + columns[None, :], last_output, mask=mask)
    else:
        maximum, total, output = _merge(maximum, total, output, last_maximum, last_total, last_output)
        tl.store(
            out + state_row[:, None] * WIDTH + columns[None, :],
            (output / total[:, None]).to(out.dtype.element_ty), mask=mask,
        )  # fmt: skip
        tl.store(log_sums + state_row, maximum + tl.log(total), mask=held)


@triton.jit
def _own_block_kernel(
    q, k, v, key_cache, value_cache, row_map, state_max, state_total, state_out, out, log_sums, tiles, segments,
    q_stride, q_head_stride, own_stride, own_head_stride, slot_stride, tile_stride, head_stride, num_heads, scale,
    num_states,
    L: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    FIELDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, key heads): the own tile on top of the states that ``row_map`` points each row to."""
    kv_head = tl.program_id(1)
    first_segment, first_row, num_group_rows, slot, start, held, in_group, packed, head = _rows_of_tile(
        tiles, segments, tl.program_id(0), kv_head, L, GROUP, FIELDS, ROWS
    )
    columns = tl.arange(0, PADDED_WIDTH)
    mask = held[:, None] & (columns < WIDTH)[None, :]
    source = tl.load(row_map + packed, mask=held, other=0).to(tl.int64)
    queries = tl.load(
        q + source[:, None] * q_stride + head[:, None].to(tl.int64) * q_head_stride + columns[None, :],
        mask=mask, other=0.0,
    )  # fmt: skip
    state_row = source * num_heads + head
    before_maximum = tl.load(state_max + state_row, mask=held, other=0.0)
    before_total = tl.load(state_total + state_row, mask=held, other=0.0)
    before_output = tl.load(state_out + state_row[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    at = num_states + state_row
    maximum = tl.load(state_max + at, mask=held, other=0.0)
    total = tl.load(state_total + at, mask=held, other=0.0)
    output = tl.load(state_out + at[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    base = (
        slot.to(tl.int64) * slot_stride + kv_head * head_stride + (start // TILE).to(tl.int64) * tile_stride
    )
    maximum, total, output = _own_tile(
        queries, in_group, num_group_rows, first_row, key_cache + base, value_cache + base, k, v, row_map,
        segments, first_segment, kv_head, start, scale, maximum, total, output,
        own_stride, own_head_stride, L, GROUP, WIDTH, PADDED_WIDTH, TILE, ROWS, True,
    )  # fmt: skip
    maximum, total, output = _merge(before_maximum, before_total, before_output, maximum, total, output)
    result_row = packed * num_heads + head
    tl.store(
        out + result_row[:, None] * WIDTH + columns[None, :],
        (output / total[:, None]).to(out.dtype.element_ty), mask=mask,
    )  # fmt: skip
    tl.store(log_sums + result_row, maximum + tl.log(total), mask=held)


def block_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: LaunchPlan,
    *,
    scale: float | None = None,
    sequential: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from ``queries`` [N, L, Hq, d] to prefix and own block (``keys``, ``values`` [N, L, Hkv, d]).

    Returns the output [N, L, Hq, d] in the queries' dtype and the natural-log-sum-exp of the scaled scores
    [N, L, Hq] in fp32, as the twin does. ``sequential``: whether the splits of a row run in one program; None: the
    plan decides; no bit depends on it.

    Raises:
        ValueError: a head width that is not in HEAD_WIDTHS, or shapes, types, strides or devices that do not fit.
    """
    num, length, num_heads, width = _check(queries, keys, values, key_cache, value_cache)
    _check_plan(num, length, plan)
    out = torch.empty((num, length, num_heads, width), dtype=queries.dtype, device=queries.device)
    log_sums = torch.empty((num, length, num_heads), dtype=torch.float32, device=queries.device)
    _launch(
        queries, keys, values, key_cache, value_cache, plan, scale, sequential, out=out, log_sums=log_sums, boundary=None
    )  # fmt: skip
    return out, log_sums


def attend_prefix(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: LaunchPlan,
    *,
    scale: float | None = None,
    sequential: bool | None = None,
) -> Boundary:
    """The states of ``queries`` [N, L, Hq, d] over the cached tiles before the one that holds their block.

    Segments of the plan may be any L rows of one sample. Raises ValueError as :func:`block_attention` does.
    """
    num, length, num_heads, width = _check(queries, None, None, key_cache, value_cache)
    _check_plan(num, length, plan)
    shape = (2, num * length, num_heads)
    boundary = Boundary(
        torch.empty(shape, dtype=torch.float32, device=queries.device),
        torch.empty(shape, dtype=torch.float32, device=queries.device),
        torch.empty((*shape, width), dtype=torch.float32, device=queries.device),
    )
    _launch(
        queries, None, None, key_cache, value_cache, plan, scale, sequential, out=None, log_sums=None, boundary=boundary
    )  # fmt: skip
    return boundary


def attend_block(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    row_map: Tensor,
    boundary: Boundary,
    plan: LaunchPlan,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Finish attention over the tile that holds each segment's block, on top of stored states.

    Args:
        queries: [P, Hq, d], ``keys`` and ``values`` [P, Hkv, d]: P packed rows, as computed.
        row_map: int32 [N, L], the packed row that stands for each position of each segment: its query, its
            ``boundary`` states and its key and value.
        boundary: of the packed rows, from :func:`attend_prefix`.

    Returns:
        Output [N, L, Hq, d] and log-sum-exp [N, L, Hq]. Where ``row_map`` is the identity these are the bits of
        :func:`block_attention`. Raises ValueError as it does.
    """
    packed = [tensor[None] for tensor in (queries, keys, values)]
    _, num_packed, num_heads, width = _check(*packed, key_cache, value_cache)
    num, length = row_map.shape
    _check_plan(num, length, plan)
    if boundary.maximum.shape != (2, num_packed, num_heads) or row_map.dtype != torch.int32:
        raise ValueError(
            f"attend_block: states {tuple(boundary.maximum.shape)} of {num_packed} packed rows, row map "
            f"{row_map.dtype}; want [2, {num_packed}, {num_heads}] and int32"
        )
    out = torch.empty((num, length, num_heads, width), dtype=queries.dtype, device=queries.device)
    log_sums = torch.empty((num, length, num_heads), dtype=torch.float32, device=queries.device)
    group = num_heads // keys.shape[1]
    if num:
        _own_block_kernel[(plan.num_tiles(group), keys.shape[1])](
            queries, keys, values, key_cache, value_cache, row_map.contiguous(), *boundary, out, log_sums,
            plan.tiles(group), plan.segments, queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1),
            *key_cache.stride()[:3], num_heads, width**-0.5 if scale is None else scale,
            num_packed * num_heads, **_sizes(length, group, width, plan), FIELDS=plan.FIELDS, **_options(queries),
        )  # fmt: skip
    return out, log_sums


def _launch(
    queries: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: LaunchPlan,
    scale: float | None,
    sequential: bool | None,
    *,
    out: Tensor | None,
    log_sums: Tensor | None,
    boundary: Boundary | None,
) -> None:
    num, length, num_heads, width = queries.shape
    if not num:
        return
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    num_tiles = plan.num_tiles(group)
    if sequential is None:
        sequential = plan.runs_in_sequence(group, num_kv_heads)
    num_states = num * length * num_heads
    if boundary is not None:
        states = boundary
    else:
        states = Boundary(queries, queries, queries)  # never written: a pointer is needed
    split_states = states
    if not sequential:
        shape = (plan.num_splits, num * length, num_heads)
        split_states = Boundary(
            torch.empty(shape, dtype=torch.float32, device=queries.device),
            torch.empty(shape, dtype=torch.float32, device=queries.device),
            torch.empty((*shape, width), dtype=torch.float32, device=queries.device),
        )
    own = keys if keys is not None else queries
    own_values = values if values is not None else queries
    result = out if out is not None else queries
    sums = log_sums if log_sums is not None else queries
    sizes = _sizes(length, group, width, plan)
    common = {"TILES_PER_SPLIT": TILES_PER_SPLIT, "FIELDS": plan.FIELDS, "BOUNDARY": boundary is not None}
    flat_q, flat_own = queries.flatten(0, 1), own.flatten(0, 1)
    _attention_kernel[(num_tiles, num_kv_heads, 1 if sequential else plan.num_splits)](
        queries, own, own_values, key_cache, value_cache, result, sums, *split_states,
        plan.tiles(group), plan.segments, flat_q.stride(0), flat_q.stride(1), flat_own.stride(0),
        flat_own.stride(1), *key_cache.stride()[:3], num_heads, width**-0.5 if scale is None else scale,
        num_states, SEQUENTIAL=sequential, **sizes, **common, **_options(queries),
    )  # fmt: skip
    if not sequential:
        _merge_kernel[(num_tiles, num_kv_heads)](
            *split_states, result, sums, *states, plan.tiles(group), plan.segments, num_heads, num_states,
            **sizes, **common, num_warps=4,
        )  # fmt: skip


def _sizes(length: int, group: int, width: int, plan: LaunchPlan) -> dict[str, int]:
    return {
        "L": length, "GROUP": group, "WIDTH": width, "PADDED_WIDTH": power_of_two(width), "TILE": TILE_KEYS,
        "ROWS": plan.ROWS,
    }  # fmt: skip


def _options(queries: Tensor) -> dict[str, int]:
    """Pinned: four warps; two stages where the tiles of keys and values fit twice into shared memory."""
    wide = queries.shape[-1] > 128 and queries.dtype == torch.float32
    return {"num_warps": 4, "num_stages": 1 if wide else 2}


def _check_plan(num: int, length: int, plan: LaunchPlan) -> None:
    if (num, length) != (plan.num_segments, plan.block_length):
        raise ValueError(
            f"block_attention: {num} blocks of {length}, the plan is for {plan.num_segments} of {plan.block_length}"
        )


def _check(
    queries: Tensor, keys: Tensor | None, values: Tensor | None, key_cache: Tensor, value_cache: Tensor
) -> tuple[int, int, int, int]:
    """N, L, Hq, d of the queries; ValueError for what does not fit."""
    num, length, num_heads, width = queries.shape
    if width not in HEAD_WIDTHS:
        raise ValueError(
            f"block_attention: head width {width} is not one of {HEAD_WIDTHS}; use kernels: torch"
        )
    num_kv_heads = key_cache.shape[2]
    expected = (num, length, num_kv_heads, width)
    fits = num_heads % num_kv_heads == 0 and key_cache.shape == value_cache.shape
    fits = fits and key_cache.shape[3:] == (TILE_KEYS, width)
    for own in (keys, values):
        fits = fits and (own is None or tuple(own.shape) == expected)
    if not fits:
        raise ValueError(
            f"block_attention: {tuple(queries.shape)} queries and caches {tuple(key_cache.shape)} do not fit keys "
            f"{None if keys is None else tuple(keys.shape)}"
        )
    if len({t.dtype for t in (queries, keys, values, key_cache, value_cache) if t is not None}) > 1:
        raise ValueError("block_attention: queries, keys, values and caches must be of one type")
    if keys is not None and values is not None and keys.stride() != values.stride():
        raise ValueError(f"block_attention: keys have strides {keys.stride()}, values {values.stride()}")
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"block_attention: {name} must be contiguous, its strides are {tensor.stride()}")
    for name, own in (("queries", queries), ("keys", keys)):
        if own is not None and num and own.stride(0) != length * own.stride(1):
            raise ValueError(
                f"block_attention: {name} have strides {own.stride()}; rows must be evenly spaced"
            )
    check_float_type("block_attention", queries=queries)
    check_rows_contiguous("block_attention", queries=queries, keys=keys, values=values)
    check_one_device("block_attention", queries=queries, keys=keys, key_cache=key_cache)
    return num, length, num_heads, width


assert SPLIT_KEYS == TILES_PER_SPLIT * TILE_KEYS
