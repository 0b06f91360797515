"""The second half of a round: the walk of every sample's trees, what a fold adds to it, and what it leaves known.

Legend: S samples of a round, A of them walked, N segments of L tokens, H hidden size.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dlmgrid.kernels.logits import LogitsPass, Summary, summarize
from dlmgrid.workers.decoding.folded import (
    compute_pending,
    inputs_at,
    recheck_round,
    split_walk,
    with_pending,
)
from dlmgrid.workers.decoding.generation import Sample
from dlmgrid.workers.decoding.packing import Round
from dlmgrid.workers.decoding.reading import TransitionRule, predictor_of
from dlmgrid.workers.decoding.settings import GREEDY_MATCH, DecodeSettings
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import stopped_states
from dlmgrid.workers.decoding.target import Recorder, Target
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.decoding.verification import SeenStep, WalkedSteps, walk
from dlmgrid.workers.decoding.window import crosses
from dlmgrid.workers.drafting.drafter import DraftInputs


class RoundWalker(ABC):
    """Walks rounds; :class:`~dlmgrid.workers.decoding.decoder.Decoder` drafts them and runs their passes.

    ``_snapshots`` is None where nothing is learnt from a pass, ``_next_snapshots`` where nothing looks at next blocks.
    """

    target: Target
    settings: DecodeSettings
    recorder: Recorder | None
    _logits_pass: Callable[..., LogitsPass] | None
    _device: torch.device
    _looks_ahead: bool
    _snapshots: Snapshots | None
    _next_snapshots: Snapshots | None

    @abstractmethod
    def _finish(self, sample: Sample) -> None:
        """End a sample: its output is cut, its reason to stop is set."""

    @abstractmethod
    def _forget(self, sample: Sample) -> None:
        """Know nothing stale of a sample's block, nor of the next one."""

    def _predicting(self, hidden: Tensor) -> Tensor:
        """The rows [N, L, H] that predict each position of the blocks whose rows are ``hidden``."""
        return torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1) if self.settings.shifted else hidden

    def _walk(self, round_: Round, hidden: Tensor, rows: dict[int, int]) -> None:
        """Walk the trees of the block, then those of the next block where a drafted state completed it.

        ``rows``, by sample what the pass computes, grows by what a recheck does.
        """
        samples, trees, inputs = round_.samples, round_.trees, round_.inputs
        everyone = torch.arange(len(samples), device=self._device)
        drafted = trees.num_drafted().tolist()
        first_segments = torch.tensor(round_.first_segments, device=self._device)
        fold = self.settings.fold
        if fold is not None and fold.pipelined:
            self._walk_pipelined(round_, hidden, rows)
            return
        roots, walked = self._walk_trees(round_, everyone, trees.current, first_segments, inputs, hidden)
        if fold is not None and fold.recheck:
            self._recheck(round_, hidden, roots, walked, rows)
        self._look_at_next_blocks(round_, hidden)
        for sample, root, steps, nodes in zip(samples, roots.tolist(), walked, drafted, strict=True):
            sample.set_block(root)
            _account(sample, steps, nodes)
        if not crosses(self.settings.window):
            return
        finished = trees.current.tokens[everyone, trees.complete.clamp_min(0)]
        has_crossed = (trees.complete >= 0) & (roots == finished).all(dim=1)
        entered = (has_crossed & trees.enters).nonzero().flatten()
        for index in (has_crossed & ~trees.enters).nonzero().flatten().tolist():
            self._finish(samples[index])  # its last block, and the pass has stored it
        if not entered.numel() or trees.following is None:
            return
        for index in entered.tolist():
            samples[index].block_start += self.settings.block_length
            samples[index].block_steps = 0
            self._forget(samples[index])
        length = self.settings.block_length
        beyond = replace(
            inputs,
            commit_counts=torch.zeros_like(inputs.commit_counts),
            block_starts=inputs.block_starts + length,
        )
        next_segments = torch.tensor(round_.next_segments, device=self._device)
        roots, walked = self._walk_trees(round_, entered, trees.following, next_segments, beyond, hidden)
        for index, root, steps in zip(entered.tolist(), roots.tolist(), walked, strict=True):
            samples[index].set_block(root)
            _add_steps(samples[index], steps)
            samples[index].generation.accepted[-1] += len(steps.commits)

    def _walk_pipelined(self, round_: Round, hidden: Tensor, rows: dict[int, int]) -> None:
        """Walk from what is pending through the root into the drafts; what was unfolded counts, the rest is pending.

        A walk that reached the end of a block is checked at once, by a pass that is a forward of its sample.
        """
        trees = with_pending(round_)
        everyone = torch.arange(len(round_.samples), device=self._device)
        firsts = torch.tensor(round_.first_segments, device=self._device)
        inputs = inputs_at(round_.inputs, trees, round_.samples)
        roots, walked = self._walk_trees(round_, everyone, trees, firsts, inputs, hidden)
        ending: list[int] = []
        for index, (sample, root, steps) in enumerate(
            zip(round_.samples, roots.tolist(), walked, strict=True)
        ):
            unfolded = [*round_.pending[index], sample.block]
            count, pending = split_walk(unfolded[0], unfolded, steps)
            nodes = int(round_.trees.current.num_nodes[index]) - 1
            _account(sample, steps.part(0, count), nodes)
            sample.pending = pending
            sample.set_block(root)
            if pending and sample.is_block_complete:
                ending.append(index)
        if not ending:
            return
        chains, firsts, computed = compute_pending(
            self.target, round_.samples, ending, self._device, causal=self.settings.causal
        )
        inputs = inputs_at(round_.inputs, chains, round_.samples)
        which = torch.tensor(ending, device=self._device)
        roots, walked = self._walk_trees(round_, which, chains, firsts, inputs, self._predicting(computed))
        for index, root, steps in zip(ending, roots.tolist(), walked, strict=True):
            sample = round_.samples[index]
            sample.generation.nfe_denoise += 1
            sample.generation.accepted[-1] += len(steps.commits)
            rows[id(sample)] += len(sample.pending) * self.settings.block_length
            sample.pending = []
            sample.set_block(root)
            _add_steps(sample, steps)

    def _recheck(
        self, round_: Round, hidden: Tensor, roots: Tensor, walked: list[WalkedSteps], rows: dict[int, int]
    ) -> None:
        """Walk the samples that left their root again by their nodes' own transitions, replacing ``roots`` and
        ``walked``. The pass it takes is a forward of each of them."""
        again = recheck_round(self.target, round_, walked, causal=self.settings.causal)
        if again is None:
            return
        chains, firsts = again.behind_roots(hidden, self._predicting(again.computed), round_.first_segments)
        which = torch.tensor(again.samples, device=self._device)
        new_roots, new_walked = self._walk_trees(round_, which, again.tree, firsts, round_.inputs, chains)
        roots[which] = new_roots
        for index, steps, count in zip(again.samples, new_walked, again.num_computed, strict=True):
            walked[index] = steps
            sample = round_.samples[index]
            sample.generation.nfe_denoise += 1
            rows[id(sample)] += count * self.settings.block_length

    def _walk_trees(
        self,
        round_: Round,
        which: Tensor,
        trees: DraftTree,
        first_segments: Tensor,
        inputs: DraftInputs,
        hidden: Tensor,
    ) -> tuple[Tensor, list[WalkedSteps]]:
        """Walk the trees of the samples ``which`` (int64 [A]) of a round."""
        members = which.tolist()
        is_all = len(members) == len(round_.samples)  # in order, then

        def own(of_all: Tensor) -> Tensor:
            return of_all if is_all else of_all[which]

        on_step: Callable[[SeenStep], None] | None = None
        if self.recorder is not None:
            prompts = [round_.samples[index].prompt for index in members]
            on_step = functools.partial(self.recorder.record, prompts, own(inputs.block_starts))
        return walk(
            head=self.target,
            transition=TransitionRule(
                rule=self.settings.rule,
                temperature=self.settings.temperature,
                noise=self.settings.noise,
                accepts_argmax=self.settings.verification == GREEDY_MATCH,
                product_tau=self.settings.product_tau,
                end_token_ids=self.settings.end_token_ids,
                logits_pass=self._logits_pass,
            ),
            hidden=hidden,
            first_segment=own(first_segments),
            tree=trees if is_all else trees.select(which),
            commit_counts=own(inputs.commit_counts),
            block_starts=own(inputs.block_starts),
            keys=own(inputs.keys),
            snapshots=self._snapshots,
            snapshot_rows=own(round_.slots),
            on_step=on_step,
            block_steps=torch.tensor(
                [round_.samples[index].block_steps for index in members],
                dtype=torch.int64,
                device=self._device,
            ),
            has_stopped=self._has_stopped([round_.samples[index] for index in members]),
        )

    def _has_stopped(self, samples: list[Sample]) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Which states int32 [A, L] of the samples int64 [A] end them, bool [A]; None where none does so early."""
        if self.settings.stop_rule == "block" or not self.settings.stops:
            return None
        firsts = torch.tensor([s.prompt_in_block for s in samples], device=self._device)
        return lambda active, states: stopped_states(states, self.settings.stops, firsts[active][:, None])

    def _look_at_next_blocks(self, round_: Round, hidden: Tensor) -> None:
        """Keep, or record, what the pass says of the fresh block behind the root of each sample that looks ahead."""
        if not self._looks_ahead:
            return
        which = round_.looks_ahead.nonzero().flatten()
        if not which.numel():
            return
        segments = torch.tensor(round_.next_segments, device=self._device)[which]
        length = self.settings.block_length
        read = hidden[segments.to(hidden.device)].flatten(0, 1)
        predictor = predictor_of(self.target)
        if predictor is not None and self.settings.temperature in (0, 1):
            rows = (segments[:, None] * length + torch.arange(length)).flatten()
            summary = predictor.predict(hidden, rows, 0.0, None).summary  # the same at T = 1
        else:
            found = summarize(self.target.logits(read), self.settings.temperature)
            summary = Summary(*(part.to(self._device) for part in found))
        if self.settings.records_window and self.recorder is not None:
            for row, index in enumerate(which.tolist()):
                own = slice(row * length, (row + 1) * length)
                part = Summary(*(values[own] for values in summary))
                self.recorder.record_next(round_.samples[index].prompt, part, read[own])
        if self._next_snapshots is not None:
            slots = round_.slots[which]
            positions = torch.arange(length, device=self._device).repeat(which.numel())
            masked = torch.ones(which.numel(), length, dtype=torch.bool, device=self._device)
            rows = slots.repeat_interleave(length)
            kept = None if self._next_snapshots.hidden is None else read.to(self._device)
            self._next_snapshots.store(slots, masked, rows, positions, summary, kept)


def _account(sample: Sample, steps: WalkedSteps, nodes: int) -> None:
    """Count a round that drafted ``nodes`` and took ``steps`` in the block."""
    generation = sample.generation
    _add_steps(sample, steps)
    generation.accepted.append(len(steps.commits) - 1)
    generation.drafted_nodes += nodes
    generation.nfe_denoise += 1


def _add_steps(sample: Sample, steps: WalkedSteps) -> None:
    generation, start = sample.generation, sample.block_start
    sample.block_steps += len(steps.commits)
    generation.steps.extend(tuple((start + at, token) for at, token in commits) for commits in steps.commits)
    generation.margins.extend(steps.margins)
    generation.digests.extend(steps.digests)
    generation.argmax_commits += sum(steps.argmax_by_step)
