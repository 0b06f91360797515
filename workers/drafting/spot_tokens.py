"""SPOT with an order model that reads tokens: order and tokens of a state come from one look at the state itself.

The growth is that of ``growth``. A child's p(v) is the probability that v is committed there if the position is next;
the second token is tried wherever its mass is large enough, since these probabilities, unlike stale ones, are meant to
be right. At T > 0 the tokens are the perturbed argmax of the predicted fresh distribution under the target's noise, and
p(v) is its probability. The stale candidates that the network does not score share the mass of *none of them* as
they did.

Legend: S samples, W states of each, B states that are asked about, L block length, K scored candidates.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs, Prediction, perturbed_scores, rated
from dlmgrid.workers.drafting.growth import grow
from dlmgrid.workers.drafting.order_model import masked_log_softmax
from dlmgrid.workers.drafting.placed_model import PlacedTokens
from dlmgrid.workers.drafting.token_model import Stale, TokenEncoder, TokenModel, TokenScores, path_of

HEDGE_BELOW = 1.0
_STATES_AT_ONCE = 32  # on a CPU: what fits its caches


Network = TypeVar("Network", bound=TokenEncoder)


class TokenReader(Protocol):
    """A model that reads tokens, here or on another device."""

    def read(self, snapshots: Snapshots) -> Stale: ...

    def __call__(self, stale: Stale, sample: Tensor, path: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """What the model gives for states int64 [B, L] drafted from the rows ``sample`` of ``stale``."""


class LocalTokens:
    """A model that reads tokens, on the device of the states."""

    def __init__(self, model: TokenEncoder) -> None:
        self._model = model

    def read(self, snapshots: Snapshots) -> Stale:
        """As :meth:`TokenEncoder.read`."""
        return self._model.read(snapshots)

    def __call__(self, stale: Stale, sample: Tensor, path: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """What the model's ``forward`` gives; on a CPU a few states at a time."""
        size = max(1, states.shape[0]) if states.is_cuda else _STATES_AT_ONCE
        chunks = zip(sample.split(size), path.split(size), states.split(size), strict=True)
        parts = [self._model(stale.rows(rows), *chunk) for rows, *chunk in chunks]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class NetworkDrafter(Generic[Network]):
    """A drafter of the D states of largest mass under a network that reads tokens, with ``min_log_mass`` only those of
    at least that log mass.

    Args:
        model: it is held in fp64, so that what else is packed changes no tree.
    """

    def __init__(self, model: Network, *, min_log_mass: float = -torch.inf) -> None:
        self._model = model.double().eval()
        self._min_log_mass = min_log_mass
        self._placed: PlacedTokens | None = None
        self.reads_hidden = model.shape.hidden_size > 0

    def place(self, device: torch.device, setting: object = None) -> str:
        """Compute the network on ``device``, whatever device the states are on and whatever ``setting`` is known of the
        drafts; sums there may differ by rounding. Returns where trees grow."""
        self._placed = PlacedTokens(self._model, device)
        return "host: the network reads tokens, it alone is computed on the device"

    def _reader(self, device: torch.device) -> TokenReader:
        """The network where it was placed, else on the ``device`` of the states."""
        return self._placed or LocalTokens(self._model.to(device))


class TokenDrafter(NetworkDrafter[TokenModel]):
    """The D states of largest mass under a token model."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        if tree.budget == 0:
            return
        reader = self._reader(inputs.roots.device)
        stale = reader.read(inputs.snapshots)

        def look(states: Tensor, commit_counts: Tensor, is_asked: Tensor) -> Prediction:
            return predict_tokens(reader, inputs, stale, states, commit_counts, is_asked)

        grow(
            inputs,
            tree,
            _order,
            predictor=look,
            min_log_mass=self._min_log_mass,
            hedge_below=HEDGE_BELOW,
        )


def _order(_: Tensor, eligible: Tensor, prediction: Prediction) -> Tensor:
    """log q fp64 [S, W, L]. Of a step that commits several positions the last one is drawn from the scores of the state
    before the step."""
    assert prediction.position_scores is not None
    return masked_log_softmax(prediction.position_scores, eligible)


def predict_tokens(
    reader: TokenReader,
    inputs: DraftInputs,
    stale: Stale,
    states: Tensor,
    commit_counts: Tensor,
    is_asked: Tensor,
) -> Prediction:
    """What a token model predicts of states int32 [S, W, L] with commit counts int64 [S, W].

    Only states that ``is_asked`` (bool [S, W]) are computed; what is said of the others holds no meaning.
    """
    sample, which = is_asked.nonzero(as_tuple=True)
    path = path_of(inputs.snapshots, inputs.roots, states, torch.float64)[sample, which]
    found = TokenScores(*reader(stale, sample, path, states[sample, which].long()))
    tokens = likeliest_tokens(inputs, stale, commit_counts, is_asked, found.log_fresh, found.log_committed)
    confidence = tokens.log_first.exp()
    positions = torch.zeros(states.shape, dtype=torch.float64, device=states.device)
    positions[sample, which] = found.scores
    prediction = Prediction(
        first=tokens.first,
        second=tokens.second,
        confidence=confidence.float(),
        unrounded_confidence=confidence,
        first_probability=tokens.first_probability,
        second_probability=tokens.second_probability,
        position_scores=positions,
    )
    return rated(inputs, commit_counts, prediction)


class LikeliestTokens(NamedTuple):
    """``first`` and ``second`` int32 [S, W, L], the likeliest tokens to be committed (perturbed at T > 0), and their
    probabilities fp64; ``log_fresh`` fp64 [S, W, L, 32], the predicted distribution over the stale candidates, and
    ``log_first`` [S, W, L], that of ``first`` in it."""

    first: Tensor
    second: Tensor
    first_probability: Tensor
    second_probability: Tensor
    log_fresh: Tensor
    log_first: Tensor


def likeliest_tokens(
    inputs: DraftInputs,
    stale: Stale,
    commit_counts: Tensor,
    is_asked: Tensor,
    log_fresh: Tensor,
    log_committed: Tensor,
) -> LikeliestTokens:
    """The tokens of states with commit counts int64 [S, W], from what a model gives for those that ``is_asked`` (bool
    [S, W], B of them), both [B, L, K + 1]; what is said of the others holds no meaning."""
    snapshots = inputs.snapshots
    sample, which = is_asked.nonzero(as_tuple=True)
    stale_log = snapshots.probabilities.double().log()
    num_scored = stale.token_ids.shape[-1]
    of_rest = torch.cat((snapshots.probabilities[..., num_scored:], snapshots.tail_mass[..., None]), dim=-1)
    all_rest = of_rest.double().sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    rest = stale_log[..., num_scored:] - all_rest.log()

    def whole(log_p: Tensor) -> Tensor:
        """log probabilities fp64 [S, W, L, 32] from those of the scored ones and of none of them, [B, L, K + 1]."""
        shape = (*is_asked.shape, *stale_log.shape[1:])
        out = torch.full(shape, -torch.inf, dtype=torch.float64, device=is_asked.device)
        out[sample, which] = torch.cat((log_p[..., :-1], rest[sample] + log_p[..., -1:]), dim=-1)
        return out

    fresh = whole(log_fresh)
    if inputs.temperature > 0:
        log_p = fresh
        # Present states come first: the others take their count, so that the noise of one count is drawn once.
        counts = torch.where(is_asked, commit_counts, commit_counts[:, :1])
        is_shared = bool((counts == counts[:, :1]).all())
        scores = perturbed_scores(inputs, counts[:, :1] if is_shared else counts, log_p)
    else:
        scores = log_p = whole(log_committed)
    two = scores.topk(2, dim=-1).indices
    tokens = snapshots.token_ids[:, None].expand(scores.shape).gather(-1, two).to(torch.int32)
    probabilities = log_p.gather(-1, two).exp()
    return LikeliestTokens(
        first=tokens[..., 0],
        second=tokens[..., 1],
        first_probability=probabilities[..., 0],
        second_probability=probabilities[..., 1],
        log_fresh=fresh,
        log_first=fresh.gather(-1, two[..., :1]).squeeze(-1),
    )
