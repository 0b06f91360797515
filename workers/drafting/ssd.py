"""The confidence-ordered chain of Self Speculative Decoding (arXiv 2510.04147).

Node j is what j steps of the decoder would give if the stale distributions stayed as they are: with one commit a
step, the j most confident positions with their stale tokens. Every node is verified as a whole state; the short
cut that fills all k tokens at once and compares a prefix drifts from the decoder's order and is not used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED, num_masked, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import (
    Drafter,
    DraftInputs,
    Prediction,
    is_predicted_once,
    level_predictor,
    predict,
)


def chain_order(confidence: Tensor) -> Tensor:
    """The fp32 confidences that a chain is ordered by, as fp64 [..., L]; of equal ones the later position first.

    After the end of a text most confidences are 1 in fp32 and the order among them is a guess. Taking the later
    position first needed 1 % fewer passes than the earlier one or the unrounded order (smollm2-135m-bd32, 8
    GSM8K prompts, D = 8); the decoder's own ties still go to the earlier position.
    """
    positions = torch.arange(confidence.shape[-1], device=confidence.device)
    return confidence.double() + positions * 2.0**-40


ChooseStep = Callable[[Tensor, Prediction, int], tuple[Tensor, Tensor]]
"""Maps (states int32 [S, L], their prediction with W = 1, depth from 1) to the committed positions bool [S, L] and
the tokens int32 [S, L] put there."""


def grow_chain(inputs: DraftInputs, tree: DraftTree, choose_step: ChooseStep) -> None:
    """Append a chain of at most D states to every root with a valid snapshot, clipped before a complete state
    where the inputs allow none."""
    states = inputs.roots
    counts = inputs.commit_counts[:, None]
    log_mass = torch.zeros(states.shape[0], dtype=torch.float64, device=states.device)
    grows = inputs.snapshots.is_valid
    left = num_masked(states)
    predictor = level_predictor(inputs)
    prediction: Prediction | None = None
    log_probabilities = log_mass
    length = 0
    for depth in range(1, tree.budget + 1):
        before, prediction = prediction, predictor(inputs, counts)
        if prediction is not before:
            log_probabilities = prediction.first_probability[:, 0].double().log()
        selected, tokens = choose_step(states, prediction, depth)
        grows = grows & (left > 0)
        states = torch.where(selected, tokens, states)
        left = num_masked(states)
        if not inputs.allows_complete:
            grows = grows & (left > 0)
        if not bool(grows.any()):
            break
        length = depth
        log_mass = log_mass + torch.where(selected, log_probabilities, 0.0).sum(dim=-1)
        tree.tokens[:, depth] = states
        tree.log_mass[:, depth] = log_mass
        tree.num_nodes += grows
        counts = counts + selected.sum(dim=-1, keepdim=True)
    chain = slice(1, 1 + length)
    tree.hashes[:, chain] = state_hashes(tree.tokens[:, chain])
    depths = torch.arange(1, 1 + length, dtype=torch.int32, device=states.device)
    tree.parents[:, chain] = depths - 1
    tree.depths[:, chain] = depths


def write_sorted_chain(inputs: DraftInputs, tree: DraftTree, prediction: Prediction, order: Tensor) -> None:
    """What :func:`grow_chain` gives for one commit a step in a fixed ``order`` [S, L], all states at once.

    State j holds the j first masked positions of the order; of equals the lower position comes first.
    """
    roots = inputs.roots
    masked = roots == MASKED
    lengths = masked.sum(dim=-1) - (0 if inputs.allows_complete else 1)
    lengths = torch.where(inputs.snapshots.is_valid, lengths, 0).clamp(0, tree.budget)
    length = int(lengths.max())
    if length == 0:
        return
    by_rank = torch.where(masked, order, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(roots.shape[1], device=roots.device)
    ranks = torch.empty_like(by_rank).scatter_(1, by_rank, places.expand_as(by_rank))
    depths = torch.arange(1, 1 + length, dtype=torch.int32, device=roots.device)
    is_filled = masked[:, None] & (ranks[:, None] < depths[:, None])
    chain = slice(1, 1 + length)
    tree.tokens[:, chain] = torch.where(is_filled, prediction.first, roots[:, None])
    log_probabilities = prediction.first_probability[:, 0].double().log()
    tree.log_mass[:, chain] = log_probabilities.gather(1, by_rank[:, :length]).cumsum(dim=-1)
    tree.hashes[:, chain] = state_hashes(tree.tokens[:, chain])
    tree.parents[:, chain] = depths - 1
    tree.depths[:, chain] = depths
    tree.num_nodes += lengths


class ChainDrafter:
    """The chain in the order of the stale confidences, with the stale tokens."""

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Append the chain to every root with a valid snapshot."""
        if is_predicted_once(inputs) and inputs.rule.is_static and inputs.rule.max_commits == 1:
            prediction = predict(inputs, inputs.commit_counts[:, None])
            write_sorted_chain(inputs, tree, prediction, chain_order(prediction.confidence[:, 0]))
            return

        known: Prediction | None = None
        order = torch.empty(0)

        def choose_step(states: Tensor, prediction: Prediction, depth: int) -> tuple[Tensor, Tensor]:
            nonlocal known, order
            if prediction is not known:
                known, order = prediction, chain_order(prediction.confidence[:, 0])
            return inputs.rule.select(states == MASKED, order), prediction.first[:, 0]

        grow_chain(inputs, tree, choose_step)


def build() -> Drafter:
    """The chain drafter; it has no settings."""
    return ChainDrafter()
