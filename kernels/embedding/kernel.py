"""Triton token embedding; the sentinel -1 takes the mask token's row. Copies: the twin's bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.embedding.reference import MASKED
from dlmgrid.kernels.triton_support import check_one_device

_TILE = 1024


@triton.jit
def _embed_kernel(
    tokens, weight, out, mask_token_id, width, weight_stride, MASKED_TOKEN: tl.constexpr, TILE: tl.constexpr
):
    """Grid (rows, tiles of the hidden size)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    token = tl.where(token == MASKED_TOKEN, mask_token_id, token).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    tl.store(
        out + row * width + columns,
        tl.load(weight + token * weight_stride + columns, mask=inside),
        mask=inside,
    )


def embed(tokens: Tensor, weight: Tensor, mask_token_id: int) -> Tensor:
    """Rows of ``weight`` [V, H] at ``tokens`` [R] int32, the mask token's row where a token is -1: [R, H].

    The caller holds tokens to -1…V-1. Raises ValueError for other types, strides or devices.
    """
    if tokens.dim() != 1 or tokens.dtype != torch.int32 or not tokens.is_contiguous():
        raise ValueError(f"embed: tokens {tuple(tokens.shape)} {tokens.dtype}; want contiguous int32 [R]")
    if weight.dim() != 2 or weight.stride(1) != 1 or not 0 <= mask_token_id < weight.shape[0]:
        raise ValueError(
            f"embed: weight {tuple(weight.shape)} with strides {weight.stride()}, mask token {mask_token_id}; want "
            "contiguous rows [V, H] and a token of them"
        )
    check_one_device("embed", tokens=tokens, weight=weight)
    rows, width = tokens.shape[0], weight.shape[1]
    out = torch.empty((rows, width), dtype=weight.dtype, device=weight.device)
    if rows:
        _embed_kernel[(rows, triton.cdiv(width, _TILE))](
            tokens,
            weight,
            out,
            mask_token_id,
            width,
            weight.stride(0),
            MASKED_TOKEN=MASKED,
            TILE=_TILE,
            num_warps=4,
        )
    return out
