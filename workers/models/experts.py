"""The mixture of experts of a layer: the router, and the routed experts' sum.

Every row is routed and summed by itself: an expert's rows go through in whole panels (kernels/gemm), a row's
outputs are added in the order of their rank, and equal scores go to the lowest id. What else is in the pass changes
no bit. Source of the routing: ``LLaDA2MoeGate`` of inclusionAI/dFactory, models/llada2_moe.

Shapes: R rows, H hidden size, E experts, k chosen a row, I width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.kernels.operators import Operators
from dlmgrid.workers.models.config import ExpertConfig
from dlmgrid.workers.models.weights import ExpertWeights


def route(config: ExpertConfig, scores: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each row by rank, int64 [R, k], and their weights, fp32 [R, k].

    ``scores`` fp32 [R, E] are sigmoids; the choice is made by score + ``bias`` [E], the weights from the score alone.
    A group's score is the sum of its two best; ties go to the lowest group and expert.
    """
    selection = scores + bias
    if config.num_groups > 1:
        grouped = selection.unflatten(1, (config.num_groups, -1))
        best = grouped.sort(dim=2, descending=True).values
        of_group = best[..., 0] + best[..., 1]
        kept = of_group.sort(dim=1, descending=True, stable=True).indices[:, : config.num_kept_groups]
        is_kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, kept, True)
        selection = grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
    chosen = selection.sort(dim=1, descending=True, stable=True).indices[:, : config.num_chosen]
    picked = scores.gather(1, chosen)
    total = picked[:, 0].clone()
    for rank in range(1, config.num_chosen):
        total += picked[:, rank]
    return chosen, picked / (total[:, None] + 1e-20) * config.routed_scale


def run_experts(config: ExpertConfig, weights: ExpertWeights, rows: Tensor, operators: Operators) -> Tensor:
    """The weighted sum of the routed experts for ``rows`` [R, H]: [R, H], same dtype, summed in fp32."""
    logits = operators.linear(rows.float(), weights.router)
    scores = torch.ones_like(logits).div_(logits.neg().exp_().add_(1.0))
    chosen, share = route(config, scores, weights.router_bias)
    return operators.run_routed(rows, chosen, share, weights.gate_up, weights.down)
