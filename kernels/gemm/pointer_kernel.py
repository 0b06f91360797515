"""Triton product with masked loads: any strides, any width, and fp32 without TF32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.gemm.epilogue import store
from dlmgrid.kernels.gemm.tiles import STEP_WIDTH, PointerTile


@triton.jit
def chunk_product(
    x, w, rows, row_mask, outputs, output_mask, first, stop, x_stride, w_stride, w_stride_k,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Columns first…stop of ``x[rows] @ w[outputs].T`` from zero: [ROWS, OUTPUTS] fp32."""
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    x_rows = x + rows[:, None].to(tl.int64) * x_stride
    w_rows = w + outputs[None, :].to(tl.int64) * w_stride
    for start in range(first, stop, STEP):
        columns = start + tl.arange(0, STEP)
        inside = columns < stop
        left = tl.load(x_rows + columns[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            w_rows + columns[:, None].to(tl.int64) * w_stride_k,
            mask=output_mask[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def all_chunks(
    x, w, rows, row_mask, outputs, output_mask, width, x_stride, w_stride, w_stride_k,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The whole product: chunk sums added in ascending order."""
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, width, CHUNK):
        stop = tl.minimum(first + CHUNK, width)
        total += chunk_product(
            x, w, rows, row_mask, outputs, output_mask, first, stop, x_stride, w_stride, w_stride_k,
            ROWS, OUTPUTS, STEP,
        )  # fmt: skip
    return total


@triton.jit
def _linear_kernel(
    x, w, bias, residual, out, num_rows, row_count, num_outputs, width,
    x_stride, w_stride, w_stride_k, residual_stride, out_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, HAS_COUNT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles): programs that read the same weights run side by side."""
    wait_for_previous(OVERLAP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if HAS_COUNT:
        num_rows = tl.minimum(num_rows, tl.load(row_count).to(tl.int32))
        if tl.program_id(0) * ROWS >= num_rows:
            return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_mask = rows < num_rows
    output_mask = outputs < num_outputs
    total = all_chunks(
        x, w, rows, row_mask, outputs, output_mask, width, x_stride, w_stride, w_stride_k,
        ROWS, OUTPUTS, STEP, CHUNK,
    )  # fmt: skip
    upper = total
    if GATED:
        upper = all_chunks(
            x, w, rows, row_mask, outputs + num_outputs, output_mask, width, x_stride, w_stride, w_stride_k,
            ROWS, OUTPUTS, STEP, CHUNK,
        )  # fmt: skip
    store(
        total, upper, bias, residual, out, rows, row_mask, outputs, output_mask, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, GATED,
    )  # fmt: skip


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    row_count: Tensor | None,
    *,
    gated: bool,
    tile: PointerTile,
    chunk_width: int,
) -> None:
    """Fill ``out`` [R, N]; arguments as in ``kernel.linear``, already checked."""
    num_rows, num_outputs = out.shape
    # an argument that the flags leave unread still needs a pointer
    _linear_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs))](
        x, weight, x if bias is None else bias, x if residual is None else residual, out,
        num_rows, x if row_count is None else row_count, num_outputs, x.shape[1],
        x.stride(0), weight.stride(0), weight.stride(1), 0 if residual is None else residual.stride(0), out.stride(0),
        ROWS=tile.rows, OUTPUTS=tile.outputs, STEP=STEP_WIDTH, CHUNK=chunk_width,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GATED=gated, HAS_COUNT=row_count is not None,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(x.device),
    )  # fmt: skip
