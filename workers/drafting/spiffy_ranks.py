"""Ranks of Spiffy's candidates: positions by stale confidence, tokens by what the target would draw.

A candidate (i, j) is the j-th token of the i-th position. Positions masked in the root are ranked by their top-1
stale probability, whatever the temperature, ties to the lowest. Tokens are ranked by stale probability at T = 0 and
by the perturbed score at T > 0, under the noise of the commit at which the token would be drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.drafter import DraftInputs, perturbed_scores


def positions_by_rank(inputs: DraftInputs) -> Tensor:
    """int64 [S, L]: the positions masked in each root, most confident first; the others follow."""
    snapshots = inputs.snapshots
    others = snapshots.probabilities[..., 1:].double().sum(dim=-1) + snapshots.tail_mass.double()
    confidence = torch.where(inputs.roots == MASKED, 1 - others, -torch.inf)
    return confidence.sort(dim=-1, descending=True, stable=True).indices


def tokens_by_rank(inputs: DraftInputs, commit_counts: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens int32 and raw stale probabilities fp32 of the first ranks, both [S, L, num_ranks].

    Args:
        commit_counts: int64 [S].
    """
    snapshots = inputs.snapshots
    if inputs.temperature == 0:
        return snapshots.token_ids[..., :num_ranks].to(torch.int32), snapshots.probabilities[..., :num_ranks]
    scores = perturbed_scores(inputs, commit_counts[:, None])[:, 0]
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices[..., :num_ranks]
    return snapshots.token_ids.gather(-1, ranked).to(torch.int32), snapshots.probabilities.gather(-1, ranked)
