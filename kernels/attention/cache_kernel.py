"""Triton write of a pass's keys and values into the caches of a layer, both in one launch and without a look at the
slots from the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.attention.reference import TILE_KEYS
from dlmgrid.kernels.triton_support import check_one_device, check_rows_contiguous, power_of_two


@triton.jit
def _write_kernel(
    keys, values, key_cache, value_cache, slots, starts, key_stride, key_row_stride, key_head_stride, value_stride,
    value_row_stride, value_head_stride, slot_stride, tile_stride, head_stride,
    L: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (segments, key heads)."""
    segment = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + segment)
    if slot < 0:
        return
    start = tl.load(starts + segment)
    position = tl.arange(0, L)[:, None]
    columns = tl.arange(0, PADDED_WIDTH)[None, :]
    inside = (columns < WIDTH) & (position < L)
    segment = segment.to(tl.int64)
    key = tl.load(
        keys + segment * key_stride + position * key_row_stride + head * key_head_stride + columns,
        mask=inside,
    )
    value = tl.load(
        values + segment * value_stride + position * value_row_stride + head * value_head_stride + columns,
        mask=inside,
    )
    tile_at = (
        slot.to(tl.int64) * slot_stride + (start // TILE).to(tl.int64) * tile_stride + head * head_stride
    )
    at = tile_at + (start % TILE + position) * WIDTH + columns
    tl.store(key_cache + at, key, mask=inside)
    tl.store(value_cache + at, value, mask=inside)


def write_caches(
    key_cache: Tensor, value_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor, block_starts: Tensor
) -> None:
    """Put ``keys`` and ``values`` [N, L, Hkv, d] of N blocks into the caches in place, as the twin of this name.

    Args:
        key_cache, value_cache: contiguous [slots, tiles, Hkv, TILE_KEYS, d].
        slots: int32 [N]; a block whose slot is negative is not written.
        block_starts: int32 [N], multiples of L. Every (slot, start) at most once.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    num, length, heads, width = keys.shape
    if not 1 <= length <= TILE_KEYS or TILE_KEYS % length:
        raise ValueError(f"write_caches: block length {length} does not divide the key tile of {TILE_KEYS}")
    fits = keys.shape == values.shape and key_cache.shape == value_cache.shape
    if not fits or key_cache.shape[2:] != (heads, TILE_KEYS, width):
        raise ValueError(
            f"write_caches: keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if not slots.shape == block_starts.shape == (num,) or {slots.dtype, block_starts.dtype} != {torch.int32}:
        raise ValueError(
            f"write_caches: slots {tuple(slots.shape)} {slots.dtype}, starts {tuple(block_starts.shape)} "
            f"{block_starts.dtype}; want int32 [{num}]"
        )
    if len({keys.dtype, values.dtype, key_cache.dtype, value_cache.dtype}) > 1:
        raise ValueError("write_caches: keys, values and caches must be of one type")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("write_caches: the caches must be contiguous")
    check_rows_contiguous("write_caches", keys=keys, values=values, slots=slots, block_starts=block_starts)
    check_one_device(
        "write_caches", keys=keys, values=values, key_cache=key_cache, value_cache=value_cache, slots=slots,
        block_starts=block_starts,
    )  # fmt: skip
    if num:
        _write_kernel[(num, heads)](
            keys, values, key_cache, value_cache, slots, block_starts, *keys.stride()[:3], *values.stride()[:3],
            *key_cache.stride()[:3], L=length, WIDTH=width, PADDED_WIDTH=power_of_two(width), TILE=TILE_KEYS,
            num_warps=4,
        )  # fmt: skip
