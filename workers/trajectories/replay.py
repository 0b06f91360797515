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
from dlmgrid.workers.decoding.decoder import VERIFICATIONS, canvas_length
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.decoding.window import WindowTrees, crosses, draft_round, refreshes, wants_following
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs
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


def without_future(drafter: Drafter) -> DraftWithFuture:
    """What a replay calls for a drafter that never looks ahead, as none does but the diagnostic ones."""

    def draft(inputs: DraftInputs, tree: DraftTree, _: Future) -> None:
        drafter.draft(inputs, tree)

    return draft


@dataclass(kw_only=True, slots=True)
class Replayed:
    """The cost of one generation under a drafter; the names are those of the decoder's ``Generation``.

    ``nfe_reference``: all forwards of the serialized run, commit passes apart from denoising. ``depths`` and
    ``widths``, an entry a round: steps to the deepest drafted node, and nodes of the fullest depth.
    """

    item_id: str
    repeat: int
    prompt_tokens: int
    nfe_prefill: int
    nfe_commit: int
    nfe_reference: int
    nfe_denoise: int = 0
    drafted_nodes: int = 0
    rows_computed: int = 0
    accepted: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

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
            hidden=_joined([t.hidden for t in trajectories]),
        )
        windows = [t.window for t in trajectories if t.window is not None]
        self.next_snapshots = joined_snapshots([w.snapshots for w in windows]) if windows else None
        self.stop_token_ids = windows[0].stop_token_ids if windows else ()
        self.canvases = torch.tensor(
            [canvas_length(t.prompt_tokens, self.cell.gen_length, self.block_length) for t in trajectories]
        )
        num_steps = torch.tensor([t.num_steps for t in trajectories])
        self.ends = num_steps.cumsum(0)
        self.firsts = self.ends - num_steps
        self.commits = [commits for t in trajectories for commits in t.commits]
        self.sample_of_step = torch.arange(len(trajectories)).repeat_interleave(num_steps)
        self.identities = [(t.item_id, t.repeat, t.prompt_tokens) for t in trajectories]
        self.final_tokens, self.committed_at = self._look_ahead()
        self._next_firsts = self._find_next_firsts()

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

    def _find_next_firsts(self) -> Tensor:
        num_steps = len(self.commits)
        found, ahead = torch.arange(num_steps), num_steps
        for step in range(num_steps - 1, -1, -1):
            is_mine = ahead < num_steps and self.sample_of_step[ahead] == self.sample_of_step[step]
            found[step] = ahead if is_mine else step
            if self.starts_block(step):
                ahead = step
        return found

    def starts_block(self, step: int) -> bool:
        """Whether the step is the first of its block."""
        return bool(self.commit_counts[step] == 0)

    def inputs(
        self, cell: Cell, samples: Tensor, steps: Tensor, age: int = 1, looked: Tensor | None = None
    ) -> DraftInputs:
        """What a drafter of ``cell`` reads when ``samples`` int64 [A] are about to take ``steps`` int64 [A].

        ``age`` is how many steps ago the snapshot was made; it must lie in the same block where it is valid.
        ``looked`` int64 [A] is the step beside which the block was looked at before it began, -1 for none: what its
        first round is drafted from.
        """
        snapshots = self.snapshots.select((steps - age).clamp_min(0))
        snapshots.is_valid = self.commit_counts[steps] > 0
        if looked is not None and self.next_snapshots is not None:
            fresh = ((self.commit_counts[steps] == 0) & (looked >= 0)).nonzero().flatten()
            snapshots.take(fresh, self.next_snapshots, looked[fresh])
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

    def looked_at(self, looked: Tensor) -> Snapshots:
        """What is known of the next block of samples that last looked at it beside the steps ``looked`` int64 [A]."""
        assert self.next_snapshots is not None
        found = self.next_snapshots.select(looked.clamp_min(0))
        found.is_valid = found.is_valid & (looked >= 0)
        return found

    def next_firsts(self, steps: Tensor) -> Tensor:
        """int64 [A]: the first step of the block after that of each step; the step itself where there is none."""
        return self._next_firsts[steps]

    def future(self, steps: Tensor) -> Future:
        """What happens after each of ``steps``."""
        committed_at = self.committed_at[steps]
        is_open = self.states[steps] == MASKED
        return Future(
            tokens=self.final_tokens[steps],
            steps_ahead=torch.where(is_open, committed_at - steps[:, None], NEVER),
        )

    def replay(self, cell: Cell, draft: DraftWithFuture) -> list[Replayed]:
        """Replay every generation under ``cell``'s budget, verification and passes.

        Args:
            cell: a canonical cell that differs from the recorded one in drafter, budget, verification and passes only.
            draft: fills trees; not called at budget 0.

        Raises:
            ValueError: the cell's serialized run is not the recorded one, its verification cannot be replayed, or it
                needs a window that was not loaded.
        """
        if cell.reference().cell_key != self.cell.cell_key:
            raise ValueError("the cell has another serialized run than the recorded one")
        if cell.verification not in REPLAYABLE or cell.product_tau is not None:
            raise ValueError(f"verification {cell.verification!r} cannot be replayed")
        if cell.window and self.next_snapshots is None:
            raise ValueError(f"window {cell.window!r} needs trajectories loaded with their window")
        return CellReplay(self, cell, draft).run()

    def start(self, index: int) -> Replayed:
        """The passes before the first block: the prefill of whole prompt blocks."""
        item_id, repeat, prompt_tokens = self.identities[index]
        first, end = int(self.firsts[index]), int(self.ends[index])
        if self.cell.cache in CANVAS_CACHES:
            return Replayed(
                item_id=item_id,
                repeat=repeat,
                prompt_tokens=prompt_tokens,
                nfe_prefill=0,
                nfe_commit=0,
                nfe_reference=end - first,
            )
        prefilled = int(self.block_starts[first])
        num_blocks = self.block_starts[first:end].unique().numel()
        return Replayed(
            item_id=item_id,
            repeat=repeat,
            prompt_tokens=prompt_tokens,
            nfe_prefill=int(prefilled > 0),
            nfe_commit=0,
            nfe_reference=int(prefilled > 0) + end - first + num_blocks,
            rows_computed=prefilled,
        )

    def rows_of_branch(self, step: int, prompt_tokens: int) -> int:
        """Rows that a pass computes for one branch of the block that ``step`` is in."""
        cache, length = self.cell.cache, self.block_length
        if cache not in CANVAS_CACHES:
            return length
        canvas = prompt_tokens + -(-self.cell.gen_length // length) * length
        if cache == "none" or int(self.commit_counts[step]) == 0:
            return canvas
        return length if cache == "dual" else canvas - int(self.block_starts[step])

    def walk(self, tree: DraftTree, samples: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Walk the trees of ``samples`` int64 [A], whose roots are about to take ``steps`` int64 [A].

        Returns int64 [A], the steps taken in the block, at least one; and bool [A], whether the last one led to a
        drafted state that completes the block.
        """
        taken = torch.ones_like(steps)
        completes = torch.zeros_like(steps, dtype=torch.bool)
        walking = torch.arange(samples.numel())
        while walking.numel():
            following = steps[walking] + taken[walking]
            is_inside = following < self.ends[samples[walking]]
            is_inside &= self.commit_counts[following.clamp_max(len(self.commits) - 1)] > 0
            inside = self.states[following.clamp_max(len(self.commits) - 1)]
            states = torch.where(is_inside[:, None], inside, self.final_tokens[steps[walking]])
            is_drafted = tree.find(walking, states) >= 0
            completes[walking[is_drafted & ~is_inside]] = True
            walking = walking[is_drafted & is_inside]
            taken[walking] += 1
        return taken, completes


class CellReplay:
    """The replay of one cell on a batch: the loop of the decoder, without its passes."""

    def __init__(self, batch: ReplayBatch, cell: Cell, draft: DraftWithFuture) -> None:
        self._batch = batch
        self._cell = cell
        self._draft = draft
        self._results = [batch.start(index) for index in range(len(batch.identities))]
        self._looked = torch.full((len(self._results),), -1, dtype=torch.int64)

    @torch.inference_mode()
    def run(self) -> list[Replayed]:
        """All rounds of all generations."""
        batch = self._batch
        samples, steps = torch.arange(len(self._results)), batch.firsts.clone()
        while samples.numel():
            steps = self._round(samples, steps)
            goes_on = steps < batch.ends[samples]
            samples, steps = samples[goes_on], steps[goes_on]
        return self._results

    def _round(self, samples: Tensor, steps: Tensor) -> Tensor:
        """One round of ``samples`` int64 [A]; the steps int64 [A] that they take next."""
        batch, cell, length = self._batch, self._cell, self._batch.block_length
        looked = self._looked[samples]
        first_rounds = looked if refreshes(cell.window) else None
        inputs = batch.inputs(cell, samples, steps, looked=first_rounds)
        starts_block = batch.commit_counts[steps] == 0
        looked = torch.where(starts_block, -1, looked)
        has_next = batch.block_starts[steps] + length < batch.canvases[samples]
        trees = draft_round(
            self._drafting(samples, steps),
            inputs,
            budget=cell.budget,
            window=cell.window,
            next_snapshots=batch.looked_at(looked) if crosses(cell.window) else None,
            has_next=has_next,
            stop_token_ids=self._stops,
        )
        rows = trees.num_segments()
        if cell.window:
            looks = wants_following(inputs, cell.budget, has_next, self._stops) & (trees.complete < 0)
            rows = rows + looks
            looked = torch.where(looks, steps, looked)
        taken, completes = batch.walk(trees.current, samples, steps)
        entered = completes & trees.enters
        if trees.following is not None and bool(entered.any()):
            inside = entered.nonzero().flatten()
            more, _ = batch.walk(
                trees.following.select(inside), samples[inside], steps[inside] + taken[inside]
            )
            taken[inside] += more
            looked[inside] = -1
        self._looked[samples] = looked
        following = steps + taken
        self._count(samples, steps, taken, trees, rows)
        self._count_commits(samples, steps, following, completes)
        return following

    @property
    def _stops(self) -> tuple[int, ...]:
        return self._batch.stop_token_ids if self._cell.stop == "eos" else ()

    def _drafting(self, samples: Tensor, steps: Tensor) -> Callable[[DraftInputs, DraftTree], None]:
        """The drafter of this round; a diagnostic one looks ahead from the block that it is asked about."""
        batch, draft = self._batch, self._draft

        def run(inputs: DraftInputs, tree: DraftTree) -> None:
            is_next = inputs.block_starts > batch.block_starts[steps]
            at = torch.where(is_next, batch.next_firsts(steps), steps)
            draft(inputs, tree, batch.future(at))

        return run

    def _count(self, samples: Tensor, steps: Tensor, taken: Tensor, trees: WindowTrees, rows: Tensor) -> None:
        columns = (samples, steps, taken, trees.num_drafted(), rows, *tree_shape(trees.current))
        for sample, step, count, nodes, blocks, deepest, widest in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            result = self._results[sample]
            result.nfe_denoise += 1
            branch = self._batch.rows_of_branch(step, result.prompt_tokens)
            result.accepted.append(count - 1)
            result.drafted_nodes += nodes
            result.rows_computed += blocks * branch
            result.depths.append(deepest)
            result.widths.append(widest)

    def _count_commits(self, samples: Tensor, steps: Tensor, following: Tensor, completes: Tensor) -> None:
        """The commit pass of each block that this round ended without a draft that completes it."""
        batch = self._batch
        if batch.cell.cache in CANVAS_CACHES:
            return
        is_over = following >= batch.ends[samples]
        last = following.clamp_max(len(batch.commits) - 1)
        begins = is_over | (batch.commit_counts[last] == 0)  # the walk stands at the end of a block
        beyond = batch.block_starts[(following - 1)] > batch.block_starts[steps]  # of the next block, entered
        needs_pass = begins & (~completes | beyond)
        for index in needs_pass.nonzero().flatten().tolist():
            result = self._results[int(samples[index])]
            result.rows_computed += batch.block_length
            if bool(is_over[index]) or not self._cell.fused_commit:
                result.nfe_commit += 1


def tree_shape(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """int64 [S] each: steps from the root to the deepest node, and nodes of the fullest depth; 0 for a bare root."""
    is_node = tree.is_node()
    is_node[:, 0] = False
    depths = torch.where(is_node, tree.depths.long(), 0)
    counts = torch.zeros(depths.shape[0], int(depths.max()) + 1, dtype=torch.int64)
    counts.scatter_add_(1, depths, is_node.long())
    return depths.amax(dim=1), counts.amax(dim=1)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def joined_snapshots(parts: Sequence[Snapshots]) -> Snapshots:
    """Snapshots of all rows, one struct after another."""
    names = ("masked", "token_ids", "probabilities", "entropy", "tail_mass", "log_tempered_mass", "is_valid")
    return Snapshots.of(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in names},
        hidden=_joined([part.hidden for part in parts]),
    )
