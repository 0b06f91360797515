"""Drafters that look into the future: upper bounds that say what a method lacks, order or tokens.

They exist in replay only, where the serialized run is known.

- ``oracle_position``: a chain through the positions that the target will commit, with the stale tokens there.
- ``oracle_token``: the confidence tree with the tokens that the target will commit.
- ``stale_order``: a chain in the order of the stale confidences, with the tokens that the target will commit.

Source of the first two: the diagnosis of SPOT, arXiv 2610.22543.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.confidence_tree import stale_confidence_order
from dlmgrid.workers.drafting.drafter import DraftInputs, Prediction, predict
from dlmgrid.workers.drafting.growth import grow
from dlmgrid.workers.drafting.ssd import chain_order, grow_chain
from dlmgrid.workers.trajectories.replay import DraftWithFuture, Future


def oracle_position(inputs: DraftInputs, tree: DraftTree, future: Future) -> None:
    """The target's own positions, step by step, with stale tokens."""

    def choose_step(states: Tensor, prediction: Prediction, depth: int) -> tuple[Tensor, Tensor]:
        return future.steps_ahead == depth - 1, prediction.first[:, 0]

    grow_chain(inputs, tree, choose_step)


def stale_order(inputs: DraftInputs, tree: DraftTree, future: Future) -> None:
    """The most confident stale positions, step by step, with the target's own tokens."""

    def choose_step(states: Tensor, prediction: Prediction, depth: int) -> tuple[Tensor, Tensor]:
        selected = inputs.rule.select(states == MASKED, chain_order(prediction.confidence[:, 0]))
        return selected, future.tokens

    grow_chain(inputs, tree, choose_step)


def oracle_token(inputs: DraftInputs, tree: DraftTree, future: Future) -> None:
    """The confidence tree, certain of the target's own tokens."""

    def predict_truth(states: Tensor, commit_counts: Tensor, is_asked: Tensor) -> Prediction:
        stale = predict(inputs, commit_counts)
        tokens = future.tokens[:, None].expand_as(stale.first)
        certain = torch.ones_like(stale.first_probability)
        return stale._replace(
            first=tokens,
            second=tokens,
            first_probability=certain,
            second_probability=torch.zeros_like(certain),
        )

    grow(inputs, tree, stale_confidence_order, predictor=predict_truth)


DIAGNOSTIC_DRAFTERS: dict[str, DraftWithFuture] = {
    "oracle_position": oracle_position,
    "oracle_token": oracle_token,
    "stale_order": stale_order,
}
