"""Triton kernel that puts the keys and values of a pass into the caches of a layer, where their segments store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.attention.reference import TILE_KEYS
from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.triton_support import check_one_device, check_rows_contiguous, power_of_two


@triton.jit
def _write_kernel(
    keys, values, key_cache, value_cache, slots, starts, row_map, key_stride, key_head_stride, value_stride,
    value_head_stride, slot_stride, tile_stride, head_stride,
    L: tl.constexpr, WIDTH: tl.constexpr, PADDED_L: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
    MAPPED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (segments, key heads): one block of one head."""
    wait_for_previous(OVERLAP)
    segment = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + segment).to(tl.int64)
    if slot < 0:
        return
    start = tl.load(starts + segment)
    rows = tl.arange(0, PADDED_L)
    columns = tl.arange(0, PADDED_WIDTH)
    mask = (rows < L)[:, None] & (columns < WIDTH)[None, :]
    row = segment.to(tl.int64) * L + rows
    if MAPPED:
        row = tl.load(row_map + row, mask=rows < L, other=0).to(tl.int64)
    at = slot * slot_stride + (start // TILE).to(tl.int64) * tile_stride + head * head_stride
    to = at + ((start % TILE + rows) * WIDTH)[:, None] + columns[None, :]
    key = tl.load(keys + row[:, None] * key_stride + head * key_head_stride + columns[None, :], mask=mask)
    tl.store(key_cache + to, key, mask=mask)
    value = tl.load(
        values + row[:, None] * value_stride + head * value_head_stride + columns[None, :], mask=mask
    )
    tl.store(value_cache + to, value, mask=mask)


def write_blocks(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, starts: Tensor,
    row_map: Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``keys`` and ``values`` [N, L, Hkv, d] of N blocks into caches [slots, tiles, Hkv, TILE_KEYS, d] in place.

    ``slots`` int32 [N], -1 where a block is not written; ``starts`` int32 [N], multiples of L. Every (slot, block) at
    most once. With ``row_map`` int32 [N, L] row r of the N · L comes from row ``row_map[r]`` of them.

    Raises ValueError for shapes, types, strides or devices that do not fit.
    """
    num, length, num_heads, width = keys.shape
    if (
        keys.shape != values.shape
        or key_cache.shape[2:] != (num_heads, TILE_KEYS, width)
        or TILE_KEYS % length
    ):
        raise ValueError(
            f"write_blocks: keys {tuple(keys.shape)}, values {tuple(values.shape)} and caches "
            f"{tuple(key_cache.shape)} do not fit"
        )
    if key_cache.shape != value_cache.shape or not (
        key_cache.is_contiguous() and value_cache.is_contiguous()
    ):
        raise ValueError("write_blocks: the caches must be contiguous and of one shape")
    if slots.shape != (num,) or starts.shape != (num,):
        raise ValueError(
            f"write_blocks: slots {tuple(slots.shape)}, starts {tuple(starts.shape)}; want [{num}]"
        )
    for name, part in (("keys", keys), ("values", values)):
        if num and part.stride(0) != length * part.stride(1):
            raise ValueError(f"write_blocks: {name} have strides {part.stride()}; rows must be evenly spaced")
    if row_map is not None and (row_map.shape != (num, length) or row_map.dtype != torch.int32):
        raise ValueError(f"write_blocks: row map {tuple(row_map.shape)} {row_map.dtype}; want int32 [N, L]")
    check_rows_contiguous("write_blocks", keys=keys, values=values)
    check_one_device(
        "write_blocks", keys=keys, values=values, key_cache=key_cache, slots=slots, starts=starts
    )
    if not num:
        return
    _write_kernel[(num, num_heads)](
        keys, values, key_cache, value_cache, slots, starts,
        slots if row_map is None else row_map.contiguous(), keys.stride(1), keys.stride(2), values.stride(1),
        values.stride(2), *key_cache.stride()[:3], L=length, WIDTH=width, PADDED_L=power_of_two(length),
        PADDED_WIDTH=power_of_two(width), TILE=TILE_KEYS, MAPPED=row_map is not None, num_warps=4,
        **launch_options(keys.device),
    )  # fmt: skip
