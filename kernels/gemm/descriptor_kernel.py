"""Triton product that loads tiles by tensor descriptors: 16-bit operands on compute capability 9.0 and later.

Powers of two fit the rows of a pass badly (288, 672), so a row tile is the sum of up to three pieces, each a power of
two; the pieces of a program share every weight tile that it loads. With ``swapped`` the weights are the left operand of
the matrix instruction, whose right one may be as narrow as a piece of 16 rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.gemm.epilogue import store
from dlmgrid.kernels.gemm.tiles import DescriptorTile
from dlmgrid.kernels.triton_support import is_interpreted

ALIGNMENT = 16
"""Bytes: of the first element and of the distance between rows."""


@triton.jit
def _zeros(ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SWAPPED: tl.constexpr):
    return tl.zeros((OUTPUTS, ROWS) if SWAPPED else (ROWS, OUTPUTS), dtype=tl.float32)


@triton.jit
def _multiply(x, w, total, SWAPPED: tl.constexpr):
    """``total`` plus the product of ``x`` [ROWS, STEP] and ``w`` [OUTPUTS, STEP], transposed if SWAPPED."""
    return tl.dot(w, x.T, total) if SWAPPED else tl.dot(x, w.T, total)


@triton.jit
def _columns(
    x0, x1, x2, w, row, output, upper_output, first, stop,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    SWAPPED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Columns first…stop of the product from zero: three pieces, then three of the gated half; absent ones alias."""
    total0 = _zeros(ROWS0, OUTPUTS, SWAPPED)
    total1 = total0
    total2 = total0
    upper0 = total0
    upper1 = total0
    upper2 = total0
    if ROWS1:
        total1 = _zeros(ROWS1, OUTPUTS, SWAPPED)
        upper1 = total1
    if ROWS2:
        total2 = _zeros(ROWS2, OUTPUTS, SWAPPED)
        upper2 = total2
    for start in range(first, stop, STEP):
        weights = w.load([output, start])
        upper_weights = weights
        if GATED:
            upper_weights = w.load([upper_output, start])
        piece0 = x0.load([row, start])
        total0 = _multiply(piece0, weights, total0, SWAPPED)
        if GATED:
            upper0 = _multiply(piece0, upper_weights, upper0, SWAPPED)
        if ROWS1:
            piece1 = x1.load([row + ROWS0, start])
            total1 = _multiply(piece1, weights, total1, SWAPPED)
            if GATED:
                upper1 = _multiply(piece1, upper_weights, upper1, SWAPPED)
        if ROWS2:
            piece2 = x2.load([row + ROWS0 + ROWS1, start])
            total2 = _multiply(piece2, weights, total2, SWAPPED)
            if GATED:
                upper2 = _multiply(piece2, upper_weights, upper2, SWAPPED)
    return total0, total1, total2, upper0, upper1, upper2


@triton.jit
def _store_piece(
    total, upper, bias, residual, out, first_row, num_rows, output, num_outputs, residual_stride, out_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SWAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    if SWAPPED:
        total = total.T
        upper = upper.T
    rows = first_row + tl.arange(0, ROWS)
    outputs = output + tl.arange(0, OUTPUTS)
    store(
        total, upper, bias, residual, out, rows, rows < num_rows, outputs, outputs < num_outputs,
        residual_stride, out_stride, HAS_BIAS, HAS_RESIDUAL, GATED,
    )  # fmt: skip


@triton.jit
def _descriptor_kernel(
    x0, x1, x2, w, bias, residual, out, num_rows, row_count, num_outputs, width, residual_stride, out_stride,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    CHUNK: tl.constexpr, SWAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, HAS_COUNT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles): programs that read the same weights run side by side. CHUNK 0: K is one chunk."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * (ROWS0 + ROWS1 + ROWS2)
    output = tl.program_id(1) * OUTPUTS
    if HAS_COUNT:
        num_rows = tl.minimum(num_rows, tl.load(row_count).to(tl.int32))
        if row >= num_rows:
            return
    total0, total1, total2, upper0, upper1, upper2 = _columns(
        x0, x1, x2, w, row, output, output + num_outputs, 0, CHUNK if CHUNK else width,
        ROWS0, ROWS1, ROWS2, OUTPUTS, STEP, SWAPPED, GATED,
    )  # fmt: skip
    if CHUNK:
        for first in range(CHUNK, width, CHUNK):
            part0, part1, part2, other0, other1, other2 = _columns(
                x0, x1, x2, w, row, output, output + num_outputs, first, tl.minimum(first + CHUNK, width),
                ROWS0, ROWS1, ROWS2, OUTPUTS, STEP, SWAPPED, GATED,
            )  # fmt: skip
            total0 += part0
            if ROWS1:
                total1 += part1
            if ROWS2:
                total2 += part2
            if GATED:
                upper0 += other0
                if ROWS1:
                    upper1 += other1
                if ROWS2:
                    upper2 += other2
    _store_piece(
        total0, upper0, bias, residual, out, row, num_rows, output, num_outputs, residual_stride, out_stride,
        ROWS0, OUTPUTS, SWAPPED, HAS_BIAS, HAS_RESIDUAL, GATED,
    )  # fmt: skip
    if ROWS1:
        _store_piece(
            total1, upper1, bias, residual, out, row + ROWS0, num_rows, output, num_outputs, residual_stride,
            out_stride, ROWS1, OUTPUTS, SWAPPED, HAS_BIAS, HAS_RESIDUAL, GATED,
        )  # fmt: skip
    if ROWS2:
        _store_piece(
            total2, upper2, bias, residual, out, row + ROWS0 + ROWS1, num_rows, output, num_outputs,
            residual_stride, out_stride, ROWS2, OUTPUTS, SWAPPED, HAS_BIAS, HAS_RESIDUAL, GATED,
        )  # fmt: skip


def can_take(x: Tensor, weight: Tensor) -> bool:
    """Whether descriptors describe these operands here: 16-bit types, aligned rows, a device that has them."""
    return (
        x.element_size() == 2
        and _has_descriptors(x.device)
        and all(
            tensor.stride(1) == 1
            and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
            and tensor.data_ptr() % ALIGNMENT == 0
            for tensor in (x, weight)
        )
    )


@functools.lru_cache(maxsize=64)
def _has_descriptors(device: torch.device) -> bool:
    if device.type != "cuda":
        return is_interpreted()
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    row_count: Tensor | None,
    *,
    gated: bool,
    tile: DescriptorTile,
    chunk_width: int,
) -> None:
    """Fill ``out`` [R, N]; arguments as in ``kernel.linear``, already checked.

    Descriptors are kernel arguments by value, so a captured launch holds its own.
    """
    num_rows, num_outputs = out.shape
    pieces = [TensorDescriptor.from_tensor(x, [rows, tile.step]) for rows in tile.pieces]
    sizes = tile.pieces + (0,) * (3 - len(pieces))
    absent = (None,) * (3 - len(pieces))
    weights = TensorDescriptor.from_tensor(weight, [tile.outputs, tile.step])
    # an argument that the flags leave unread still needs a pointer
    _descriptor_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs))](
        *pieces, *absent, weights, x if bias is None else bias, x if residual is None else residual, out,
        num_rows, x if row_count is None else row_count, num_outputs, x.shape[1],
        0 if residual is None else residual.stride(0), out.stride(0),
        ROWS0=sizes[0], ROWS1=sizes[1], ROWS2=sizes[2], OUTPUTS=tile.outputs, STEP=tile.step,
        CHUNK=chunk_width if x.shape[1] > chunk_width else 0, SWAPPED=tile.swapped,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GATED=gated, HAS_COUNT=row_count is not None,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(x.device),
    )  # fmt: skip
