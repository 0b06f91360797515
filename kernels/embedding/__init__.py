"""Token embedding, with masked positions as a sentinel."""

from dlmgrid.kernels.embedding.reference import MASKED, embed

__all__ = ["MASKED", "embed"]
