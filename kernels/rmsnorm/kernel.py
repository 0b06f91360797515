"""Triton RMS normalisation of rows, statistics in fp32, one rounding.

    y = x / sqrt(mean(x²) + eps) * weight        (Zhang and Sennrich, arXiv 1910.07467)

A row is one tile of one width for each hidden size, so its bits depend on the row alone.
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

MAX_WIDTH = 16384


@triton.jit
def _rms_norm_kernel(
    x, weight, out, x_stride, row_count, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, HAS_COUNT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    if HAS_COUNT:
        if row >= tl.load(row_count):
            return
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    values = tl.load(x + row.to(tl.int64) * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, row_count: Tensor | None = None) -> Tensor:
    """``x`` [R, H] normalised along H and scaled by ``weight`` [H]; same dtype.

    Rows from ``row_count`` (int32 [1] on the device) on are not written. Raises ValueError for shapes, types, strides
    or devices that do not fit.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or not 0 < x.shape[1] <= MAX_WIDTH:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    check_float_type("rms_norm", x=x, weight=weight)
    check_rows_contiguous("rms_norm", x=x, weight=weight)
    check_one_device("rms_norm", x=x, weight=weight)
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        padded = power_of_two(width)
        _rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), x if row_count is None else row_count, eps, WIDTH=width, PADDED=padded,
            HAS_COUNT=row_count is not None, num_warps=8 if padded > 2048 else 4,
            **launch_options(x.device),
        )  # fmt: skip
    return out
