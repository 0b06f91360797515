"""Triton rotary embedding of query and key heads, with their norms where the model has them, in one pass.

    z = x / sqrt(mean(x²) + eps) * weight, or x            (a head at a time)
    y[i] = z[i] cos - z[i + r/2] sin,  y[i + r/2] = z[i + r/2] cos + z[i] sin for i < r/2;  y = z beyond r

in fp32, rounded once (the twins round after the norm as well). r < d turns part of a head (partial RoPE).
Source: Su et al., arXiv 2104.09864; the half-split form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.triton_support import (
    check_float_type,
    check_one_device,
    check_rows_contiguous,
    power_of_two,
)

_HEADS = 8  # heads of a program


@triton.jit
def _norm_rotary_kernel(
    x, weight, cosines, sines, positions, out, x_stride, x_head_stride, num_heads, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_POSITIONS: tl.constexpr, IS_WHOLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles of heads). IS_WHOLE: all of a head is turned, and half of it is a power of two."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    position = row
    if HAS_POSITIONS:
        position = tl.load(positions + row).to(tl.int64)
        if position < 0:
            return
    x_at = x + row * x_stride + heads * x_head_stride
    out_at = out + (row * num_heads + heads) * WIDTH
    weight_at = weight + heads * WIDTH
    if IS_WHOLE:
        columns = tl.arange(0, HALF)[None, :]
        held = (heads < num_heads) & (columns < HALF)
        low = tl.load(x_at + columns, mask=held, other=0.0).to(tl.float32)
        high = tl.load(x_at + HALF + columns, mask=held, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + position * HALF + columns)
        sine = tl.load(sines + position * HALF + columns)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt_rn(tl.sum(low * low + high * high, 1) / WIDTH + eps)
            low *= scale[:, None] * tl.load(weight_at + columns, mask=held, other=0.0).to(tl.float32)
            high *= scale[:, None] * tl.load(weight_at + HALF + columns, mask=held, other=0.0).to(tl.float32)
        turned = low * cosine - high * sine
        tl.store(out_at + columns, turned.to(out.dtype.element_ty), mask=held)
        turned = high * cosine + low * sine
        tl.store(out_at + HALF + columns, turned.to(out.dtype.element_ty), mask=held)
    else:
        columns = tl.arange(0, PADDED)[None, :]
        held = (heads < num_heads) & (columns < WIDTH)
        is_low = columns < HALF
        is_turned = columns < 2 * HALF
        partner = tl.where(is_low, columns + HALF, tl.where(is_turned, columns - HALF, columns))
        values = tl.load(x_at + columns, mask=held, other=0.0).to(tl.float32)
        others = tl.load(x_at + partner, mask=held, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / WIDTH + eps)
            values *= scale[:, None] * tl.load(weight_at + columns, mask=held, other=0.0).to(tl.float32)
            others *= scale[:, None] * tl.load(weight_at + partner, mask=held, other=0.0).to(tl.float32)
        angle = position * HALF + columns % HALF
        cosine = tl.load(cosines + angle, mask=is_turned, other=1.0)
        sine = tl.load(sines + angle, mask=is_turned, other=0.0)
        turned = values * cosine + tl.where(is_low, -others, others) * sine
        result = tl.where(is_turned, turned, values)
        tl.store(out_at + columns, result.to(out.dtype.element_ty), mask=held)


def norm_rotary(
    x: Tensor,
    weight: Tensor | None,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor | None,
    eps: float,
) -> Tensor:
    """``x`` [R, heads, d] normalised by head (``weight`` [heads, d], or None) and turned: [R, heads, d], same dtype.

    Args:
        cosines, sines: fp32 [P, r/2], the tables of ``rotary_tables``.
        positions: int32 or int64 [R], rows of the tables; None: row r of ``x`` takes row r. A row of position -1 is
            not written.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    half = cosines.shape[1]
    if x.dim() != 3 or 2 * half > x.shape[2] or sines.shape != cosines.shape or not half:
        raise ValueError(f"norm_rotary: x {tuple(x.shape)} does not fit tables {tuple(cosines.shape)}")
    if weight is not None and weight.shape != x.shape[1:]:
        raise ValueError(f"norm_rotary: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if positions is None:
        if cosines.shape[0] < x.shape[0]:
            raise ValueError(f"norm_rotary: {x.shape[0]} rows, tables of {cosines.shape[0]}")
    elif positions.shape != x.shape[:1] or positions.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise ValueError(
            f"norm_rotary: positions {tuple(positions.shape)} {positions.dtype}; want integers [R]"
        )
    if not (
        cosines.dtype == sines.dtype == torch.float32 and cosines.is_contiguous() and sines.is_contiguous()
    ):
        raise ValueError("norm_rotary: tables must be contiguous float32")
    check_float_type("norm_rotary", x=x, weight=weight)
    check_rows_contiguous("norm_rotary", x=x)
    check_one_device("norm_rotary", x=x, weight=weight, cosines=cosines, sines=sines, positions=positions)
    if weight is not None and not weight.is_contiguous():
        raise ValueError("norm_rotary: weight must be contiguous")
    rows, heads, width = x.shape
    out = torch.empty((rows, heads, width), dtype=x.dtype, device=x.device)
    if rows:
        tile = min(_HEADS, power_of_two(heads))
        _norm_rotary_kernel[(rows, triton.cdiv(heads, tile))](
            x, x if weight is None else weight, cosines, sines, x if positions is None else positions, out,
            x.stride(0), x.stride(1), heads, eps, HEADS=tile, WIDTH=width, PADDED=power_of_two(width), HALF=half,
            HAS_NORM=weight is not None, HAS_POSITIONS=positions is not None,
            IS_WHOLE=2 * half == width and half == power_of_two(half), num_warps=4, **launch_options(x.device),
        )  # fmt: skip
    return out
