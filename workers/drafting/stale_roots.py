"""The roots of recorded runs: the states at which a drafter may ever be asked.

A drafted run visits only states of the serialized run, and its stale distributions at a root are those of the state
one step earlier. So every step of a recorded run but the first of a block is a root that some drafted run may have,
and what a lossless drafter proposes there depends on nothing else. Calibration and training go through all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.trajectories.replay import ReplayBatch
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


def stale_inputs(batch: ReplayBatch, steps: Tensor) -> DraftInputs:
    """What a drafter reads at the roots ``steps`` (int64 [R], of :func:`root_steps`) of a batch of one trajectory."""
    return batch.inputs(batch.cell, torch.zeros_like(steps), steps)
