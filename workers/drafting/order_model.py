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

import math

import torch
from torch import Tensor, nn

from dlmgrid.kernels.logits import NUM_CANDIDATES
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED

NUM_FEATURES = 74
WIDTH = 128
NUM_HEADS = 8
NUM_LAYERS = 3
_LOG_FLOOR = -20.0


class EncoderLayer(nn.Module):
    """One encoder layer of a given width, normalised after each residual sum; the feed-forward part is four times as
    wide."""

    def __init__(self, width: int = WIDTH, num_heads: int = NUM_HEADS) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm_attention = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm_feed_forward = nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Rows [B, M, width]; ``bias`` [B, 1, 1, M] is -inf at positions that no one may see."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self._num_heads, width // self._num_heads)
        query, key, value = self.project(x).view(shape).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self._num_heads) + bias
        mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, length, width)
        x = self.norm_attention(x + self.merge(mixed))
        out: Tensor = self.norm_feed_forward(x + self.down(torch.relu(self.up(x))))
        return out


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
    masked = snapshots.masked
    length = masked.shape[1]
    probabilities = snapshots.probabilities
    logarithms = probabilities.log().clamp_min(_LOG_FLOOR) / 10
    positions = torch.arange(length, device=masked.device)
    known_left = torch.where(masked, -1, positions).cummax(dim=1).values
    known_right = torch.where(masked, length, positions).flip(1).cummin(dim=1).values.flip(1)
    known_share = (~masked).float().mean(dim=1, keepdim=True)
    statistics = (
        probabilities[..., 0],
        probabilities[..., 0] - probabilities[..., 1],
        snapshots.entropy / math.log(NUM_CANDIDATES),
        snapshots.tail_mass,
        (positions / max(1, length - 1)).expand(masked.shape),
        (positions - known_left) / length,
        (known_right - positions) / length,
        known_share.expand(masked.shape),
    )
    return torch.cat((probabilities, logarithms, torch.stack(statistics, dim=-1)), dim=-1)


def path_features(snapshot_masked: Tensor, roots: Tensor, states: Tensor) -> Tensor:
    """Features 72 and 73, fp32 [S, W, L, 2].

    Args:
        snapshot_masked: bool [S, L], masked in the stale snapshot.
        roots: int32 [S, L]; states: int32 [S, W, L], successors of the roots or the roots themselves.
    """
    length = roots.shape[-1]
    by_root = (snapshot_masked & (roots != MASKED))[:, None]
    filled = snapshot_masked[:, None] & (states != MASKED)
    counts = torch.where(by_root, by_root.sum(dim=-1, keepdim=True), filled.sum(dim=-1, keepdim=True))
    return torch.stack((filled.float(), counts / length), dim=-1)


def masked_log_softmax(scores: Tensor, among: Tensor) -> Tensor:
    """log softmax of scores [..., M] over the positions in ``among`` (bool [..., M]), -inf elsewhere."""
    return torch.where(
        among, scores.masked_fill(~among, torch.finfo(scores.dtype).min).log_softmax(dim=-1), -torch.inf
    )


@torch.inference_mode()
def log_next_position(
    model: OrderModel, snapshots: Snapshots, roots: Tensor, states: Tensor, eligible: Tensor
) -> Tensor:
    """log q(s | state) fp64 [S, W, L]: the model's distribution over the eligible positions, -inf elsewhere.

    The model should hold fp64 parameters: the rounding that depends on what else is in the batch is then far below
    the differences between masses, and a replayed tree is the live one. Only states with an eligible position are
    computed, and of them only the positions of the snapshot.

    Args:
        roots: int32 [S, L]; states: int32 [S, W, L]; eligible: bool [S, W, L], a part of the snapshot's positions.
    """
    sample, which = eligible.any(dim=-1).nonzero(as_tuple=True)
    log_q = torch.full(states.shape, -torch.inf, dtype=torch.float64, device=states.device)
    if not sample.numel():
        return log_q
    masked = snapshots.masked
    width = int(masked.sum(dim=1).max())
    positions = masked.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :width]
    stale = stale_features(snapshots).gather(1, positions[..., None].expand(-1, -1, NUM_FEATURES - 2))
    path = path_features(masked, roots, states)[sample, which]
    where = positions[sample]
    path = path.gather(1, where[..., None].expand(-1, -1, 2))
    features = torch.cat((stale[sample], path), dim=-1).to(model.embed.weight.dtype)
    scores = model(features, masked.gather(1, positions)[sample]).double()
    among = eligible[sample, which].gather(1, where)
    rows = torch.full(
        (sample.shape[0], states.shape[-1]), -torch.inf, dtype=torch.float64, device=states.device
    )
    log_q[sample, which] = rows.scatter(1, where, masked_log_softmax(scores, among))
    return log_q
