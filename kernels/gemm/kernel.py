"""Triton linear layer, with the reduction tree of the torch twin and fused epilogues.

    t[r, n] = sum over chunks c ascending of (sum over k in chunk c of x[r, k] * w[n, k], from zero), in fp32
    y = t + bias + residual, or silu(t) * t' with t' from the second half of the weight's rows; rounded once

A row's bits depend on the row alone: every tile of ``tiles.TILES`` adds in the same order, and whether one program
runs the chunks of K or several do makes no difference, since the chunk sums are added in ascending order either way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.gemm.reference import CHUNK_WIDTH
from dlmgrid.kernels.gemm.tiles import STEP_WIDTH, Tile, choose_tile
from dlmgrid.kernels.triton_support import check_float_type, check_one_device, check_rows_contiguous


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
def silu(x):
    """x / (1 + exp(-x)), the exponent bounded so that it stays finite."""
    return x / (1.0 + tl.exp(tl.minimum(-x, 88.0)))


@triton.jit
def _store(
    total, upper, bias, residual, out, rows, row_mask, outputs, output_mask, residual_stride, out_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The epilogue; ``upper`` is the second half of a gated product, unused otherwise."""
    mask = row_mask[:, None] & output_mask[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = silu(total) * upper
    if HAS_RESIDUAL:
        at = residual + rows[:, None].to(tl.int64) * residual_stride + outputs[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = out + rows[:, None].to(tl.int64) * out_stride + outputs[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _linear_kernel(
    x, w, bias, residual, out, num_rows, row_count, num_outputs, width,
    x_stride, w_stride, w_stride_k, residual_stride, out_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles): programs that read the same weights run side by side."""
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
    _store(
        total, upper, bias, residual, out, rows, row_mask, outputs, output_mask, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, GATED,
    )  # fmt: skip


@triton.jit
def _chunk_kernel(
    x, w, partial, plane, num_rows, row_count, num_outputs, width, x_stride, w_stride, w_stride_k,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles, chunks): one chunk sum into ``partial`` [chunks, R, N] fp32, R · N = ``plane``."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if HAS_COUNT:
        num_rows = tl.minimum(num_rows, tl.load(row_count).to(tl.int32))
        if tl.program_id(0) * ROWS >= num_rows:
            return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_mask = rows < num_rows
    output_mask = outputs < num_outputs
    first = tl.program_id(2) * CHUNK
    total = chunk_product(
        x, w, rows, row_mask, outputs, output_mask, first, tl.minimum(first + CHUNK, width),
        x_stride, w_stride, w_stride_k, ROWS, OUTPUTS, STEP,
    )  # fmt: skip
    at = partial + tl.program_id(2).to(tl.int64) * plane
    at += rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(at, total, mask=row_mask[:, None] & output_mask[None, :])


@triton.jit
def _sum_kernel(
    partial, plane, bias, residual, out, num_rows, row_count, num_outputs, num_chunks,
    residual_stride, out_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles): chunk sums in ascending order, then the epilogue."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if HAS_COUNT:
        num_rows = tl.minimum(num_rows, tl.load(row_count).to(tl.int32))
        if tl.program_id(0) * ROWS >= num_rows:
            return
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_mask = rows < num_rows
    output_mask = outputs < num_outputs
    mask = row_mask[:, None] & output_mask[None, :]
    partial_width = 2 * num_outputs if GATED else num_outputs
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    upper = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    at = partial + rows[:, None].to(tl.int64) * partial_width + outputs[None, :]
    for _ in range(num_chunks):
        total += tl.load(at, mask=mask, other=0.0)
        if GATED:
            upper += tl.load(at + num_outputs, mask=mask, other=0.0)
        at += plane
    _store(
        total, upper, bias, residual, out, rows, row_mask, outputs, output_mask, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL, GATED,
    )  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    row_count: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``x`` [R, K] times ``weight`` [N, K] transposed: [R, N] in ``out_dtype`` (that of ``x``).

    Args:
        x, weight: one of fp32 (no TF32), fp16, bf16; sums in fp32.
        bias: [N], added in fp32.
        residual: [R, N], added last, in fp32.
        gated: the weight is [2N, K], gate rows first: silu(gate) * up, [R, N]; takes no bias.
        row_count: int32 [1] on the device, the number of rows that hold data; rows from it on are not written.
        tile: one of ``tiles.TILES``; by default the number of rows decides.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    num_rows, width, num_outputs = _check(x, weight, bias, residual, gated)
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    num_chunks = -(-width // CHUNK_WIDTH)
    tile = tile or choose_tile(num_rows, weight.shape[0], num_chunks)
    strides = (x.stride(0), weight.stride(0), weight.stride(1))
    residual_stride = residual.stride(0) if residual is not None else 0
    # an argument that the flags leave unread still needs a pointer
    count = row_count if row_count is not None else x
    flags = {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "HAS_COUNT": row_count is not None,
    }
    bias = x if bias is None else bias
    residual = x if residual is None else residual
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    row_tiles = triton.cdiv(num_rows, tile.rows)
    grid = (row_tiles, triton.cdiv(num_outputs, tile.outputs))
    if not tile.splits_k:
        _linear_kernel[grid](
            x, weight, bias, residual, out, num_rows, count, num_outputs, width, *strides, residual_stride,
            out.stride(0), ROWS=tile.rows, OUTPUTS=tile.outputs, STEP=STEP_WIDTH, CHUNK=CHUNK_WIDTH, **flags,
            **options,
        )  # fmt: skip
        return out
    partial = torch.empty((num_chunks, num_rows, weight.shape[0]), dtype=torch.float32, device=x.device)
    _chunk_kernel[(row_tiles, triton.cdiv(weight.shape[0], tile.outputs), num_chunks)](
        x, weight, partial, num_rows * weight.shape[0], num_rows, count, weight.shape[0], width, *strides,
        ROWS=tile.rows, OUTPUTS=tile.outputs, STEP=STEP_WIDTH, CHUNK=CHUNK_WIDTH, HAS_COUNT=flags["HAS_COUNT"],
        **options,
    )  # fmt: skip
    _sum_kernel[grid](
        partial, num_rows * weight.shape[0], bias, residual, out, num_rows, count, num_outputs, num_chunks,
        residual_stride, out.stride(0), ROWS=tile.rows, OUTPUTS=tile.outputs, **flags, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool
) -> tuple[int, int, int]:
    """R, K and the number of outputs; ValueError for what does not fit."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not x.shape[1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} (want [R, K], [N, K])"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"linear: x is {x.dtype}, weight {weight.dtype}; they must be one type")
    if gated and (bias is not None or weight.shape[0] % 2):
        raise ValueError("linear: a gated product takes [2N, K] weights and no bias")
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if bias is not None and bias.shape != (num_outputs,):
        raise ValueError(f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    if residual is not None and residual.shape != (x.shape[0], num_outputs):
        raise ValueError(f"linear: residual {tuple(residual.shape)}; want {(x.shape[0], num_outputs)}")
    check_float_type("linear", x=x)
    check_rows_contiguous("linear", x=x, bias=bias, residual=residual)
    check_one_device("linear", x=x, weight=weight, bias=bias, residual=residual)
    return x.shape[0], x.shape[1], num_outputs
