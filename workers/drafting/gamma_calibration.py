"""Choosing SPOT-γ's floor on recorded runs: the largest γ that costs few forwards at a large budget.

Whatever γ is, the tree at a root is the part of SPOT's own tree with at least that mass, and a drafted run has its
roots on the recorded path. So SPOT's tree is grown once at every root of a run, the mass of each following state is
looked up in it, and the rounds of every γ are counted by jumping along the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_model import OrderModel
from dlmgrid.workers.drafting.spot import make_drafter
from dlmgrid.workers.drafting.stale_roots import root_steps, stale_inputs, steps_left
from dlmgrid.workers.drafting.token_model import TokenModel
from dlmgrid.workers.trajectories.replay import ReplayBatch
from dlmgrid.workers.trajectories.trajectory import Trajectory

GAMMAS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
"""The floors that are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GammaPoint:
    """One floor, 0 for none: denoising forwards and drafted states of a generation, means over the runs."""

    gamma: float
    forwards: float
    drafted_nodes: float


def sweep_gamma(
    runs: Sequence[Trajectory],
    model: OrderModel | TokenModel,
    *,
    budget: int,
    gammas: Sequence[float] = GAMMAS,
    device: str = "cpu",
) -> list[GammaPoint]:
    """The points of γ = 0 and of ``gammas``, in ascending order. ``runs`` must not be empty; ``device`` computes the
    model."""
    drafter = make_drafter(model)
    if device != "cpu":
        drafter.place(torch.device(device))
    floors = [0.0, *sorted(gammas)]
    counts = [_count_rounds(run, drafter, budget, floors) for run in runs]
    return [
        GammaPoint(
            gamma=gamma,
            forwards=sum(count[index][0] for count in counts) / len(runs),
            drafted_nodes=sum(count[index][1] for count in counts) / len(runs),
        )
        for index, gamma in enumerate(floors)
    ]


def choose_gamma(points: Sequence[GammaPoint], max_rise: float) -> GammaPoint | None:
    """The point of largest γ whose forwards are at most ``max_rise`` above those of γ = 0; None where there is none."""
    base = next(point for point in points if point.gamma == 0)
    fitting = [point for point in points if point.gamma > 0 and point.forwards - base.forwards <= max_rise]
    return max(fitting, key=lambda point: point.gamma, default=None)


@torch.inference_mode()
def _count_rounds(
    run: Trajectory, drafter: Drafter, budget: int, floors: Sequence[float]
) -> list[tuple[int, int]]:
    """(denoising forwards, drafted states) of one run under each floor."""
    steps = root_steps(run)
    tree = DraftTree(steps.shape[0], budget, run.block_length, run.states.device)
    if steps.numel():
        inputs = stale_inputs(ReplayBatch([run]), steps)
        tree.plant(inputs.roots)
        drafter.draft(inputs, tree)
    path_mass = _path_masses(run, steps, tree)
    node_mass = torch.where(tree.is_node(), tree.log_mass, -torch.inf)[:, 1:]
    row_of = {step: row for row, step in enumerate(steps.tolist())}
    num_steps = len(run.commits)
    counts = []
    for gamma in floors:
        floor = math.log(gamma) if gamma else -math.inf
        survives = (path_mass >= floor) & (path_mass > -torch.inf)
        accepted = survives.to(torch.int8).cumprod(dim=1).sum(dim=1).tolist()
        nodes = ((node_mass >= floor) & (node_mass > -torch.inf)).sum(dim=1).tolist()
        forwards = drafted = step = 0
        while step < num_steps:
            forwards += 1
            row = row_of.get(step)
            drafted += 0 if row is None else nodes[row]
            step += 1 + (0 if row is None else accepted[row])
        counts.append((forwards, drafted))
    return counts


def _path_masses(run: Trajectory, steps: Tensor, tree: DraftTree) -> Tensor:
    """fp64 [R, D]: the log mass that the tree of each root gives to the states that follow; -inf: not in the tree."""
    masses = torch.full((steps.shape[0], tree.budget), -torch.inf, dtype=torch.float64)
    left = steps_left(run)
    for ahead in range(1, tree.budget + 1):
        rows = (left[steps] > ahead).nonzero().flatten()
        if not rows.numel():
            break
        found = tree.find(rows, run.states[steps[rows] + ahead])
        masses[rows, ahead - 1] = torch.where(found > 0, tree.log_mass[rows, found.clamp_min(0)], -torch.inf)
    return masses
