"""SPOT (arXiv 2610.22543): the D states of largest mass under a trained order model.

The growth is that of ``growth``: level by level, equal states merged, a second token tried where the first has a
stale probability below 0.6. Only q(s | y) differs from the confidence tree. With a model that reads tokens the method
is that of ``spot_tokens``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import commit_hashes, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.device_growth import DeviceGrowth, order_weights, place_growth
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs, DraftSetting, Prediction
from dlmgrid.workers.drafting.growth import grow
from dlmgrid.workers.drafting.order_checkpoint import load_order_model
from dlmgrid.workers.drafting.order_model import OrderModel, ScoreMemo, log_next_position, root_features
from dlmgrid.workers.drafting.placed_model import PlacedModel
from dlmgrid.workers.drafting.spot_tokens import TokenDrafter
from dlmgrid.workers.drafting.token_model import TokenModel


class SpotDrafter:
    """The D states of largest mass; with ``min_log_mass`` only those of at least that log mass.

    Args:
        model: the order model; it is held in fp64.
    """

    def __init__(self, model: OrderModel, *, min_log_mass: float = -torch.inf) -> None:
        self._model = model.double().eval()
        self._min_log_mass = min_log_mass
        self._memo: ScoreMemo | None = None
        self._placed: PlacedModel | None = None
        self._growth: DeviceGrowth | None = None

    def place(self, device: torch.device, setting: DraftSetting | None = None) -> str:
        """Grow trees on ``device`` where ``setting`` allows it, else compute scores there, whatever device the states
        are on. Returns where trees grow."""
        self._growth, where = place_growth(
            device, setting, lambda: order_weights(self._model, device), min_log_mass=self._min_log_mass
        )
        self._placed = None if self._growth else PlacedModel(self._model, device)
        return where

    def share(self, memo: ScoreMemo) -> None:
        """Keep scores in ``memo``, and take those that drafters of the same model left there (replay only)."""
        self._memo = memo

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        if self._growth is not None:
            self._growth.grow(inputs, tree)
            return
        model = self._placed or self._model.to(inputs.roots.device)
        memo = self._memo
        root_keys = None if memo is None else _root_keys(inputs)
        known = root_features(model, inputs.snapshots)

        def order(states: Tensor, eligible: Tensor, _: Prediction) -> Tensor:
            return log_next_position(
                model,
                inputs.snapshots,
                inputs.roots,
                states,
                eligible,
                memo=memo,
                root_keys=root_keys,
                known=known,
            )

        grow(inputs, tree, order, min_log_mass=self._min_log_mass)


def _root_keys(inputs: DraftInputs) -> Tensor:
    """int64 [S]: which recorded step each root is and from which snapshot it is drafted, as a hash of both."""
    snapshots = inputs.snapshots
    words = inputs.keys[:, 0] * 2**32 + inputs.keys[:, 1]
    keys = state_hashes(inputs.roots) + commit_hashes(words + inputs.block_starts, inputs.block_starts)
    for values in (snapshots.probabilities[..., 0], snapshots.entropy):
        bits = torch.where(snapshots.masked, values, -1.0).contiguous().view(torch.int32)
        keys = commit_hashes(keys, state_hashes(bits).clamp_min(0))
    return keys


def make_drafter(
    model: OrderModel | TokenModel, *, min_log_mass: float = -torch.inf
) -> SpotDrafter | TokenDrafter:
    """The drafter for a model of either kind."""
    if isinstance(model, TokenModel):
        return TokenDrafter(model, min_log_mass=min_log_mass)
    return SpotDrafter(model, min_log_mass=min_log_mass)


def build(checkpoint: Path) -> Drafter:
    """SPOT with the order model at ``checkpoint``. Raises InputError for a file that is none."""
    return make_drafter(load_order_model(checkpoint))
