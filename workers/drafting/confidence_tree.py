"""The confidence tree: level-wise top-D growth whose order model is the stale confidence.

q(s | y) is the stale confidence of position s over the sum of the confidences still masked in y. That makes the
order model the only difference to SPOT (methods compared under one verifier in arXiv 2610.22543, where this stands
for BlockSpec's tree).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.device_growth import DeviceGrowth, place_growth
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs, DraftSetting, Prediction
from dlmgrid.workers.drafting.growth import grow


def stale_confidence_order(states: Tensor, eligible: Tensor, prediction: Prediction) -> Tensor:
    """log q fp64 [S, W, L]: stale confidences normalised over the eligible positions, -inf elsewhere."""
    confidence = torch.where(eligible, prediction.unrounded_confidence, 0.0)
    return (
        confidence / confidence.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    ).log()


class ConfidenceTreeDrafter:
    """The D states of largest mass under the stale confidences."""

    def __init__(self) -> None:
        self._growth: DeviceGrowth | None = None

    def place(self, device: torch.device, setting: DraftSetting | None = None) -> str:
        """Grow trees on ``device`` where ``setting`` allows it. Returns where trees grow."""
        self._growth, where = place_growth(device, setting, None)
        return where

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        if self._growth is not None:
            self._growth.grow(inputs, tree)
            return
        grow(inputs, tree, stale_confidence_order)


def build() -> Drafter:
    """The confidence tree; it has no settings."""
    return ConfidenceTreeDrafter()
