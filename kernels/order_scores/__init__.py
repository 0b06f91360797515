"""Scores of SPOT's order model for many states at once: twin and kernels, fp64."""

from dlmgrid.kernels.order_scores.reference import (
    NUM_STALE,
    OrderWeights,
    order_scores,
    path_features,
    stale_features,
)

__all__ = ["NUM_STALE", "OrderWeights", "order_scores", "path_features", "stale_features"]
