"""The floor of SPOT-γ: its sweep counts what replay counts, and the choice keeps to its bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dlmgrid.workers.drafting.gamma_calibration import GammaPoint, choose_gamma, sweep_gamma
from dlmgrid.workers.drafting.order_model import OrderModel
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future
from dlmgrid.workers.trajectories.trajectory import Trajectory


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sweep_counts_the_rounds_of_a_replay(
    tiny_runs: Callable[..., list[Trajectory]], temperature: float
) -> None:
    torch.manual_seed(0)
    model, runs = OrderModel(), tiny_runs(4, temperature=temperature)
    points = sweep_gamma(runs, model, budget=6, gammas=(0.3, 0.03))
    assert [point.gamma for point in points] == [0.0, 0.03, 0.3]
    assert points[0].forwards < sum(len(run.commits) for run in runs) / 4, "drafting saves forwards"
    for point in points:
        drafter = SpotDrafter(model, min_log_mass=math.log(point.gamma) if point.gamma else -math.inf)
        batch = ReplayBatch(runs)
        cell = replace(batch.cell, method="ssd", budget=6)  # any method: the drafter is given
        with torch.inference_mode():
            replayed = batch.replay(cell, without_future(drafter))
        assert point.forwards == sum(result.nfe_denoise for result in replayed) / 4
        assert point.drafted_nodes == sum(result.drafted_nodes for result in replayed) / 4


def test_the_choice_is_the_largest_floor_within_the_bound() -> None:
    points = [
        GammaPoint(gamma=gamma, forwards=forwards, drafted_nodes=0.0)
        for gamma, forwards in ((0.0, 30.0), (0.01, 31.0), (0.05, 34.0), (0.1, 34.5))
    ]
    chosen = choose_gamma(points, 4.0)
    assert chosen is not None and chosen.gamma == 0.05
    assert choose_gamma(points, 0.5) is None
