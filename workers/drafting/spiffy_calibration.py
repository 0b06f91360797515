"""Calibration of Spiffy's draft graph from recorded runs, by rewinding (arXiv 2509.18085, Algorithm 2).

From every root of a recorded run, the steps that the decoder then took are looked up in the ranks that the root's
stale distributions give: after each step the set of (position rank, token rank) pairs filled so far is one node. A
path ends where a token is not among the 32 candidates, before the block is complete, or after ``horizon`` steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dlmgrid.workers.cell import DEFAULT_CONFIDENCE
from dlmgrid.workers.drafting.calibration_data import check_calibration, describe_calibration
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.spiffy_graph import DraftGraph, GraphKey, Pairs, Path_, build_graph
from dlmgrid.workers.drafting.spiffy_ranks import positions_by_rank
from dlmgrid.workers.drafting.stale_roots import root_steps, stale_inputs, steps_left
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.replay import NEVER, Future, ReplayBatch
from dlmgrid.workers.trajectories.trajectory import Trajectory


def calibrate_graph(trajectories: Iterable[Trajectory], *, budget: int, selection: str) -> DraftGraph:
    """The draft graph of the recorded runs.

    Raises:
        InputError: no runs, runs of test items, or of more than one model, decoder or temperature.
    """
    runs = list(trajectories)
    check_calibration(runs)
    keys = {graph_key(run) for run in runs}
    if len(keys) > 1:
        temperatures = sorted({key.temperature for key in keys})
        remedy = "record them into folders of their own"
        if len(temperatures) == len(keys):
            remedy = f"take one by --temperature ({', '.join(f'{value:g}' for value in temperatures)})"
        raise InputError(
            f"the recorded runs hold {len(keys)} combinations of model, decoder and temperature; "
            f"a draft graph belongs to one: {remedy}"
        )
    paths = [path for run in runs for path in rewind(run, horizon=budget)]
    return build_graph(
        paths, key=keys.pop(), budget=budget, selection=selection, calibration=describe_calibration(runs)
    )


def graph_key(trajectory: Trajectory) -> GraphKey:
    """What a graph calibrated on this run is for."""
    settings = trajectory.settings
    return GraphKey(
        weight_fingerprint=settings["weight_fingerprint"],
        decoder=settings["decoder"],
        commits_per_step=settings["commits_per_step"],
        threshold=settings["threshold"],
        comparison=settings.get("comparison"),
        factor=settings.get("factor"),
        confidence=settings.get("confidence", DEFAULT_CONFIDENCE),
        sub_block_length=settings.get("sub_block_length", 0),
        temperature=trajectory.temperature,
        noise=settings["noise"],
        block_length=trajectory.block_length,
    )


def rewind(trajectory: Trajectory, *, horizon: int) -> list[Path_]:
    """The path of every root of one run, in the order of steps; a path may be empty."""
    steps = root_steps(trajectory)
    if not steps.numel():
        return []
    batch = ReplayBatch([trajectory])
    inputs = stale_inputs(batch, steps)
    position_rank = positions_by_rank(inputs).argsort(dim=-1).tolist()
    token_rank = _token_ranks(inputs, batch.future(steps), steps, trajectory.commit_counts).tolist()
    left = steps_left(trajectory)[steps].tolist()
    paths = []
    for row, step in enumerate(steps.tolist()):
        pairs: list[tuple[int, int]] = []
        path: list[Pairs] = []
        for following in range(step, step + min(horizon, left[row] - 1)):
            found = [(position_rank[row][at], token_rank[row][at]) for at, _ in trajectory.commits[following]]
            if any(rank < 0 for _, rank in found):
                break
            pairs += found
            path.append(tuple(sorted(pairs)))
        paths.append(tuple(path))
    return paths


def _token_ranks(inputs: DraftInputs, future: Future, steps: Tensor, commit_counts: Tensor) -> Tensor:
    """int64 [R, L]: the rank, at each root, of the token that the run puts at each position later; -1: no candidate.

    A position is drawn for good once, after a number of commits that the run fixes, so it has one rank a root.
    """
    candidates = inputs.snapshots.token_ids
    scores = inputs.snapshots.probabilities
    if inputs.temperature > 0 and inputs.stream is not None:
        ahead = torch.where(future.steps_ahead == NEVER, 0, future.steps_ahead)
        positions = torch.arange(candidates.shape[1])
        noise = inputs.noise.entries(
            inputs.keys[:, None].expand(*ahead.shape, 2),
            inputs.stream,
            inputs.block_starts[:, None] + positions,
            commit_counts[steps[:, None] + ahead],
            candidates,
        )
        scores = scores.log() / inputs.temperature + noise
    rank = scores.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    is_token = (candidates == future.tokens[..., None]) & (future.steps_ahead != NEVER)[..., None]
    return torch.where(is_token.any(dim=-1), torch.where(is_token, rank, 0).sum(dim=-1), -1)
