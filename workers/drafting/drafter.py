"""The one interface of all drafters, and what the stale distributions predict.

A drafter decides from snapshots, never from the model: it fills a :class:`DraftTree` whose roots are planted.
Live or replayed, it reads the same inputs, so its trees are the same.

Legend: S samples, W states of each, L block length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftInputs:
    """What a drafter reads.

    Attributes:
        roots: int32 [S, L].
        commit_counts: int64 [S], commits made in the block so far (its prompt tail not counted).
        block_starts: int64 [S], absolute position of the block.
        keys: int64 [S, 2], the noise key words of each sample.
        snapshots: S rows; where ``is_valid`` is False the tree must stay a root.
        rule, temperature, noise: the decoder's own.
        stream: the noise that predictions read: the target's own under coupled verification; None (greedy match):
            none, predictions are the stale argmax.
        allows_complete: whether a drafted state may have no mask left; only a two-block window verifies such.
    """

    roots: Tensor
    commit_counts: Tensor
    block_starts: Tensor
    keys: Tensor
    snapshots: Snapshots
    rule: CommitRule
    temperature: float
    noise: NoiseTable
    stream: Stream | None
    allows_complete: bool = False


class Drafter(Protocol):
    """A drafting method with its settings. One that reads hidden states has a true attribute ``reads_hidden``."""

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Add at most ``tree.budget`` unique states to each planted root; complete ones where inputs allow it."""


def reads_hidden(drafter: Drafter) -> bool:
    """Whether the snapshots of this drafter must hold hidden states."""
    return bool(getattr(drafter, "reads_hidden", False))


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSetting:
    """What is settled of all drafts of a decoder: its rule, L and D."""

    rule: CommitRule
    block_length: int
    budget: int


def place(drafter: Drafter, device: torch.device, setting: DraftSetting | None = None) -> str:
    """Have a drafter compute on ``device``, the target's, while states stay on the host: its network, and with a
    ``setting`` that allows it the growth of its trees too.

    Returns where trees grow then, with the reason if it is the host.
    """
    placed = getattr(drafter, "place", None)
    found = placed(device, setting) if callable(placed) else ""
    return found or "host: the method grows no trees on a device"


class Prediction(NamedTuple):
    """What the stale distributions say of each position, for states with given commit counts.

    ``first`` and ``second`` int32 [S, W, L]: the likeliest tokens (perturbed at T > 0). ``confidence`` fp32: the
    tempered probability of ``first``, or what else the commit rule compares. ``unrounded_confidence`` fp64: the same,
    at T in {0, 1} worked out from the mass of the other tokens, so that positions whose probability is 1 in fp32
    keep their order (on text that has ended most positions are such). ``first_probability`` and
    ``second_probability`` fp32: raw stale probabilities, for the mass of a node. All [S, W, L]; W may be 1 where
    every state of a sample is predicted alike. Positions outside the snapshot, and samples whose snapshot is not
    valid, hold no meaning. ``position_scores`` fp64 [S, W, L], where one network gives tokens and order: the softmax
    over eligible positions is the distribution of the next one.
    """

    first: Tensor
    second: Tensor
    confidence: Tensor
    unrounded_confidence: Tensor
    first_probability: Tensor
    second_probability: Tensor
    position_scores: Tensor | None = None


def perturbed_scores(
    inputs: DraftInputs, commit_counts: Tensor, log_probabilities: Tensor | None = None
) -> Tensor:
    """log p / T + noise of the 32 candidates, fp32 [S, W, L, 32], at T > 0; no noise where the drafter reads none.

    Only positions masked in the root of a sample with a valid snapshot hold meaning.

    Args:
        commit_counts: int64 [S, W], commits made before the draw.
        log_probabilities: fp64 [S, W, L, 32] in place of the stale ones.
    """
    snapshots = inputs.snapshots
    num_samples, num_states = commit_counts.shape
    num_positions, num_candidates = snapshots.token_ids.shape[1:]
    noise = torch.zeros(num_samples, num_states, num_positions, num_candidates, device=commit_counts.device)
    if inputs.stream is not None:
        is_read = (inputs.roots == MASKED) & snapshots.is_valid[:, None]
        sample, position = is_read.nonzero(as_tuple=True)
        noise[sample, :, position] = inputs.noise.entries(
            inputs.keys[sample][:, None].expand(-1, num_states, -1),
            inputs.stream,
            (inputs.block_starts[sample] + position)[:, None].expand(-1, num_states),
            commit_counts[sample],
            snapshots.token_ids[sample, position][:, None].expand(-1, num_states, -1),
        )
    if log_probabilities is None:
        log_probabilities = snapshots.probabilities[:, None].log()
    return log_probabilities / inputs.temperature + noise


def predict(inputs: DraftInputs, commit_counts: Tensor) -> Prediction:
    """Predict the token of every position.

    At T = 0 that is the stale argmax. At T > 0 it is the perturbed argmax within the 32 candidates, under the
    noise that the target will draw at a state with ``commit_counts`` commits; without noise under greedy match.

    Args:
        commit_counts: int64 [S, W].
    """
    snapshots, temperature = inputs.snapshots, inputs.temperature
    token_ids = snapshots.token_ids[:, None]
    probabilities = snapshots.probabilities[:, None]
    others = probabilities[..., 1:].double().sum(dim=-1) + snapshots.tail_mass[:, None].double()
    if temperature == 0:
        found = Prediction(
            first=token_ids[..., 0].to(torch.int32),
            second=token_ids[..., 1].to(torch.int32),
            confidence=probabilities[..., 0],
            unrounded_confidence=1 - others,
            first_probability=probabilities[..., 0],
            second_probability=probabilities[..., 1],
        )
        return rated(inputs, commit_counts, found)
    if bool((commit_counts == commit_counts[:, :1]).all()):
        commit_counts = commit_counts[:, :1]
    scores = perturbed_scores(inputs, commit_counts)
    two = scores.topk(2, dim=-1).indices
    shape = tuple(scores.shape)
    tokens = token_ids.expand(shape).gather(-1, two).to(torch.int32)
    raw = probabilities.expand(shape).gather(-1, two)
    if temperature == 1 or inputs.rule.confidence == "plain":
        confidence = raw[..., 0]
        unrounded = torch.where(two[..., 0] == 0, 1 - others, confidence.double())
    else:
        chosen = raw[..., 0].double().log() / temperature
        unrounded = (chosen - snapshots.log_tempered_mass[:, None].double()).exp()
        confidence = unrounded.float()
    found = Prediction(
        first=tokens[..., 0],
        second=tokens[..., 1],
        confidence=confidence,
        unrounded_confidence=unrounded,
        first_probability=raw[..., 0],
        second_probability=raw[..., 1],
    )
    return rated(inputs, commit_counts, found)


def rated(inputs: DraftInputs, commit_counts: Tensor, found: Prediction) -> Prediction:
    """The prediction with its confidences as the decoder's rule rates positions, mapped into [0, 1] in that order.

    Filters and the noise of ``alg_temp`` are left out: they cost accepted drafts, never exactness.
    """
    kind, snapshots = inputs.rule.confidence, inputs.snapshots
    if kind == "topk_margin":
        lead = snapshots.probabilities[..., 0] - snapshots.probabilities[..., 1]
        confidence = lead[:, None].double()
    elif kind in ("entropy", "certainty"):
        confidence = (-snapshots.entropy.double()).exp()[:, None]
    elif kind == "random" and inputs.stream == Stream.TOKEN:
        shape = (*commit_counts.shape, inputs.roots.shape[1])
        positions = inputs.block_starts[:, None] + torch.arange(shape[-1], device=commit_counts.device)
        confidence = inputs.noise.position_uniforms(
            inputs.keys[:, None, None].expand(*shape, -1),
            positions[:, None].expand(shape),
            commit_counts[..., None].expand(shape),
        )
    else:
        return found
    return found._replace(confidence=confidence.float(), unrounded_confidence=confidence)


CountPredictor = Callable[[DraftInputs, Tensor], Prediction]
"""Maps (inputs, commit counts int64 [S, W]) to what each position is predicted to hold, as :func:`predict` does."""

_LEVELS_AHEAD = 4


def is_predicted_once(inputs: DraftInputs) -> bool:
    """Whether positions are predicted alike whatever was committed: what is read does not follow the commits."""
    reads_draws = inputs.temperature > 0 and inputs.stream is not None and inputs.noise.mode == "commit_count"
    is_rated_at_random = inputs.rule.confidence == "random" and inputs.stream == Stream.TOKEN
    return not reads_draws and not is_rated_at_random


def level_predictor(inputs: DraftInputs) -> CountPredictor:
    """:func:`predict` for drafts that go one commit deeper with every call, from none: the same values, worked out once
    where they are alike, and for several levels at a time where each step commits exactly one position."""
    if is_predicted_once(inputs):
        known = predict(inputs, inputs.commit_counts[:, None])
        return lambda *_: known
    if inputs.rule.max_commits != 1 or inputs.rule.may_open_nothing:
        return predict
    ahead: list[Prediction] = []
    levels = itertools.count()

    def by_level(_: DraftInputs, __: Tensor) -> Prediction:
        level = next(levels)
        if level == len(ahead):
            offsets = torch.arange(level, level + _LEVELS_AHEAD, device=inputs.commit_counts.device)
            several = predict(inputs, inputs.commit_counts[:, None] + offsets)
            ahead.extend(_state_of(several, at) for at in range(_LEVELS_AHEAD))
        return ahead[level]

    return by_level


def _state_of(prediction: Prediction, at: int) -> Prediction:
    """What is predicted of state ``at`` of each sample, or of every one where all are alike."""
    own = {
        name: part[:, at : at + 1]
        for name, part in prediction._asdict().items()
        if part is not None and part.shape[1] > 1
    }
    return prediction._replace(**own)
