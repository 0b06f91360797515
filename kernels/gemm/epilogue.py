"""What the Triton products do with a sum before they store it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), the exponent bounded so that it stays finite."""
    return x / (1.0 + tl.exp(tl.minimum(-x, 88.0)))


@triton.jit
def store(
    total, upper, bias, residual, out, rows, row_mask, outputs, output_mask, residual_stride, out_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The epilogue; ``upper`` is the second half of a gated product, unused otherwise."""
    mask = row_mask[:, None] & output_mask[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        at = residual + rows[:, None].to(tl.int64) * residual_stride + outputs[None, :]
        added = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        # spelt out: left to the compiler, one tile would round between product and sum and another would not
        total = tl.fma(silu(total), upper, added) if GATED else total + added
    elif GATED:
        total = silu(total) * upper
    at = out + rows[:, None].to(tl.int64) * out_stride + outputs[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)
