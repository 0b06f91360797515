"""The roots of recorded runs, each with the stale snapshot that a drafter would have there.

A drafted run visits only states of the serialized run, and its stale distributions at a root are those of the state
one step earlier. So every step of a recorded run but the first of a block is a root that some drafted run may have,
and what a lossless drafter proposes there depends on nothing else. Calibration, training and replay read these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.trajectories.trajectory import Trajectory


def root_steps(trajectory: Trajectory) -> Tensor:
    """int64 [R]: the steps whose state may be a drafted root: all but the first of each block."""
    starts = trajectory.block_starts
    return (starts[1:] == starts[:-1]).nonzero().flatten() + 1


def steps_left(trajectory: Trajectory) -> Tensor:
    """int64 [n]: how many steps the block still takes, the step itself counted."""
    num_steps = trajectory.block_starts.shape[0]
    _, lengths = torch.unique_consecutive(trajectory.block_starts, return_counts=True)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    left: Tensor = ends - torch.arange(num_steps)
    return left


def stale_snapshots(trajectory: Trajectory, steps: Tensor) -> Snapshots:
    """Snapshots of R rows: what the pass of the step before each of ``steps`` (int64 [R]) left behind."""
    stale = steps - 1
    snapshots = Snapshots(steps.shape[0], trajectory.block_length, trajectory.states.device)
    snapshots.masked[:] = trajectory.states[stale] == MASKED
    snapshots.is_valid[:] = True
    for name in ("token_ids", "probabilities", "entropy", "tail_mass", "log_tempered_mass"):
        getattr(snapshots, name)[:] = getattr(trajectory, name)[stale]
    return snapshots


def stale_inputs(trajectory: Trajectory, steps: Tensor) -> DraftInputs:
    """What a drafter reads at the roots ``steps`` (int64 [R], from :func:`root_steps`), under coupled noise."""
    settings = trajectory.settings
    return DraftInputs(
        roots=trajectory.states[steps],
        commit_counts=trajectory.commit_counts[steps],
        block_starts=trajectory.block_starts[steps],
        keys=torch.tensor(trajectory.key, dtype=torch.int64).expand(steps.shape[0], 2),
        snapshots=stale_snapshots(trajectory, steps),
        rule=build_rule(settings["decoder"], settings["commits_per_step"], settings["threshold"]),
        temperature=trajectory.temperature,
        noise=NoiseTable(settings["seed"], settings["noise"]),
        stream=Stream.TOKEN,
    )
