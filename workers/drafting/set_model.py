"""The drafter network of SPOT-Sets (arXiv 2610.22543): what a threshold decoder commits next, positions and tokens.

It reads, of every position masked in the stale snapshot, SPOT's 74 features, the target's hidden state, and the
embeddings of the 8 likeliest candidates (of the token alone where the drafted path has filled the position). It gives
each position a probability of being in the next step's set, and the 8 candidates new probabilities. The paper names
inputs, size and purpose; the layout is this package's.

Embeddings come from a table that the checkpoint holds: the target's own embedding matrix on its 64 leading principal
axes, so that a replay needs no model. Table, ``candidate`` and ``from_hidden`` are the *input layer*: all that is
fitted again for another target.

Legend: B states, M positions of a block, H hidden size of the target, K = 8 candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlmgrid.workers.drafting.order_model import NUM_FEATURES, EncoderLayer

NUM_RESCORED = 8
TABLE_WIDTH = 64
NUM_HEADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SetShape:
    """Sizes of a network: of its target (hidden size, vocabulary) and its own. The defaults have 5.0M parameters
    beside the input layer."""

    hidden_size: int
    vocab_size: int
    width: int = 320
    num_layers: int = 4


class SetModel(nn.Module):
    """The encoder with its two heads."""

    def __init__(self, shape: SetShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.register_buffer("table", torch.zeros(shape.vocab_size, TABLE_WIDTH))
        self.table: Tensor
        self.candidate = nn.Linear(TABLE_WIDTH, TABLE_WIDTH, bias=False)
        self.from_hidden = nn.Linear(shape.hidden_size, width)
        self.from_candidate = nn.Linear(TABLE_WIDTH, width)
        self.from_features = nn.Linear(NUM_FEATURES, width)
        self.layers = nn.ModuleList(EncoderLayer(width, NUM_HEADS) for _ in range(shape.num_layers))
        self.include = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.query = nn.Linear(width, TABLE_WIDTH)
        self.by_rank = nn.Linear(width, NUM_RESCORED)

    def input_layer(self) -> Iterator[nn.Parameter]:
        """The parameters that belong to the target."""
        yield from self.candidate.parameters()
        yield from self.from_hidden.parameters()

    def forward(
        self,
        features: Tensor,
        hidden: Tensor,
        token_ids: Tensor,
        probabilities: Tensor,
        filled: Tensor,
        present: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Logits of being in the next set [B, M], and log probabilities of the candidates [B, M, K], which share the
        mass that they had.

        Args:
            features: [B, M, 74]; hidden: [B, M, H]; token_ids: int64 [B, M, K] and probabilities [B, M, K], stale.
            filled: int64 [B, M], the token that the drafted path put there, -1 for none.
            present: bool [B, M], the positions of the snapshot.
        """
        embedded = self.candidate(self.table[token_ids])
        mass = probabilities.sum(dim=-1, keepdim=True).clamp_min(1e-6)
        mixed = ((probabilities / mass)[..., None] * embedded).sum(dim=-2)
        own = self.candidate(self.table[filled.clamp_min(0)])
        mixed = torch.where((filled >= 0)[..., None], own, mixed)
        scale = hidden.square().mean(dim=-1, keepdim=True).clamp_min(1e-6).rsqrt()
        x = self.from_hidden(hidden * scale) + self.from_candidate(mixed) + self.from_features(features)
        bias = torch.zeros(present.shape, dtype=x.dtype, device=x.device)
        bias = bias.masked_fill(~present, -torch.inf)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, bias)
        rescored = (embedded * self.query(x)[..., None, :]).sum(dim=-1) / TABLE_WIDTH**0.5 + self.by_rank(x)
        scores = probabilities.clamp_min(1e-9).log() + rescored
        return self.include(x).squeeze(-1), scores.log_softmax(dim=-1) + mass.log()


def embedding_table(embedding: Tensor, width: int = TABLE_WIDTH) -> Tensor:
    """fp32 [V, width]: an embedding matrix [V, H] on its leading principal axes, scaled to unit variance; axes that
    the matrix does not have are zero."""
    centred = embedding.double() - embedding.double().mean(dim=0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    count = min(width, axes.shape[1])
    table = torch.zeros(embedding.shape[0], width, dtype=torch.float64)
    table[:, :count] = centred @ axes.flip(1)[:, :count]
    return (table / table.square().mean().sqrt().clamp_min(1e-12)).float()
