"""Launchers of the Triton block attention: checks, buffers, grids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlmgrid.kernels.attention.boundary import Boundary
from dlmgrid.kernels.attention.kernel import (
    attention_kernel,
    merge_kernel,
    own_block_kernel,
)
from dlmgrid.kernels.attention.launch_plan import LaunchPlan
from dlmgrid.kernels.attention.reference import SPLIT_KEYS, TILE_KEYS, TILES_PER_SPLIT
from dlmgrid.kernels.dependent_launch import launch_options
from dlmgrid.kernels.triton_support import (
    check_float_type,
    check_one_device,
    check_rows_contiguous,
    power_of_two,
)

HEAD_WIDTHS = (64, 80, 96, 128, 192)
"""Head widths that are tested; others are refused."""

_STAGES = 3

_MERGED_ROWS, _MERGED_AT_ONCE = 4, 8
"""Rows of a program that merges splits, and the splits it reads ahead; no bit depends on either."""


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
    row_tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from ``queries`` [N, L, Hq, d] to prefix and own block (``keys``, ``values`` [N, L, Hkv, d]).

    Returns the output [N, L, Hq, d] in the queries' dtype and the natural-log-sum-exp of the scaled scores
    [N, L, Hq] in fp32, as the twin does. ``sequential``: whether the splits of a row run in one program;
    ``row_tile``: rows of a program; None: the plan decides; no bit depends on either.

    Raises:
        ValueError: a head width that is not in HEAD_WIDTHS, or shapes, types, strides or devices that do not fit.
    """
    num, length, num_heads, width = _check(queries, keys, values, key_cache, value_cache)
    _check_plan(num, length, plan)
    out = torch.empty((num, length, num_heads, width), dtype=queries.dtype, device=queries.device)
    log_sums = torch.empty((num, length, num_heads), dtype=torch.float32, device=queries.device)
    _launch(
        queries, keys, values, key_cache, value_cache, plan, scale, sequential, row_tile, out=out, log_sums=log_sums,
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
    row_tile: int | None = None,
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
        queries, None, None, key_cache, value_cache, plan, scale, sequential, row_tile, boundary=boundary,
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
    _, num_packed, num_heads, width = _check(queries[None], keys[None], values[None], key_cache, value_cache)
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
        row_tile = plan.row_tile(group, keys.shape[1], width, queries.element_size())
        tiles = plan.tiles(group, row_tile)
        own_block_kernel[(len(tiles), keys.shape[1])](
            queries, keys, values, key_cache, value_cache, row_map.contiguous(), *boundary, out, log_sums,
            tiles, plan.segments, queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1),
            values.stride(0), values.stride(1),
            *key_cache.stride()[:3], num_heads, _base_2_scale(width, scale),
            num_packed * num_heads, **_sizes(length, group, width, row_tile), FIELDS=plan.FIELDS,
            **_options(queries, row_tile),
            **launch_options(queries.device),
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
    row_tile: int | None,
    *,
    out: Tensor | None = None,
    log_sums: Tensor | None = None,
    boundary: Boundary | None = None,
) -> None:
    num, length, num_heads, width = queries.shape
    if not num:
        return
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    if row_tile is None:
        row_tile = plan.row_tile(group, num_kv_heads, width, queries.element_size())
    tiles = plan.tiles(group, row_tile)
    if sequential is None:
        sequential = plan.runs_in_sequence(group, num_kv_heads, row_tile, width)
    num_states = num * length * num_heads
    unwritten = Boundary(
        queries, queries, queries
    )  # a kernel that leaves an argument unread still needs a pointer
    states = boundary if boundary is not None else unwritten
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
    sizes = _sizes(length, group, width, row_tile)
    common = {"TILES_PER_SPLIT": TILES_PER_SPLIT, "FIELDS": plan.FIELDS, "BOUNDARY": boundary is not None}
    strides = [stride for tensor in (queries, own, own_values) for stride in tensor.stride()[1:3]]
    attention_kernel[(len(tiles), num_kv_heads, 1 if sequential else plan.num_splits)](
        queries, own, own_values, key_cache, value_cache, result, sums, *split_states,
        tiles, plan.segments, *strides,
        *key_cache.stride()[:3], num_heads, _base_2_scale(width, scale),
        num_states, SEQUENTIAL=sequential, **sizes, **common, **_options(queries, row_tile),
            **launch_options(queries.device),
    )  # fmt: skip
    if not sequential:
        merge_kernel[(len(tiles), num_kv_heads, row_tile // _MERGED_ROWS)](
            *split_states, result, sums, *states, tiles, plan.segments, num_heads, num_states,
            **{**sizes, "ROWS": _MERGED_ROWS}, **common, AT_ONCE=_MERGED_AT_ONCE, num_warps=4,
            **launch_options(queries.device),
        )  # fmt: skip


def _base_2_scale(width: int, scale: float | None) -> float:
    """What takes a product to an exponent of 2: the scale times log2(e)."""
    scale = width**-0.5 if scale is None else scale
    if scale <= 0:
        raise ValueError(f"block_attention: scale {scale}; want a positive number")
    return scale * math.log2(math.e)


def _sizes(length: int, group: int, width: int, row_tile: int) -> dict[str, int]:
    return {
        "L": length, "GROUP": group, "WIDTH": width, "PADDED_WIDTH": power_of_two(width), "TILE": TILE_KEYS,
        "ROWS": row_tile,
    }  # fmt: skip


def _options(queries: Tensor, row_tile: int) -> dict[str, int]:
    """Pinned: a warp for 16 rows; three stages of 16-bit tiles, fewer where they fill shared memory."""
    width = power_of_two(queries.shape[-1])
    num_warps = row_tile // 16
    if queries.dtype == torch.float32:
        return {"num_warps": num_warps, "num_stages": 1 if width > 128 else 2}
    return {"num_warps": num_warps, "num_stages": _STAGES if width <= 128 else 2}


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
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"block_attention: {name} must be contiguous, its strides are {tensor.stride()}")
    for name, own in (("queries", queries), ("keys", keys), ("values", values)):
        if own is not None and num and own.stride(0) != length * own.stride(1):
            raise ValueError(
                f"block_attention: {name} have strides {own.stride()}; rows must be evenly spaced"
            )
    check_float_type("block_attention", queries=queries)
    check_rows_contiguous("block_attention", queries=queries, keys=keys, values=values)
    check_one_device("block_attention", queries=queries, keys=keys, key_cache=key_cache)
    return num, length, num_heads, width


assert SPLIT_KEYS == TILES_PER_SPLIT * TILE_KEYS
