"""The drafter network of SPOT-Sets (arXiv 2610.22543): what a threshold decoder commits next, positions and tokens.

What such a decoder commits follows almost wholly from the target's distributions at the state: every position whose
confidence passes a level, or the most confident one. So the network is that of ``token_model`` (stale distributions,
tokens of the drafted state, candidate embeddings and, as published, the target's hidden state of the stale pass), which
predicts those distributions, with two heads: how far a position's confidence will lie from the level, and which
position is taken where none passes (see ``set_distribution``). Both start from the predicted distribution and,
untrained, from the stale one. The paper names inputs, size and purpose; the layout is this package's.

Embeddings come from a table that the checkpoint holds: the target's own embedding matrix on its leading principal axes,
so that a replay needs no model. Table, ``candidate`` and ``from_hidden`` are the *input layer*: all that is fitted
again for another target.

Legend: B states, L block length, V vocabulary, K candidates, T table width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dlmgrid.workers.drafting.token_model import Stale, TokenEncoder, TokenShape

INPUT_LAYER = ("candidate.", "from_hidden.", "table")
"""How the names of what belongs to the target begin; the table is no parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetShape(TokenShape):
    """Sizes of a network. The defaults have 5.3M parameters beside the input layer."""

    width: int = 320


class SetScores(NamedTuple):
    """``scores`` [B, L] of being the one where no position passes; ``log_fresh`` and ``log_committed`` [B, L, K + 1];
    ``offset`` [B, L], log odds of passing beside those that the confidence gives (:meth:`SetModel.passing`). Positions
    that are not masked hold no meaning."""

    scores: Tensor
    log_fresh: Tensor
    log_committed: Tensor
    offset: Tensor


class SetModel(TokenEncoder):
    """The encoder with its two heads; ``dropout`` acts in training only."""

    def __init__(self, shape: TokenShape, *, dropout: float = 0.0) -> None:
        super().__init__(shape, dropout=dropout)
        self.candidate = nn.Linear(shape.table_width, shape.table_width, bias=False)
        nn.init.zeros_(self.candidate.weight)
        self.by_confidence = nn.Parameter(torch.tensor(0.5))  # of the log odds of the likeliest fresh token
        self.by_lead = nn.Parameter(torch.tensor(1.0))  # of their distance from those of the level
        self.head, self.pass_head = self.new_head(is_zero=True), self.new_head(is_zero=True)

    def input_layer(self) -> Iterator[nn.Parameter]:
        """The parameters that belong to the target."""
        for name, parameter in self.named_parameters():
            if name.startswith(INPUT_LAYER):
                yield parameter

    def turned(self, embeddings: Tensor) -> Tensor:
        """Embeddings [..., T] in the space that the encoder reads; untrained, as they are."""
        out: Tensor = embeddings + self.candidate(embeddings)
        return out

    def asked(self, queries: Tensor) -> Tensor:
        """Queries [..., T] taken back into the space of the table: cheaper than turning every candidate."""
        return queries + queries @ self.candidate.weight

    def forward(self, stale: Stale, path: Tensor, states: Tensor) -> SetScores:
        """Scores of B states; arguments as of :meth:`judge`."""
        judged = self.judge(stale, path, states)
        return SetScores(
            scores=self.head(judged.read).squeeze(-1) + self.by_confidence * judged.log_odds,
            log_fresh=judged.log_fresh,
            log_committed=judged.log_committed,
            offset=self.pass_head(judged.read).squeeze(-1),
        )

    def passing(self, offset: Tensor, log_confidence: Tensor, level: float) -> Tensor:
        """Log odds of passing, from offsets and the log of the confidence of each position's token (here or on the
        device of ``log_confidence``), for a decoder's level in (0, 1)."""
        doubt = (-torch.expm1(log_confidence)).clamp_min(1e-9).log()
        lead = log_confidence - doubt - math.log(level / (1 - level))
        return offset + self.by_lead.to(lead.device) * lead


def embedding_table(embedding: Tensor, width: int) -> Tensor:
    """fp32 [V, width]: an embedding matrix [V, H] on its leading principal axes, scaled to unit variance; axes that
    the matrix does not have are zero."""
    centred = embedding.double() - embedding.double().mean(dim=0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    count = min(width, axes.shape[1])
    table = torch.zeros(embedding.shape[0], width, dtype=torch.float64)
    table[:, :count] = centred @ axes.flip(1)[:, :count]
    return (table / table.square().mean().sqrt().clamp_min(1e-12)).float()
