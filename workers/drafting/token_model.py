"""The order model that reads tokens: which position the target fills next, and what it will find there by then.

SPOT's order model (arXiv 2610.22543, :mod:`~dlmgrid.workers.drafting.order_model`) reads stale distributions only, and
a drafted token is the stale one whatever the path has committed since. On a small target the tokens, not the order, set
the ceiling. This network sees what the drafted state holds: embeddings of its tokens and of the likeliest candidates of
the positions still masked, on request the target's hidden state of the stale pass, and which candidates equal a token
nearby (a word that is committed moves its neighbours to the next one). For a state it gives, at every masked position,

- *fresh*: the target's distribution at this state, over the 16 likeliest stale candidates and none of them;
- *committed*: the same for the token that is committed there if this position is next (a sharper question);
- a score; the softmax over the masked positions is the distribution of the next one.

Untrained it gives the stale distributions. Everything is a function of snapshot, root and state, so a state reached in
two orders is judged alike. Embeddings come from a table that the checkpoint
holds: the target's embedding matrix on its leading principal axes. The layout is this package's.

Legend: S samples, B states, L block length, H hidden size of the target, K = 16 candidates, T table width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.order_model import NUM_FEATURES, EncoderLayer, path_features, stale_features

NUM_HEADS = 8
NEIGHBOURS = (-2, -1, 1, 2)
"""Where a candidate is compared with other positions' tokens, in positions from its own."""

_NUM_PATH = 2
_FARTHEST = 31  # distances beyond share a bias
_LEAST = 1e-9
_SCALE = 4.0  # of log probabilities where a network reads them


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShape:
    """Sizes of a network: of its target (vocabulary, hidden size; 0: hidden states are not read) and its own. Of the
    tokens committed up to four steps after a snapshot of a small model, 16 candidates hold 93 %, 8 hold 89 %."""

    vocab_size: int
    hidden_size: int = 0
    width: int = 256
    num_layers: int = 4
    table_width: int = 128
    num_candidates: int = 16


class Stale(NamedTuple):
    """What a snapshot gives to every state drafted from it, a row a sample or a state.

    ``base`` [S, L, width]; ``token_ids`` int64 and ``log_probabilities`` [S, L, K] and [S, L, K + 1], the last for none
    of them; ``embedded`` [S, L, K, T] and their mean ``mixed`` [S, L, T]; ``near`` [S, L, K, 4], the stale probability
    of each candidate at ``NEIGHBOURS``; ``known`` bool [S, L], filled in the snapshot already.
    """

    base: Tensor
    token_ids: Tensor
    log_probabilities: Tensor
    embedded: Tensor
    mixed: Tensor
    near: Tensor
    known: Tensor

    def rows(self, which: Tensor) -> Stale:
        """Rows ``which`` int64 [B]."""
        return Stale(*(part[which] for part in self))


class TokenScores(NamedTuple):
    """``scores`` [B, L] of being next; ``log_fresh`` and ``log_committed`` [B, L, K + 1]. Positions that are not masked
    hold no meaning."""

    scores: Tensor
    log_fresh: Tensor
    log_committed: Tensor


class Judged(NamedTuple):
    """What the heads of a position read: ``read`` [B, L, width + K + 3]; ``log_odds`` [B, L] of the likeliest fresh
    token; ``log_fresh`` and ``log_committed`` as in :class:`TokenScores`."""

    read: Tensor
    log_odds: Tensor
    log_fresh: Tensor
    log_committed: Tensor


class CandidateScores(nn.Module):
    """What a position's state adds to the scores of its candidates, and of none of them; nothing before training."""

    def __init__(self, shape: TokenShape) -> None:
        super().__init__()
        self.query = nn.Linear(shape.width, shape.table_width)
        self.by_rank = nn.Linear(shape.width, shape.num_candidates + 1)
        self.by_match = nn.Linear(shape.width, 2 * len(NEIGHBOURS))
        for part in (self.query, self.by_rank, self.by_match):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(
        self, x: Tensor, embedded: Tensor, matches: Tensor, asked: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """[B, L, K + 1] of x [B, L, width], embedded [B, L, K, T], matches [B, L, K, 8]; see
        :meth:`TokenEncoder.asked`."""
        by_token = (embedded @ asked(self.query(x))[..., None]).squeeze(-1) / embedded.shape[-1] ** 0.5
        by_match = (matches @ self.by_match(x)[..., None]).squeeze(-1)
        scores: Tensor = self.by_rank(x) + nn.functional.pad(by_token + by_match, (0, 1))
        return scores


class TokenEncoder(nn.Module):
    """The encoder, and the two distributions of every position; ``dropout`` acts in training only."""

    def __init__(self, shape: TokenShape, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.register_buffer("table", torch.zeros(shape.vocab_size, shape.table_width))
        self.table: Tensor
        self.from_features = nn.Linear(NUM_FEATURES - _NUM_PATH, width)
        self.from_hidden = nn.Linear(shape.hidden_size, width, bias=False) if shape.hidden_size else None
        self.from_path = nn.Linear(_NUM_PATH, width, bias=False)
        self.from_tokens = nn.Linear(3 * shape.table_width, width, bias=False)
        self.kind = nn.Embedding(3, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.distance = nn.Parameter(torch.zeros(NUM_HEADS, 2 * _FARTHEST + 1))
        self.layers = nn.ModuleList(
            EncoderLayer(width, NUM_HEADS, dropout=dropout) for _ in range(shape.num_layers)
        )
        self.fresh = CandidateScores(shape)
        self.committed = CandidateScores(shape)
        self.sharpen = nn.Linear(width, 1)
        nn.init.zeros_(self.sharpen.weight)
        nn.init.zeros_(self.sharpen.bias)

    def new_head(self, *, is_zero: bool = False) -> nn.Sequential:
        """One number a position, from :attr:`Judged.read`; ``is_zero``: 0 before training."""
        width = self.shape.width
        first, last = nn.Linear(width + self.shape.num_candidates + 3, width), nn.Linear(width, 1)
        if is_zero:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        return nn.Sequential(first, nn.ReLU(), last)

    def turned(self, embeddings: Tensor) -> Tensor:
        """Embeddings [..., T] as the encoder takes them: as they are."""
        return embeddings

    def asked(self, queries: Tensor) -> Tensor:
        """What queries [..., T] of turned embeddings are for embeddings as they are."""
        return queries

    def read(self, snapshots: Snapshots) -> Stale:
        """What the network takes from snapshots (S rows), once for all states drafted from them.

        Raises ValueError where hidden states are read and the snapshots hold none, or such of another size.
        """
        masked, dtype, num_candidates = snapshots.masked, self.distance.dtype, self.shape.num_candidates
        at = masked[..., None]
        features = stale_features(snapshots)
        features = torch.cat((torch.where(at, features[..., :68], 0.0), features[..., 68:]), dim=-1)
        base = self.from_features(features.to(dtype))
        if self.from_hidden is not None:
            hidden = snapshots.hidden
            if hidden is None or hidden.shape[-1] != self.shape.hidden_size:
                found = "none" if hidden is None else f"such of size {hidden.shape[-1]}"
                raise ValueError(
                    f"the model reads hidden states of size {self.shape.hidden_size}, not {found}"
                )
            hidden = torch.where(at, hidden, 0.0).to(dtype)
            hidden = hidden * hidden.square().mean(dim=-1, keepdim=True).clamp_min(1e-6).rsqrt()
            base = base + self.from_hidden(self.dropout(hidden))
        token_ids = torch.where(at, snapshots.token_ids[..., :num_candidates], 0)
        probabilities = torch.where(at, snapshots.probabilities, 0.0).to(dtype)
        others = probabilities[..., num_candidates:].sum(dim=-1)
        others = others + torch.where(masked, snapshots.tail_mass, 0.0).to(dtype)
        probabilities = probabilities[..., :num_candidates]
        mass = torch.cat((probabilities, others[..., None]), dim=-1).clamp_min(_LEAST)
        embedded = self.table[token_ids]
        shares = probabilities / probabilities.sum(dim=-1, keepdim=True).clamp_min(_LEAST)
        near = [
            (
                (shifted(token_ids, offset, -1)[:, :, None] == token_ids[..., None])
                * shifted(probabilities, offset, 0)[:, :, None]
            ).sum(dim=-1)
            for offset in NEIGHBOURS
        ]
        return Stale(
            base=base,
            token_ids=token_ids,
            log_probabilities=mass.log(),
            embedded=embedded,
            mixed=(shares[..., None] * embedded).sum(dim=-2),
            near=torch.stack(near, dim=-1),
            known=~masked,
        )

    def judge(self, stale: Stale, path: Tensor, states: Tensor) -> Judged:
        """What heads read of B states.

        Args:
            stale: a row a state; path: [B, L, 2], :func:`~dlmgrid.workers.drafting.order_model.path_features`.
            states: int64 [B, L], -1 where masked.
        """
        masked = states == MASKED
        own = self.turned(torch.where(masked[..., None], stale.mixed, self.table[states.clamp_min(0)]))
        around = torch.cat((own, shifted(own, -1, 0), shifted(own, 1, 0)), dim=-1)
        kind = torch.where(stale.known, 2, (~masked).long())
        x = stale.base + self.from_path(path) + self.from_tokens(self.dropout(around)) + self.kind(kind)
        x = self.dropout(self.norm(x))
        positions = torch.arange(states.shape[1], device=states.device)
        apart = (positions[:, None] - positions).clamp(-_FARTHEST, _FARTHEST) + _FARTHEST
        bias = self.distance[:, apart]
        for layer in self.layers:
            x = layer(x, bias)
        matches = self._matches(stale, states)
        given = (stale.embedded, matches, self.asked)
        log_fresh = (stale.log_probabilities + self.fresh(x, *given)).log_softmax(dim=-1)
        sharp = log_fresh * (1 + self.sharpen(x)) + self.committed(x, *given)
        top = log_fresh[..., :-1].amax(dim=-1, keepdim=True)
        doubt = (-torch.expm1(top)).clamp_min(_LEAST).log()
        read = torch.cat((log_fresh.clamp_min(-20.0), top, doubt), dim=-1) / _SCALE
        return Judged(
            read=torch.cat((x, read), dim=-1),
            log_odds=(top - doubt).squeeze(-1),
            log_fresh=log_fresh,
            log_committed=sharp.log_softmax(dim=-1),
        )

    @staticmethod
    def _matches(stale: Stale, states: Tensor) -> Tensor:
        """[B, L, K, 8]: whether a candidate is the token at each of ``NEIGHBOURS``, and where that position is masked
        the stale probability that it holds it."""
        tokens = [shifted(states, offset, MASKED)[..., None] for offset in NEIGHBOURS]
        held = torch.stack([stale.token_ids == near for near in tokens], dim=-1)
        is_open = torch.stack([near == MASKED for near in tokens], dim=-1)
        return torch.cat((held.to(stale.near.dtype), torch.where(is_open, stale.near, 0.0)), dim=-1)


class TokenModel(TokenEncoder):
    """The order model: the encoder and the scores of positions."""

    def __init__(self, shape: TokenShape, *, dropout: float = 0.0) -> None:
        super().__init__(shape, dropout=dropout)
        self.by_confidence = nn.Parameter(torch.tensor(0.5))  # of the log odds of the likeliest fresh token
        self.head = self.new_head()

    def forward(self, stale: Stale, path: Tensor, states: Tensor) -> TokenScores:
        """Scores of B states; arguments as of :meth:`judge`."""
        judged = self.judge(stale, path, states)
        scores = self.head(judged.read).squeeze(-1) + self.by_confidence * judged.log_odds
        return TokenScores(scores, judged.log_fresh, judged.log_committed)


def shifted(values: Tensor, offset: int, beyond: float) -> Tensor:
    """values [B, L, …] of the position ``offset`` away, ``beyond`` where that lies outside the block."""
    rolled = values.roll(-offset, dims=1)
    edge = slice(-offset, None) if offset > 0 else slice(0, -offset)
    rolled[:, edge] = beyond
    return rolled


def path_of(snapshots: Snapshots, roots: Tensor, states: Tensor, dtype: torch.dtype) -> Tensor:
    """The path features [S, W, L, 2] of states int32 [S, W, L], zero at positions that the snapshot had filled."""
    path = path_features(snapshots.masked, roots, states)
    return torch.where(snapshots.masked[:, None, :, None], path, 0.0).to(dtype)
