"""SPOT-Sets (arXiv 2610.22543): drafts of whole steps of a threshold decoder, positions and tokens.

Nodes are target steps, grown as ``set_growth`` says under the network of ``set_model``. Exact (``spot_sets``): a
drafted state is accepted where it equals the target's own next state. Product max-commit (``spot_sets_product``): the
verifier may also take a larger drafted state, see ``decoding/verification.py``. Cross-block drafting and draft refresh
are the decoder's ``window``.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs
from dlmgrid.workers.drafting.set_checkpoint import load_set_model
from dlmgrid.workers.drafting.set_distribution import SetDistribution
from dlmgrid.workers.drafting.set_growth import SetPrediction, grow_sets
from dlmgrid.workers.drafting.set_model import SetModel, SetScores
from dlmgrid.workers.drafting.spot_tokens import (
    LikeliestTokens,
    NetworkDrafter,
    TokenReader,
    likeliest_tokens,
)
from dlmgrid.workers.drafting.token_model import Stale, path_of


class SetDrafter(NetworkDrafter[SetModel]):
    """The D states of largest mass under a set model."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        if tree.budget == 0:
            return
        reader = self._reader(inputs.roots.device)
        stale = reader.read(inputs.snapshots)

        def propose(states: Tensor, commit_counts: Tensor, is_asked: Tensor) -> SetPrediction:
            return predict_sets(self._model, reader, inputs, stale, states, commit_counts, is_asked)

        grow_sets(inputs, tree, propose, min_log_mass=self._min_log_mass)


def predict_sets(
    model: SetModel,
    reader: TokenReader,
    inputs: DraftInputs,
    stale: Stale,
    states: Tensor,
    commit_counts: Tensor,
    is_asked: Tensor,
) -> SetPrediction:
    """What ``model``, read by ``reader``, predicts for states int32 [S, W, L] with commit counts int64 [S, W].

    Only states that ``is_asked`` (bool [S, W]) are computed. At T > 0 a position passes by the probability of the
    token that the noise picks, as the decoder has it.
    """
    rule = inputs.rule
    assert rule.level is not None, f"the decoder {rule.name} has no level that confidences pass"
    sample, which = is_asked.nonzero(as_tuple=True)
    path = path_of(inputs.snapshots, inputs.roots, states, torch.float64)[sample, which]
    found = SetScores(*reader(stale, sample, path, states[sample, which].long()))
    tokens = likeliest_tokens(inputs, stale, commit_counts, is_asked, found.log_fresh, found.log_committed)
    if inputs.temperature > 0:
        log_confidence = _log_confidence(inputs, tokens)[sample, which]
    else:
        log_confidence = found.log_fresh[..., :-1].amax(dim=-1)

    def whole(values: Tensor) -> Tensor:
        """fp64 [S, W, L] from [B, L]."""
        out = torch.zeros(states.shape, dtype=torch.float64, device=states.device)
        out[sample, which] = values
        return out

    among = rule.eligible(states == MASKED) & is_asked[..., None]
    passing = whole(model.passing(found.offset, log_confidence, rule.level))
    return SetPrediction(
        sets=SetDistribution.of(passing, whole(found.scores), among),
        first=tokens.first,
        second=tokens.second,
        first_probability=tokens.first_probability,
        second_probability=tokens.second_probability,
    )


def _log_confidence(inputs: DraftInputs, tokens: LikeliestTokens) -> Tensor:
    """log of the confidence fp64 [S, W, L] that the decoder will give each first token, under the predicted
    distribution; beyond the stale candidates it is taken to be the stale one."""
    temperature = inputs.temperature
    if inputs.rule.confidence != "tempered":
        return tokens.log_first
    snapshots = inputs.snapshots
    stale = (snapshots.probabilities.double().log() / temperature).exp().sum(dim=-1)
    others = (snapshots.log_tempered_mass.double().exp() - stale).clamp_min(0)
    mass = (tokens.log_fresh / temperature).exp().sum(dim=-1) + others[:, None]
    return (tokens.log_first / temperature - mass.clamp_min(1e-30).log()).clamp_max(0)


def build(checkpoint: Path) -> Drafter:
    """SPOT-Sets with the set model at ``checkpoint``. Raises InputError for a file that is none."""
    return SetDrafter(load_set_model(checkpoint))


def build_gamma(checkpoint: Path, gamma: float) -> Drafter:
    """SPOT-Sets-γ: only states with a mass of at least γ, 0 < γ ≤ 1. Raises InputError for a file that holds no set
    model, ValueError for another γ."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma is {gamma}, it must lie in (0, 1]")
    return SetDrafter(load_set_model(checkpoint), min_log_mass=math.log(gamma))
