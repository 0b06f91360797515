"""Torch twin of the token embedding. A masked position is the sentinel -1, never the mask id: a prompt may
hold the mask id literally (sgl-project/sglang#39592)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MASKED = -1


def embed(tokens: Tensor, weight: Tensor, mask_token_id: int) -> Tensor:
    """Rows of ``weight`` [V, H] at ``tokens`` [R] int32, the mask token's row where a token is -1: [R, H]."""
    masked = tokens == MASKED
    return functional.embedding(torch.where(masked, mask_token_id, tokens), weight)
