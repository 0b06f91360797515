"""The decode loop: draft, verify, walk, commit; many samples in flight in one packed pass.

A sample's life: prefill of its whole prompt blocks (one pass that stores keys and values), then block by block:
rounds of denoising until no mask is left, and one commit pass that stores the finished block. The prompt's tail
stands, fixed, at the head of the first generated block. After the commit pass of a block the sample ends if the
block holds a stop id past the prompt, or the canvas is full.

The canvas is the whole blocks that cover prompt + gen_length; forwards count all of it; the output is cut at
gen_length and through the first stop id. Every pass in which a sample takes part is one forward of that sample.

With ``fused_commit`` the commit pass of a block and the first denoising pass of the next one are one pass of 2L
rows, counted once, as a denoising pass: a block reads the stored keys and values of the block before it within
the pass, so tokens, path and bits stay. The last block's commit pass has no next block and stays a pass of its own.

Where a family *seeds*, the last row of a pass that stores gives the first token of the next block; that token is part
of the pass, not a step, and is kept apart (``Generation.seeds``). Where its stop rule is ``prefix``, a sample ends as
soon as a stop id has no mask before it: that is a property of the state, so drafted and serialized runs end alike.

With ``fold`` the drafted nodes of a round fold onto their tree parents (SpecFold, ``folded.py``).

With a ``window`` drafts may finish the block and enter the next one, and a next block may start drafted
(``window.py``); a block that a draft completed is stored by the same pass and takes no commit pass. Only families
that do not seed and that stop at a block's end can have one.

Source of the block loop, the prompt tail and the commit pass: ``generate.py`` of JetAstra/SDAR; of seeds and the stop
inside a block: ``generate`` of Fast-dLLM-v2 (modeling.py) and of Nemotron-Labs-Diffusion.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dlmgrid.kernels.logits import LogitsPass, Summary, choose, summarize
from dlmgrid.workers.decoding.folded import (
    compute_pending,
    count_folds,
    inputs_at,
    recheck_round,
    split_walk,
    with_pending,
)
from dlmgrid.workers.decoding.generation import Generation, Prompt, Sample, canvas_length
from dlmgrid.workers.decoding.noise import Stream
from dlmgrid.workers.decoding.packing import Packed, Round
from dlmgrid.workers.decoding.reading import TransitionRule, predictor_of
from dlmgrid.workers.decoding.settings import GREEDY_MATCH, STOP_POLICIES, VERIFICATIONS, DecodeSettings
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, stopped_states
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.decoding.verification import SeenStep, WalkedSteps, walk
from dlmgrid.workers.decoding.window import crosses, draft_round, refreshes, wants_following
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs, place, reads_hidden

__all__ = [
    "GREEDY_MATCH", "STOP_POLICIES", "VERIFICATIONS", "DecodeSettings", "Decoder", "Generation", "Prompt", "Recorder",
    "Target", "canvas_length",
]  # fmt: skip


class Target(Protocol):
    """The model as the decoder sees it: packed passes over whole blocks, and the head.

    States, trees and snapshots live on the ``control_device``: that of the passes, or the CPU where a pass is queued
    whole and answered in one copy (reading.py).
    """

    num_slots: int
    max_length: int
    device: torch.device

    @property
    def control_device(self) -> torch.device: ...

    @property
    def hidden_size(self) -> int: ...

    def forward(
        self, tokens: Tensor, slots: Tensor, block_starts: Tensor, store: Tensor, causal: bool = False
    ) -> Tensor: ...

    def logits(self, rows: Tensor) -> Tensor: ...


class Recorder(Protocol):
    """What is shown every step of a decode.

    ``start`` is called when a prompt begins, also for the second time; ``record`` with the prompts of a round, the
    absolute start of their blocks int64 [S], and what one transition saw. ``record_next`` follows a record of the
    prompt, where a window is recorded: the L rows of the fresh next block behind the state that the step saw.
    """

    def start(self, prompt: Prompt) -> None: ...

    def record(self, prompts: Sequence[Prompt], block_starts: Tensor, step: SeenStep) -> None: ...

    def record_next(self, prompt: Prompt, summary: Summary, hidden: Tensor) -> None: ...


class Decoder:
    """Decodes prompts with one drafter on one target.

    Args:
        target: the model's engine; its slots bound the samples in flight.
        drafter: proposes states; asked only where the budget is positive.
        recorder: is shown every step, when given.
        logits_pass: noise, choice, summary and digest of a row in one pass, where the kernels have one.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        settings: DecodeSettings,
        recorder: Recorder | None = None,
        logits_pass: Callable[..., LogitsPass] | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.settings = settings
        self.recorder = recorder
        self._logits_pass = logits_pass
        self.drafts = settings.budget > 0
        device, length = target.control_device, settings.block_length
        self._device = device
        if self.drafts and device != target.device:
            place(drafter, target.device)
        self._looks_ahead = settings.records_window or (self.drafts and settings.window != "")
        hidden_size = target.hidden_size if self.drafts and reads_hidden(drafter) else None
        self._known = Snapshots(target.num_slots, length, device, hidden_size=hidden_size)
        self._snapshots = self._known if self.drafts else None  # None: nothing is learnt from a pass
        self._next_snapshots: Snapshots | None = None
        if self.drafts and self._looks_ahead:
            self._next_snapshots = Snapshots(target.num_slots, length, device, hidden_size=hidden_size)
        self._clock: Callable[[], float] = (
            _device_clock(target.device) if settings.profiled else time.perf_counter
        )

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Prompt], max_in_flight: int | None = None) -> list[Generation]:
        """Decode all prompts, at most ``max_in_flight`` at a time; results in the order of the prompts.

        Raises:
            ValueError: a prompt is empty, or its canvas is longer than the target's buffers.
        """
        for prompt in prompts:
            canvas = self._canvas_length(prompt)
            if not prompt.token_ids or canvas > self.target.max_length:
                raise ValueError(
                    f"item {prompt.item_id!r}: {len(prompt.token_ids)} prompt tokens and gen_length "
                    f"{self.settings.gen_length} need {canvas} positions, the buffers hold {self.target.max_length}"
                )
        width = min(self.target.num_slots, max_in_flight or self.target.num_slots, len(prompts))
        waiting = deque(enumerate(prompts))
        free_slots = list(range(width))[::-1]
        in_flight: dict[int, Sample] = {}
        done: dict[int, Generation] = {}
        while waiting or in_flight:
            while waiting and free_slots:
                index, prompt = waiting.popleft()
                in_flight[index] = self._begin(prompt, free_slots.pop())
                in_flight[index].generation.batch_size = width
                if self.recorder is not None:
                    self.recorder.start(prompt)
                self._forget(in_flight[index])
            self._pass(list(in_flight.values()))
            for index, sample in list(in_flight.items()):
                if sample.generation.stop_reason:
                    done[index] = sample.generation
                    free_slots.append(sample.slot)
                    del in_flight[index]
        return [done[index] for index in range(len(prompts))]

    def _canvas_length(self, prompt: Prompt) -> int:
        settings = self.settings
        return canvas_length(len(prompt.token_ids), settings.gen_length, settings.block_length, settings.grid)

    def _begin(self, prompt: Prompt, slot: int) -> Sample:
        return Sample(prompt, self.settings, slot)

    def _pass(self, samples: list[Sample]) -> None:
        """One packed pass: each sample prefills, denoises or commits, or commits and denoises the next block."""
        start = self._clock()
        storing = [s for s in samples if s.needs_prefill or s.is_block_complete]
        stored_spans = [s.stored_span for s in storing]
        if self.settings.fused_commit:
            for sample in storing:
                if sample.is_block_complete and not sample.needs_prefill and not self._ends(sample):
                    self._next_block(sample)
        denoising = [s for s in samples if not s.needs_prefill and not s.is_block_complete]
        round_ = self._draft(denoising) if denoising else None
        drafted = self._clock()

        packed = Packed(self._device)
        rows = {id(s): 0 for s in samples}
        length = self.settings.block_length
        for sample, (first, last) in zip(storing, stored_spans, strict=True):
            blocks = torch.tensor(sample.tokens_of(first, last), dtype=torch.int32, device=self._device)
            for offset, block in enumerate(blocks.view(-1, length)):
                packed.add(block[None], sample.slot, first + offset * length, stores=True)
            rows[id(sample)] = last - first
        if round_ is not None:
            round_.pack(packed)
            for sample, segments in zip(denoising, round_.counted_segments(), strict=True):
                rows[id(sample)] += segments * length
        fold = None if round_ is None else self.settings.fold
        hidden = packed.run(self.target, causal=self.settings.causal, fold=fold, timed=self.settings.profiled)
        verified = self._clock()
        seeds = self._seeds(storing, stored_spans, hidden) if self.settings.seed != "none" else {}
        if round_ is not None:
            self._walk(round_, self._predicting(hidden), rows)
            if fold is not None:
                count_folds(self.target, round_)
        sampled = self._clock()
        fused = {id(sample) for sample in denoising}
        for sample in storing:
            if id(sample) not in fused:
                self._stored(sample, seeds.get(id(sample)))
        for sample in denoising:
            if self.settings.stop_rule == "prefix" and sample.has_stopped:
                self._finish(sample)
        self._share_time(samples, rows, denoising, (start, drafted, verified, sampled, self._clock()))

    def _draft(self, samples: list[Sample]) -> Round:
        settings, device = self.settings, self._device
        slots = torch.tensor([s.slot for s in samples], dtype=torch.int64, device=device)
        everyone = torch.arange(len(samples), device=device)
        inputs = DraftInputs(
            roots=torch.tensor([s.block for s in samples], dtype=torch.int32, device=device),
            commit_counts=torch.tensor([s.commit_count for s in samples], dtype=torch.int64, device=device),
            block_starts=torch.tensor([s.block_start for s in samples], dtype=torch.int64, device=device),
            keys=torch.tensor([s.key for s in samples], dtype=torch.int64, device=device),
            snapshots=self._known.select(slots) if self.drafts else self._known,
            rule=settings.rule,
            temperature=settings.temperature,
            noise=settings.noise,
            stream=None if settings.verification == GREEDY_MATCH else VERIFICATIONS[settings.verification],
        )
        has_next = torch.tensor([s.has_next_block for s in samples], device=device)
        trees = draft_round(
            self.drafter.draft,
            inputs,
            budget=settings.budget,
            window=settings.window,
            next_snapshots=None if self._next_snapshots is None else self._next_snapshots.select(slots),
            has_next=has_next,
            stop_token_ids=self.settings.stops,
        )
        looks_ahead = torch.zeros_like(everyone, dtype=torch.bool)
        if settings.records_window:
            looks_ahead = has_next
        elif self._looks_ahead:
            looks_ahead = wants_following(inputs, settings.budget, has_next, self.settings.stops) & (
                trees.complete < 0
            )
        pending = [sample.pending for sample in samples]
        return Round(
            pending=pending, samples=samples, inputs=inputs, slots=slots, trees=trees, looks_ahead=looks_ahead
        )

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

    def _seeds(
        self, storing: list[Sample], spans: Sequence[tuple[int, int]], hidden: Tensor
    ) -> dict[int, int]:
        """The token after the last stored position of each sample, from the last row that its pass stored."""
        if not storing:
            return {}
        sizes = torch.tensor([(last - first) // self.settings.block_length for first, last in spans])
        rows = hidden[(sizes.cumsum(0) - 1).to(hidden.device), -1]
        logits = self.target.logits(rows)
        temperature = self.settings.temperature if self.settings.seed == "drawn" else 0.0
        gumbel = None
        if temperature > 0:
            positions = torch.tensor([last for _, last in spans], dtype=torch.int64, device=hidden.device)
            gumbel = self.settings.noise.rows(
                torch.tensor([sample.key for sample in storing], dtype=torch.int64, device=hidden.device),
                Stream.TOKEN,
                positions,
                torch.zeros_like(positions),
                logits.shape[1],
            )
        tokens = choose(logits, temperature, gumbel).tokens.tolist()
        return {id(sample): token for sample, token in zip(storing, tokens, strict=True)}

    def _stored(self, sample: Sample, seed: int | None) -> None:
        """After a pass that stored keys and values: the prompt is in, or a block is finished."""
        if sample.needs_prefill:
            sample.needs_prefill = False
            sample.generation.nfe_prefill += 1
        else:
            sample.generation.nfe_commit += 1
            if self._ends(sample):
                self._finish(sample)
                return
            self._next_block(sample)
        if seed is not None and sample.tokens[sample.block_start] == MASKED:
            sample.tokens[sample.block_start] = seed
            sample.generation.seeds.append((sample.block_start, seed))
            if self.settings.stop_rule == "prefix" and sample.has_stopped:
                self._finish(sample)

    def _ends(self, sample: Sample) -> bool:
        """Whether the sample's finished block is its last: it fills the canvas or holds a stop id."""
        is_stopped = any(token in self.settings.stops for token in sample.block[sample.prompt_in_block :])
        return is_stopped or sample.block_start + sample.block_length >= sample.canvas

    def _next_block(self, sample: Sample) -> None:
        """Go on to the next block, whose first round is drafted where a window has looked at it and refresh is on."""
        sample.block_start += sample.block_length
        sample.block_steps = 0
        slot = torch.tensor([sample.slot], device=self._device)
        if self._snapshots is not None:
            if self._next_snapshots is not None and refreshes(self.settings.window):
                self._snapshots.take(slot, self._next_snapshots, slot)
            else:
                self._snapshots.invalidate(slot)
        if self._next_snapshots is not None:
            self._next_snapshots.invalidate(slot)

    def _finish(self, sample: Sample) -> None:
        cuts = self.settings.cuts
        prompt_tokens = len(sample.prompt.token_ids)
        end = min(sample.block_start + sample.block_length, prompt_tokens + self.settings.gen_length)
        output = sample.tokens[prompt_tokens:end]
        cut = next((index for index, token in enumerate(output) if token in cuts), None)
        sample.generation.token_ids = output if cut is None else output[: cut + 1]
        sample.generation.stop_reason = "length" if cut is None else "eos"

    def _forget(self, sample: Sample) -> None:
        """Nothing stale is known of the sample's block, nor of the next one."""
        slot = torch.tensor([sample.slot], device=self._device)
        for snapshots in (self._snapshots, self._next_snapshots):
            if snapshots is not None:
                snapshots.invalidate(slot)

    def _share_time(
        self, samples: list[Sample], rows: dict[int, int], denoising: list[Sample], marks: Sequence[float]
    ) -> None:
        start, drafted, verified, sampled, end = marks
        total = sum(rows.values())
        drafting_rows = sum(rows[id(s)] for s in denoising)
        for sample in samples:
            own = rows[id(sample)]
            sample.generation.rows_computed += own
            seconds = sample.generation.seconds
            if not self.settings.profiled:
                seconds.wall += (end - start) * own / total
                continue
            if sample in denoising:
                seconds.draft += (drafted - start) * own / drafting_rows
                seconds.sample += (sampled - verified) * own / drafting_rows
            seconds.verify += (verified - drafted) * own / total
            seconds.other += (end - sampled) * own / total


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


def _device_clock(device: torch.device) -> Callable[[], float]:
    """A clock that waits for the device, so that a stage's work falls into its own interval."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
