"""Torch twin of RMS normalisation (Zhang and Sennrich 2019), statistics in fp32.

    y = x / sqrt(mean(x²) + eps) * weight

Every row is reduced by itself along its contiguous last dimension. Callers keep the number of rows a multiple
of 32 (kernels/gemm), so that no reduction changes its shape with what else is packed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [R, H] fp32 or bf16 normalised along H and scaled by ``weight`` [H]; same dtype, one rounding."""
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    values = x.float().contiguous()
    mean_square = (values * values).sum(-1, keepdim=True).div_(x.shape[1])
    scale = mean_square.add_(eps).sqrt_().reciprocal_()
    return (values * scale).mul_(weight.float()).to(x.dtype)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [R, heads, d] normalised head by head and scaled by ``weight`` [d]: the q/k norms."""
    rows, heads, width = x.shape
    return rms_norm(x.reshape(rows * heads, width), weight, eps).view(torch.Size((rows, heads, width)))
