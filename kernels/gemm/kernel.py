"""Triton linear layer, with fused epilogues; a row's bits depend on the row alone.

    t[r, n] = sum over chunks c ascending of (sum over k in chunk c of x[r, k] * w[n, k], from zero), in fp32
    y = t + bias + residual, or silu(t) * t' with t' from the second half of the weight's rows; rounded once

Every tile of ``tiles`` adds in the same order, whichever operand of the matrix instruction the weights are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.kernels.gemm import descriptor_kernel, pointer_kernel
from dlmgrid.kernels.gemm.tiles import (
    CHUNK_WIDTH,
    MAX_STEP,
    DescriptorTile,
    PointerTile,
    choose_descriptor_tile,
    choose_pointer_tile,
)
from dlmgrid.kernels.triton_support import check_float_type, check_one_device, check_rows_contiguous


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    row_count: Tensor | None = None,
    expected_rows: int | None = None,
    tile: PointerTile | DescriptorTile | None = None,
    chunk_width: int = CHUNK_WIDTH,
) -> Tensor:
    """``x`` [R, K] times ``weight`` [N, K] transposed: [R, N] in ``out_dtype`` (that of ``x``).

    Args:
        x, weight: one of fp32 (no TF32), fp16, bf16; sums in fp32.
        bias: [N], added in fp32.
        residual: [R, N], added last, in fp32.
        gated: the weight is [2N, K], gate rows first: silu(gate) * up, [R, N]; takes no bias.
        row_count: int32 [1] on the device, the number of rows that hold data; rows from it on are not written.
        expected_rows: what a tile is chosen for in place of R, where ``row_count`` is likely to be less.
        tile: one of ``tiles``; by default shape, type and number of rows decide.
        chunk_width: columns of K summed from zero, a multiple of ``tiles.MAX_STEP``; bits depend on it.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit, or a tile that cannot take them.
    """
    num_rows, num_outputs = _check(x, weight, bias, residual, gated, chunk_width)
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    if tile is None:
        tiled_rows = min(expected_rows or num_rows, num_rows)
        if descriptor_kernel.can_take(x, weight):
            tile = choose_descriptor_tile(tiled_rows, *weight.shape, gated)
        else:
            tile = choose_pointer_tile(tiled_rows, weight.shape[0])
    if isinstance(tile, PointerTile):
        pointer_kernel.launch(
            x, weight, bias, residual, out, row_count, gated=gated, tile=tile, chunk_width=chunk_width
        )
        return out
    if not descriptor_kernel.can_take(x, weight):
        raise ValueError(
            "linear: a descriptor tile takes 16-bit operands with rows aligned to 16 bytes, on compute capability 9.0 "
            "or later; leave tile out"
        )
    descriptor_kernel.launch(
        x, weight, bias, residual, out, row_count, gated=gated, tile=tile, chunk_width=chunk_width
    )
    return out


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, chunk_width: int
) -> tuple[int, int]:
    """R and the number of outputs; ValueError for what does not fit."""
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
    if chunk_width < 1 or chunk_width % MAX_STEP:
        raise ValueError(f"linear: chunk_width {chunk_width} is not a multiple of {MAX_STEP}")
    check_float_type("linear", x=x)
    check_rows_contiguous("linear", x=x, bias=bias, residual=residual)
    check_one_device("linear", x=x, weight=weight, bias=bias, residual=residual)
    return x.shape[0], num_outputs
