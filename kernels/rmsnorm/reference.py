"""Torch twin of RMS normalisation (Zhang and Sennrich 2019), statistics in fp32.

    y = x / sqrt(mean(x²) + eps) * weight

Every row is reduced by itself along its contiguous last dimension. Callers keep the number of rows a multiple
of 32 (kernels/gemm), so that no reduction changes its shape with what else is packed.
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [R, H] fp32 or bf16 normalised along H and scaled by ``weight`` [H]; same dtype, one rounding."""
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    return _normalised(x, eps).mul_(weight.float()).to(x.dtype)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [R, heads, d] normalised head by head, head h scaled by ``weight[h]`` ([heads, d]); same
    dtype.
    """
    if x.dim() != 3 or weight.shape != x.shape[1:]:
        raise ValueError(f"head_rms_norm: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    return _normalised(x, eps).mul_(weight.float()).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    """``x`` in fp32 over its root mean square along the last dimension, a new tensor."""
    values = x.float().contiguous()
    mean_square = (values * values).sum(-1, keepdim=True).div_(x.shape[-1])
    return values * mean_square.add_(eps).sqrt_().reciprocal_()
