"""Torch twin of the order model on a device: scores of the masked positions of many states, in fixed shapes.

Every row of a table of states is computed, whether it is asked for or not, and every position of the block: those
outside the snapshot are seen by none and hold no meaning. The model is the encoder of SPOT (arXiv 2610.22543) as
``workers/drafting/order_model`` describes it; all in fp64.

Legend: S samples, N rows of each, L block length, W width of the model, K layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from dlmgrid.kernels.logits import NUM_CANDIDATES

MASKED = -1
NUM_STALE = 72
"""Features of a position that the snapshot alone gives; two follow the path to the state."""

LOG_FLOOR = -20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderWeights:
    """Weights of the encoder, fp64: [out, in] each, layers stacked in front.

    ``embed`` [W, 74], ``project`` [K, 3W, W], ``merge`` [K, W, W], ``up`` [K, 4W, W], ``down`` [K, W, 4W], ``head``
    [W, W], ``score`` [W], with their biases; ``norms`` [K, 2, 2, W]: weight and bias of the norm after the attention
    and of that after the feed-forward part.
    """

    num_heads: int
    embed: Tensor
    embed_bias: Tensor
    project: Tensor
    project_bias: Tensor
    merge: Tensor
    merge_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    norms: Tensor
    head: Tensor
    head_bias: Tensor
    score: Tensor
    score_bias: Tensor


def stale_features(masked: Tensor, probabilities: Tensor, entropy: Tensor, tail_mass: Tensor) -> Tensor:
    """Features 0 to 71, fp32 [S, L, 72], of snapshots; positions outside them hold no meaning.

    Logarithms are taken in fp64 and quotients rounded once, so that devices agree on them.

    Args:
        masked: bool [S, L]; probabilities: fp32 [S, L, 32]; entropy, tail_mass: fp32 [S, L].
    """
    length = masked.shape[1]
    logarithms = _over(probabilities.double().log().float().clamp_min(LOG_FLOOR), 10)
    positions = torch.arange(length, device=masked.device)
    known_left = torch.where(masked, -1, positions).cummax(dim=1).values
    known_right = torch.where(masked, length, positions).flip(1).cummin(dim=1).values.flip(1)
    known_share = _over((~masked).sum(dim=1, keepdim=True), length)
    statistics = (
        probabilities[..., 0],
        probabilities[..., 0] - probabilities[..., 1],
        _over(entropy, math.log(NUM_CANDIDATES)),
        tail_mass,
        _over(positions, max(1, length - 1)).expand(masked.shape),
        _over(positions - known_left, length),
        _over(known_right - positions, length),
        known_share.expand(masked.shape),
    )
    return torch.cat((probabilities, logarithms, torch.stack(statistics, dim=-1)), dim=-1)


def path_features(masked: Tensor, roots: Tensor, states: Tensor) -> Tensor:
    """Features 72 and 73, fp32 [S, N, L, 2].

    Args:
        masked: bool [S, L], masked in the stale snapshot.
        roots: int32 [S, L]; states: int32 [S, N, L], successors of the roots or the roots themselves.
    """
    length = roots.shape[-1]
    by_root = (masked & (roots != MASKED))[:, None]
    filled = masked[:, None] & (states != MASKED)
    counts = torch.where(by_root, by_root.sum(dim=-1, keepdim=True), filled.sum(dim=-1, keepdim=True))
    return torch.stack((filled.float(), _over(counts, length)), dim=-1)


def _over(values: Tensor, divisor: float) -> Tensor:
    """``values`` over ``divisor`` in fp32, rounded once: by a number, torch multiplies with its inverse on a GPU."""
    return values.float() / torch.full((), divisor, dtype=torch.float32, device=values.device)


def order_scores(
    weights: OrderWeights, stale: Tensor, masked: Tensor, roots: Tensor, states: Tensor
) -> Tensor:
    """Scores fp64 [S, N, L] of each position of each state.

    Args:
        stale: fp32 [S, L, 72]; masked, roots, states: as :func:`path_features` takes them.
    """
    rows = states.shape[1]
    path = path_features(masked, roots, states)
    features = torch.cat((stale[:, None].expand(-1, rows, -1, -1), path), dim=-1).double()
    # A sample without a masked position would have no one to attend to.
    present = masked | ~masked.any(dim=-1, keepdim=True)
    bias = torch.zeros(present.shape, dtype=torch.float64, device=masked.device)
    bias = bias.masked_fill(~present, -torch.inf)[:, None, None, None, :]
    x = linear(features, weights.embed, weights.embed_bias)
    width = x.shape[-1]
    for layer in range(weights.project.shape[0]):
        mixed = _attend(weights, layer, x, bias)
        norms = weights.norms[layer]
        x = x + linear(mixed, weights.merge[layer], weights.merge_bias[layer])
        x = layer_norm(x, (width,), *norms[0])
        inner = linear(x, weights.up[layer], weights.up_bias[layer]).relu()
        x = layer_norm(x + linear(inner, weights.down[layer], weights.down_bias[layer]), (width,), *norms[1])
    hidden = linear(x, weights.head, weights.head_bias).relu()
    scores: Tensor = (hidden @ weights.score) + weights.score_bias
    return scores


def _attend(weights: OrderWeights, layer: int, x: Tensor, bias: Tensor) -> Tensor:
    """What the heads of a layer read, [S, N, L, W]; ``bias`` [S, 1, 1, 1, L]."""
    width = x.shape[-1]
    size = width // weights.num_heads
    projected = linear(x, weights.project[layer], weights.project_bias[layer])
    query, key, value = projected.unflatten(-1, (3, weights.num_heads, size)).permute(3, 0, 1, 4, 2, 5)
    scores = query @ key.transpose(-1, -2) / math.sqrt(size) + bias
    mixed: Tensor = (scores.softmax(dim=-1) @ value).transpose(2, 3).flatten(-2)
    return mixed
