"""Triton SwiGLU activation after a product: silu(gate) * up in one read, fp32 inside, one rounding.

Source: Shazeer, arXiv 2002.05202. An entry's bits depend on its gate and its input alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.dependent_launch import launch_options, wait_for_previous
from dlmgrid.kernels.gemm.epilogue import silu
from dlmgrid.kernels.triton_support import check_float_type, check_rows_contiguous, power_of_two

_TILE = 1024


@triton.jit
def _silu_gate_kernel(gate_up, out, row_stride, width, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (rows, tiles of the width)."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_gate(gate_up: Tensor) -> Tensor:
    """``gate_up`` [R, 2I], the gate in the first half of a row and the input in the second: [R, I], same dtype.

    Raises ValueError for another shape, a type that the kernels do not take or rows that are not contiguous.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_gate: want [R, 2 * I], got {tuple(gate_up.shape)}")
    check_float_type("silu_gate", gate_up=gate_up)
    check_rows_contiguous("silu_gate", gate_up=gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        tile = min(_TILE, power_of_two(width))
        _silu_gate_kernel[(rows, triton.cdiv(width, tile))](
            gate_up, out, gate_up.stride(0), width, TILE=tile, num_warps=4, **launch_options(out.device)
        )
    return out
