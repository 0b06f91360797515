"""Replay: what a drafter would have cost on recorded generations, without a model.

Given the noise, the target's transition is a function of the state, so an accelerated run visits exactly the states
of the serialized one; a drafter reads nothing but the snapshot of the last state visited. Hence the rounds of any
lossless method follow from a trajectory alone: draft from the recorded snapshot, then walk along the recorded states
as far as they were drafted. Forwards, accepted steps, drafted nodes and rows equal those of a live run.

Generations are replayed together, each with its own cursor. Legend: N steps of all generations one after another,
S generations, A of them unfinished, L block length, D budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlmgrid.workers.cell import CANVAS_CACHES, Cell
from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.decoding.decoder import VERIFICATIONS
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.trajectories.trajectory import Trajectory

NEVER = torch.iinfo(torch.int64).max
"""``Future.steps_ahead`` of a position that no later step commits."""


REPLAYABLE = ("coupled", "uncoupled")
"""The verification modes that stay on the serialized path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Future:
    """What the serialized run will do to each root's block; only diagnostic drafters look.

    ``tokens`` int32 [A, L] of the finished block; ``steps_ahead`` int64 [A, L]: 0 for what the root's own step
    commits, 1 for the step after it, …; ``NEVER`` where the root is filled already.
    """

    tokens: Tensor
    steps_ahead: Tensor


DraftWithFuture = Callable[[DraftInputs, DraftTree, Future], None]


@dataclass(kw_only=True, slots=True)
class Replayed:
    """The cost of one generation under a drafter; the names are those of the decoder's ``Generation``."""

    item_id: str
    repeat: int
    prompt_tokens: int
    nfe_prefill: int
    nfe_commit: int
    nfe_denoise: int = 0
    drafted_nodes: int = 0
    rows_computed: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def nfe_total(self) -> int:
        """Every target forward: prefill, denoising and commit passes."""
        return self.nfe_prefill + self.nfe_denoise + self.nfe_commit


class ReplayBatch:
    """Some trajectories of one recorded cell, packed for replay.

    Raises ValueError when there are none or they are of different cells.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        if len({trajectory.settings["cell_key"] for trajectory in trajectories}) != 1:
            raise ValueError("a batch needs trajectories of one recorded cell")
        self.cell = trajectories[0].cell
        self.block_length = trajectories[0].block_length
        self.states = torch.cat([t.states for t in trajectories])
        self.block_starts = torch.cat([t.block_starts for t in trajectories])
        self.commit_counts = torch.cat([t.commit_counts for t in trajectories])
        self.keys = torch.tensor([t.key for t in trajectories], dtype=torch.int64)
        self.snapshots = Snapshots.of(
            masked=self.states == MASKED,
            token_ids=torch.cat([t.token_ids for t in trajectories]),
            probabilities=torch.cat([t.probabilities for t in trajectories]),
            entropy=torch.cat([t.entropy for t in trajectories]),
            tail_mass=torch.cat([t.tail_mass for t in trajectories]),
            log_tempered_mass=torch.cat([t.log_tempered_mass for t in trajectories]),
            is_valid=torch.ones(self.states.shape[0], dtype=torch.bool),
        )
        num_steps = torch.tensor([t.num_steps for t in trajectories])
        self.ends = num_steps.cumsum(0)
        self.firsts = self.ends - num_steps
        self.commits = [commits for t in trajectories for commits in t.commits]
        self.sample_of_step = torch.arange(len(trajectories)).repeat_interleave(num_steps)
        self.identities = [(t.item_id, t.repeat, t.prompt_tokens) for t in trajectories]
        self.final_tokens, self.committed_at = self._look_ahead()

    def _look_ahead(self) -> tuple[Tensor, Tensor]:
        """The finished block int32 [N, L] of each step, and the step that commits each position int64 [N, L]
        (``NEVER``: the prompt)."""
        tokens, committed_at = self.states.clone(), torch.full(self.states.shape, NEVER)
        first = 0
        for step in range(len(self.commits)):
            if step + 1 < len(self.commits) and not self.starts_block(step + 1):
                continue
            block = slice(first, step + 1)
            for number in range(first, step + 1):
                for position, token in self.commits[number]:
                    tokens[block, position] = token
                    committed_at[block, position] = number
            first = step + 1
        return tokens, committed_at

    def starts_block(self, step: int) -> bool:
        """Whether the step is the first of its block."""
        return bool(self.commit_counts[step] == 0)

    def inputs(self, cell: Cell, samples: Tensor, steps: Tensor, age: int = 1) -> DraftInputs:
        """What a drafter of ``cell`` reads when ``samples`` int64 [A] are about to take ``steps`` int64 [A].

        ``age`` is how many steps ago the snapshot was made; it must lie in the same block where it is valid.
        """
        snapshots = self.snapshots.select((steps - age).clamp_min(0))
        snapshots.is_valid = self.commit_counts[steps] > 0
        return DraftInputs(
            roots=self.states[steps],
            commit_counts=self.commit_counts[steps],
            block_starts=self.block_starts[steps],
            keys=self.keys[samples],
            snapshots=snapshots,
            rule=build_rule(cell),
            temperature=cell.temperature,
            noise=NoiseTable(cell.seed, cell.noise),
            stream=VERIFICATIONS[cell.verification],
        )

    def future(self, steps: Tensor) -> Future:
        """What happens after each of ``steps``."""
        committed_at = self.committed_at[steps]
        is_open = self.states[steps] == MASKED
        return Future(
            tokens=self.final_tokens[steps],
            steps_ahead=torch.where(is_open, committed_at - steps[:, None], NEVER),
        )

    def replay(self, cell: Cell, draft: DraftWithFuture) -> list[Replayed]:
        """Replay every generation under ``cell``'s budget and verification.

        Args:
            cell: a canonical cell that differs from the recorded one in drafter, budget and verification only.
            draft: fills trees; not called at budget 0.

        Raises:
            ValueError: the cell's serialized run is not the recorded one, or its verification cannot be replayed.
        """
        if cell.reference().cell_key != self.cell.cell_key:
            raise ValueError("the cell has another serialized run than the recorded one")
        if cell.verification not in REPLAYABLE:
            raise ValueError(f"verification {cell.verification!r} cannot be replayed")
        results = [self._start(index) for index in range(len(self.identities))]
        samples, steps = torch.arange(len(results)), self.firsts.clone()
        while samples.numel():
            tree = DraftTree(samples.numel(), cell.budget, self.block_length, self.states.device)
            tree.plant(self.states[steps])
            if cell.budget > 0:
                draft(self.inputs(cell, samples, steps), tree, self.future(steps))
            accepted = self._walk(tree, samples, steps)
            for sample, step, count, nodes in zip(
                samples.tolist(), steps.tolist(), accepted.tolist(), tree.num_nodes.tolist(), strict=True
            ):
                result = results[sample]
                result.nfe_denoise += 1
                result.accepted.append(count)
                result.drafted_nodes += nodes - 1
                result.rows_computed += nodes * self._rows_of_branch(step, result.prompt_tokens)
            steps = steps + accepted + 1
            goes_on = steps < self.ends[samples]
            samples, steps = samples[goes_on], steps[goes_on]
        return results

    def _start(self, index: int) -> Replayed:
        """The passes that no drafter changes: the prefill of whole prompt blocks, and one commit pass a block."""
        item_id, repeat, prompt_tokens = self.identities[index]
        if self.cell.cache in CANVAS_CACHES:
            return Replayed(
                item_id=item_id, repeat=repeat, prompt_tokens=prompt_tokens, nfe_prefill=0, nfe_commit=0
            )
        steps = slice(int(self.firsts[index]), int(self.ends[index]))
        num_blocks = int((self.commit_counts[steps] == 0).sum())
        prefilled = int(self.block_starts[steps.start])
        return Replayed(
            item_id=item_id,
            repeat=repeat,
            prompt_tokens=prompt_tokens,
            nfe_prefill=int(prefilled > 0),
            nfe_commit=num_blocks,
            rows_computed=prefilled + num_blocks * self.block_length,
        )

    def _rows_of_branch(self, step: int, prompt_tokens: int) -> int:
        """Rows that a pass computes for one branch of the block that ``step`` is in."""
        cache, length = self.cell.cache, self.block_length
        if cache not in CANVAS_CACHES:
            return length
        canvas = prompt_tokens + -(-self.cell.gen_length // length) * length
        if cache == "none" or self.starts_block(step):
            return canvas
        return length if cache == "dual" else canvas - int(self.block_starts[step])

    def _walk(self, tree: DraftTree, samples: Tensor, steps: Tensor) -> Tensor:
        """Accepted nodes int64 [A]: how many states after the root, in its block, the tree holds one after another."""
        accepted = torch.zeros_like(steps)
        walking = torch.arange(samples.numel())
        while walking.numel():
            following = steps[walking] + accepted[walking] + 1
            is_inside = following < self.ends[samples[walking]]
            is_inside &= self.commit_counts[following.clamp_max(len(self.commits) - 1)] > 0
            walking, following = walking[is_inside], following[is_inside]
            walking = walking[tree.find(walking, self.states[following]) >= 0]
            accepted[walking] += 1
        return accepted
