"""The order model of SPOT (arXiv 2610.22543): which masked position the target fills next, from distributions alone.

A small encoder over the positions that were masked when the stale snapshot was taken. It reads 74 numbers a
position and no tokens, embeddings or hidden states, so one checkpoint can draft for any target. The paper names the
64 probabilities and counts of the others; the eight statistics and two path features are this package's reading.

    0-31   stale top-32 probabilities                  67  mass outside the 32
    32-63  their logarithms, in tens of nats           68  position in the block, 0 to 1
    64     top-1 probability                           69  distance to the nearest known token on the left, / L
    65     top-1 minus top-2                           70  the same on the right
    66     entropy over the vocabulary, / ln 32        71  share of the block that is known
    72     1 where the path from the snapshot to the state has filled the position
    73     commits on that path / L; at a position that the root had filled, the root's own

Features 0 to 71 are frozen at the snapshot; 72 and 73 are a function of the root and of the *set* of filled
positions, so that a state reached in two orders is judged alike and merging states is sound.

Legend: S samples, W states of each, B states, L block length, M positions masked in a snapshot.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dlmgrid.kernels import order_scores
from dlmgrid.kernels.order_scores import path_features as path_features
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, commit_hashes

NUM_FEATURES = 74
WIDTH = 128
NUM_HEADS = 8
NUM_LAYERS = 3
_STATES_AT_ONCE = 32  # on a CPU: what fits its caches


class EncoderLayer(nn.Module):
    """One encoder layer of a given width, normalised after each residual sum; the feed-forward part is four times as
    wide. ``dropout`` acts on what is added, in training only."""

    def __init__(self, width: int = WIDTH, num_heads: int = NUM_HEADS, *, dropout: float = 0.0) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._dropout = dropout
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm_attention = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm_feed_forward = nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Rows [B, M, width]; ``bias``, of a shape that fits [B, heads, M, M], is added to what a position (third axis)
        thinks of another (fourth): -inf at positions that no one may see."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self._num_heads, width // self._num_heads)
        query, key, value = self.project(x).view(shape).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self._num_heads) + bias
        mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, length, width)
        x = self.norm_attention(x + self._dropped(self.merge(mixed)))
        out: Tensor = self.norm_feed_forward(x + self._dropped(self.down(torch.relu(self.up(x)))))
        return out

    def _dropped(self, values: Tensor) -> Tensor:
        return nn.functional.dropout(values, self._dropout, self.training) if self._dropout else values


class OrderModel(nn.Module):
    """The encoder: 3 layers of width 128 with 8 heads, 621,057 parameters, no position table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(NUM_LAYERS))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """Scores [B, M] of positions with features [B, M, 74]; those not ``present`` (bool [B, M]) are unseen."""
        bias = torch.zeros(present.shape, dtype=features.dtype, device=features.device)
        bias = bias.masked_fill(~present, -torch.inf)[:, None, None, :]
        x = self.embed(features)
        for layer in self.layers:
            x = layer(x, bias)
        scores: Tensor = self.head(x).squeeze(-1)
        return scores


def stale_features(snapshots: Snapshots) -> Tensor:
    """Features 0 to 71, fp32 [S, L, 72]; positions outside the snapshot hold no meaning."""
    return order_scores.stale_features(
        snapshots.masked, snapshots.probabilities, snapshots.entropy, snapshots.tail_mass
    )


def masked_log_softmax(scores: Tensor, among: Tensor) -> Tensor:
    """log softmax of scores [..., M] over the positions in ``among`` (bool [..., M]), -inf elsewhere."""
    return torch.where(
        among, scores.masked_fill(~among, torch.finfo(scores.dtype).min).log_softmax(dim=-1), -torch.inf
    )


class ScoreMemo:
    """Scores that an order model has given, so that several drafts at the same roots compute each once.

    A score is a function of the snapshot, the root and the set of filled positions. Only a replay keeps one: there
    the budgets of one run meet the same roots again. A memo belongs to one model and one set of runs.
    """

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._scores = torch.empty(0, 0, dtype=torch.float64)

    def clear(self) -> None:
        """Forget everything."""
        self._row_of.clear()

    def find(self, keys: Sequence[int]) -> list[int]:
        """The row of each key, -1 where it has none."""
        return [self._row_of.get(key, -1) for key in keys]

    def add(self, keys: Sequence[int], scores: Tensor) -> None:
        """Keep scores fp64 [N, L] under N new keys."""
        start = len(self._row_of)
        end = start + len(keys)
        if end > self._scores.shape[0] or scores.shape[1] != self._scores.shape[1]:
            room = torch.empty(max(1024, 2 * end), scores.shape[1], dtype=torch.float64, device=scores.device)
            if start:
                room[:start] = self._scores[:start]
            self._scores = room
        self._scores[start:end] = scores
        self._row_of.update(zip(keys, range(start, end), strict=True))

    def rows(self, which: Sequence[int]) -> Tensor:
        """The scores fp64 [N, L] of rows that :meth:`find` gave."""
        return self._scores[torch.tensor(which, device=self._scores.device)]


PositionScores = Callable[[Tensor, Tensor], Tensor]
"""Maps features [B, M, 74] and present bool [B, M] to scores [B, M]: an order model, or one on another device."""


class RootFeatures:
    """What the states of a draft share: the positions of each snapshot, and their stale features once asked for.

    Args:
        snapshots: S rows.
        is_wide: whether every snapshot is as wide as the block, so that a graph on a device serves every state; else
            the widest one's positions are the width, W.
    """

    def __init__(self, snapshots: Snapshots, *, is_wide: bool) -> None:
        masked = snapshots.masked
        self._snapshots = snapshots
        self.is_wide = is_wide
        self.sizes = masked.sum(dim=1)
        width = masked.shape[1] if is_wide else int(self.sizes.max())
        order = masked.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
        self.positions = order[:, :width]
        self.present = masked.gather(1, self.positions)

    @functools.cached_property
    def stale(self) -> Tensor:
        """fp32 [S, W, 72], of ``positions`` int64 [S, W]; those not ``present`` bool [S, W] hold no meaning."""
        index = self.positions[..., None].expand(-1, -1, NUM_FEATURES - 2)
        return stale_features(self._snapshots).gather(1, index)


@torch.inference_mode()
def log_next_position(
    model: OrderModel | PositionScores,
    snapshots: Snapshots,
    roots: Tensor,
    states: Tensor,
    eligible: Tensor,
    *,
    memo: ScoreMemo | None = None,
    root_keys: Tensor | None = None,
    known: RootFeatures | None = None,
) -> Tensor:
    """log q(s | state) fp64 [S, W, L]: the model's distribution over the eligible positions, -inf elsewhere.

    The model should hold fp64 parameters: the rounding that depends on what else is in the batch is then far below
    the differences between masses, and a replayed tree is the live one. Only states with an eligible position are
    computed, of states that fill the same positions one, and of each only the positions of the snapshot.

    Args:
        roots: int32 [S, L]; states: int32 [S, W, L]; eligible: bool [S, W, L], a part of the snapshot's positions.
        memo: scores computed before; ``root_keys`` int64 [S] then identify each root with its snapshot.
        known: of these snapshots, where several calls share them.
    """
    sample, which = eligible.any(dim=-1).nonzero(as_tuple=True)
    log_q = torch.full(states.shape, -torch.inf, dtype=torch.float64, device=states.device)
    if not sample.numel():
        return log_q
    known = known or root_features(model, snapshots)
    if memo is None and known.is_wide:  # a few more states cost less there than finding equal ones
        scores = _position_scores(model, known, snapshots.masked, roots, states, sample, which)
        log_q[sample, which] = masked_log_softmax(scores, eligible[sample, which])
        return log_q
    positions = torch.arange(roots.shape[1], device=roots.device)
    filled = snapshots.masked[sample] & (states[sample, which] != MASKED)
    of_root = torch.arange(roots.shape[0], device=roots.device) if root_keys is None else root_keys
    keys = torch.where(filled, commit_hashes(positions, torch.zeros_like(positions)), 0).sum(dim=-1)
    keys = keys + commit_hashes(of_root[sample], torch.ones_like(sample))
    distinct, which_key = keys.unique(return_inverse=True)
    first = torch.full_like(distinct, sample.numel())
    first = first.scatter_reduce(0, which_key, torch.arange(sample.numel(), device=sample.device), "amin")
    if memo is None:
        scores = _position_scores(model, known, snapshots.masked, roots, states, sample[first], which[first])
    else:
        names = distinct.tolist()
        new = [index for index, row in enumerate(memo.find(names)) if row < 0]
        if new:
            at = first[torch.tensor(new, device=first.device)]
            found = _position_scores(model, known, snapshots.masked, roots, states, sample[at], which[at])
            memo.add([names[index] for index in new], found)
        scores = memo.rows(memo.find(names))
    log_q[sample, which] = masked_log_softmax(scores[which_key], eligible[sample, which])
    return log_q


def root_features(model: OrderModel | PositionScores, snapshots: Snapshots) -> RootFeatures:
    """What the states of a draft share, as ``model`` computes it: on a GPU every state of one width."""
    return RootFeatures(snapshots, is_wide=snapshots.masked.is_cuda or not isinstance(model, OrderModel))


def _position_scores(
    model: OrderModel | PositionScores,
    known: RootFeatures,
    masked: Tensor,
    roots: Tensor,
    states: Tensor,
    sample: Tensor,
    which: Tensor,
) -> Tensor:
    """Scores fp64 [B, L] of the states (``sample``, ``which``), both int64 [B]; 0 outside their snapshot.

    States whose snapshots have about as many positions are computed together, so that little is padding.
    """
    positions, present = known.positions[sample], known.present[sample]
    path = path_features(masked, roots, states)[sample, which]
    path = path.gather(1, positions[..., None].expand(-1, -1, 2))
    width = positions.shape[1]
    scores = torch.zeros(sample.shape[0], states.shape[-1], dtype=torch.float64, device=states.device)
    sizes = known.sizes[sample]
    parts: Sequence[Tensor | slice] = (slice(None),)
    if not known.is_wide:
        parts = sizes.sort(stable=True).indices.split(_STATES_AT_ONCE)
    for some in parts:
        wide = width if isinstance(some, slice) else int(sizes[some[-1]])
        features = torch.cat((known.stale[sample[some], :wide], path[some, :wide]), dim=-1)
        if isinstance(model, OrderModel):
            features = features.to(model.embed.weight.dtype)
        found = model(features, present[some, :wide]).double()
        found = torch.where(present[some, :wide], found, 0.0)
        scores[some] = scores[some].scatter(1, positions[some, :wide], found)
    return scores
