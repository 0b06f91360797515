"""SPOT (arXiv 2610.22543): the D states of largest mass under a trained order model.

The growth is that of ``growth``: level by level, equal states merged, a second token tried where the first has a
stale probability below 0.6. Only q(s | y) differs from the confidence tree.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs, Prediction
from dlmgrid.workers.drafting.growth import grow
from dlmgrid.workers.drafting.order_checkpoint import load_order_model
from dlmgrid.workers.drafting.order_model import OrderModel, log_next_position


class SpotDrafter:
    """The D states of largest mass; with ``min_log_mass`` only those of at least that log mass.

    Args:
        model: the order model; it is held in fp64.
    """

    def __init__(self, model: OrderModel, *, min_log_mass: float = -torch.inf) -> None:
        self._model = model.double().eval()
        self._min_log_mass = min_log_mass

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        model = self._model.to(inputs.roots.device)

        def order(states: Tensor, eligible: Tensor, _: Prediction) -> Tensor:
            return log_next_position(model, inputs.snapshots, inputs.roots, states, eligible)

        grow(inputs, tree, order, min_log_mass=self._min_log_mass)


def build(checkpoint: Path) -> Drafter:
    """SPOT with the order model at ``checkpoint``. Raises InputError for a file that is none."""
    return SpotDrafter(load_order_model(checkpoint))
