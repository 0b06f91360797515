"""Training examples of the order model, from recorded draft-free runs.

For a stale snapshot of step t and a depth d ≥ 1, the virtual state holds the first d steps after the snapshot, its
inputs stay those of the snapshot, and the label is what step t + d fills. Depth 1 is the root itself. States whose
next step completes the block are left out: a drafter never asks about them, and at one mask left the answer is given.

Legend: E examples, P snapshots, L block length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.order_model import path_features, stale_features
from dlmgrid.workers.drafting.stale_roots import root_steps, stale_inputs, steps_left
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.replay import ReplayBatch
from dlmgrid.workers.trajectories.trajectory import Trajectory

MAX_DEPTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderExamples:
    """All examples of some runs; a row of the first three tensors is a snapshot, of the others an example.

    Attributes:
        features: fp32 [P, L, 72], frozen at the snapshot; masked: bool [P, L], its masked positions.
        roots: int32 [P, L], the states one step after.
        snapshot: int64 [E], which snapshot; states: int32 [E, L], the virtual states; labels: bool [E, L], the
            positions that the next step fills.
        depths: int64 [E], 1 to ``MAX_DEPTH``; blocks: int64 [E], the block's number in its generation.
    """

    features: Tensor
    masked: Tensor
    roots: Tensor
    snapshot: Tensor
    states: Tensor
    labels: Tensor
    depths: Tensor
    blocks: Tensor

    @property
    def num_examples(self) -> int:
        return int(self.depths.shape[0])

    def batch(self, which: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features fp32 [B, L, 74], the snapshot's positions, those still masked and the label, bool [B, L], of the
        examples ``which`` (int64 [B])."""
        snapshot, states = self.snapshot[which], self.states[which]
        masked = self.masked[snapshot]
        path = path_features(masked, self.roots[snapshot], states[:, None])[:, 0]
        features = torch.cat((self.features[snapshot], path), dim=-1)
        return features, masked, masked & (states == MASKED), self.labels[which]


def is_held_out(item_id: str) -> bool:
    """One item in ten is kept for evaluation; the choice hangs on its id alone, so no repeat of it is trained on."""
    return int.from_bytes(hashlib.sha256(item_id.encode()).digest()[:8], "big") % 10 == 0


def split_runs(runs: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Training and held-out runs, apart by prompt. Raises InputError where either is empty."""
    held_out = [run for run in runs if is_held_out(run.item_id)]
    training = [run for run in runs if not is_held_out(run.item_id)]
    check_split({run.item_id for run in runs})
    return training, held_out


def check_split(item_ids: Collection[str]) -> None:
    """Raises InputError where one of the two parts of these items is empty."""
    held_out = sum(is_held_out(item_id) for item_id in item_ids)
    if not 0 < held_out < len(item_ids):
        raise InputError(
            f"of {len(item_ids)} recorded items {len(item_ids) - held_out} are for training and {held_out} held out; "
            "record more items: about one in ten is held out, chosen by a hash of its id, so that 50 are enough"
        )


def make_examples(runs: Sequence[Trajectory]) -> OrderExamples:
    """Every snapshot and depth of the runs. Raises InputError for none, or for runs of several block lengths."""
    lengths = {run.block_length for run in runs}
    if len(lengths) > 1:
        raise InputError(
            f"the recorded runs have blocks of {sorted(lengths)} tokens; an order model is trained on one length"
        )
    parts = [part for run in runs if (part := _examples_of(run)) is not None]
    if not parts:
        raise InputError(
            "the recorded runs hold no step to learn an order from: their blocks take one or two steps"
        )
    offsets = torch.tensor([0, *(part.masked.shape[0] for part in parts[:-1])]).cumsum(0)
    moved = [part.snapshot + offset for part, offset in zip(parts, offsets, strict=True)]
    return OrderExamples(
        features=torch.cat([part.features for part in parts]),
        masked=torch.cat([part.masked for part in parts]),
        roots=torch.cat([part.roots for part in parts]),
        snapshot=torch.cat(moved),
        states=torch.cat([part.states for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        depths=torch.cat([part.depths for part in parts]),
        blocks=torch.cat([part.blocks for part in parts]),
    )


def _examples_of(run: Trajectory) -> OrderExamples | None:
    steps = root_steps(run)
    left = steps_left(run)
    labels = torch.zeros(run.states.shape, dtype=torch.bool)
    for step, commits in enumerate(run.commits):
        labels[step, [position for position, _ in commits]] = True
    row: list[int] = []
    depth: list[int] = []
    for index, step in enumerate(steps.tolist()):
        num_depths = min(MAX_DEPTH, int(left[step]) - 1)
        row += [index] * num_depths
        depth += range(1, num_depths + 1)
    if not row:
        return None
    snapshot, depths = torch.tensor(row), torch.tensor(depth)
    at = steps[snapshot] + depths - 1  # the step that sees the virtual state
    snapshots = stale_inputs(ReplayBatch([run]), steps).snapshots
    _, blocks = torch.unique_consecutive(run.block_starts, return_inverse=True)
    return OrderExamples(
        features=stale_features(snapshots),
        masked=snapshots.masked,
        roots=run.states[steps],
        snapshot=snapshot,
        states=run.states[at],
        labels=labels[at],
        depths=depths,
        blocks=blocks[at],
    )
