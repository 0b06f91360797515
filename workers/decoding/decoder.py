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

Source of the block loop, the prompt tail and the commit pass: ``generate.py`` of JetAstra/SDAR; of seeds and the stop
inside a block: ``generate`` of Fast-dLLM-v2 (modeling.py) and of Nemotron-Labs-Diffusion.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dlmgrid.kernels.logits import LogitsPass, choose
from dlmgrid.workers.decoding.commit_rules import CommitRule
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED, state_hashes, stopped_states
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.decoding.verification import SeenStep, TransitionRule, WalkedSteps, walk
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs
from dlmgrid.workers.folding.fold import FoldReport, FoldSettings
from dlmgrid.workers.models.family import BlockGrid, Seed, StopRule

STOP_POLICIES = ("eos", "none")
VERIFICATIONS = {"coupled": Stream.TOKEN, "uncoupled": Stream.DRAFT}
"""The verification modes that keep to the serialized path, and the noise that the drafter's predictions read."""

GREEDY_MATCH = "greedy_match"
"""The mode that leaves the serialized path at T > 0: live only; its predictions read no noise."""


class Target(Protocol):
    """The model as the decoder sees it: packed passes over whole blocks, and the head."""

    num_slots: int
    max_length: int
    device: torch.device

    def forward(
        self, tokens: Tensor, slots: Tensor, block_starts: Tensor, store: Tensor, causal: bool = False
    ) -> Tensor: ...

    def logits(self, rows: Tensor) -> Tensor: ...


@runtime_checkable
class FoldingTarget(Protocol):
    """A target that computes folded passes; ``fold_report`` says what the last one recomputed."""

    fold_report: FoldReport | None

    def forward(
        self,
        tokens: Tensor,
        slots: Tensor,
        block_starts: Tensor,
        store: Tensor,
        causal: bool = False,
        fold: tuple[FoldSettings, Sequence[int]] | None = None,
    ) -> Tensor: ...


class Recorder(Protocol):
    """What is shown every step of a decode.

    ``start`` is called when a prompt begins, also for the second time; ``record`` with the prompts of a round, the
    absolute start of their blocks int64 [S], and what one transition saw.
    """

    def start(self, prompt: Prompt) -> None: ...

    def record(self, prompts: Sequence[Prompt], block_starts: Tensor, step: SeenStep) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSettings:
    """Settings of a decode. ``stop_token_ids`` are ignored under the stop policy ``none``.

    ``fused_commit``: the commit pass of a block and the first denoising pass of the next one are one pass.
    ``shifted``: row i - 1 of a block predicts its position i; position 0 then takes its own row. ``causal``: every
    pass sees its block causally. ``fold``: drafted nodes fold onto their tree parents (SpecFold).
    ``grid``, ``seed``, ``stop_rule``: as the model's family declares them.
    """

    block_length: int
    gen_length: int
    budget: int
    temperature: float
    rule: CommitRule
    noise: NoiseTable
    stop_token_ids: tuple[int, ...]
    verification: str = "coupled"
    stop: str = "eos"
    fused_commit: bool = False
    shifted: bool = False
    causal: bool = False
    grid: BlockGrid = "absolute"
    seed: Seed = "none"
    stop_rule: StopRule = "block"
    fold: FoldSettings | None = None
    profiled: bool = False

    def __post_init__(self) -> None:
        modes = (*VERIFICATIONS, GREEDY_MATCH)
        if self.verification not in modes:
            raise ValueError(f"verification {self.verification!r} is not one of {', '.join(modes)}")
        if self.stop not in STOP_POLICIES:
            raise ValueError(f"stop {self.stop!r} is not one of {', '.join(STOP_POLICIES)}")
        if self.budget < 0 or self.gen_length < 1 or self.temperature < 0:
            raise ValueError("budget and temperature must not be negative, gen_length must be positive")
        if self.fused_commit and self.seed != "none":
            raise ValueError(
                "fused_commit: the commit pass gives the next block's first token, nothing joins the two"
            )

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a sample under the stop policy."""
        return self.stop_token_ids if self.stop == "eos" else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to continue: ``token_ids`` of the rendered prompt, with the identity that its noise hangs on."""

    item_id: str
    repeat: int
    token_ids: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Seconds:
    """Time of one sample: its share, by rows computed, of the passes it took part in.

    ``wall`` comes from an unprofiled decode. The parts come from a profiled one, whose stages are timed apart.
    """

    wall: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0
    select: float = 0.0
    move: float = 0.0
    compute: float = 0.0
    correct: float = 0.0


@dataclass(kw_only=True, slots=True)
class Generation:
    """One decoded sample. Steps are counted over the whole generation; positions are absolute.

    ``seeds``: (position, token) of each block's first token that a storing pass gave. ``fold_rows``: rows of drafted
    nodes that could fold; ``fold_recomputed``: how many of them were computed, by layer.
    """

    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = ""
    steps: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    margins: list[tuple[float, ...]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seeds: list[tuple[int, int]] = field(default_factory=list)
    nfe_prefill: int = 0
    nfe_denoise: int = 0
    nfe_commit: int = 0
    drafted_nodes: int = 0
    rows_computed: int = 0
    fold_recomputed: list[int] = field(default_factory=list)
    fold_rows: int = 0
    batch_position: int = 0
    batch_size: int = 0
    seconds: Seconds = field(default_factory=Seconds)


def canvas_length(
    prompt_tokens: int, gen_length: int, block_length: int, grid: BlockGrid = "absolute"
) -> int:
    """Positions of the whole blocks that cover prompt and generation. Where blocks lie from the prompt's end on, the
    prompt takes whole blocks of its own."""
    if grid == "prompt":
        return (-(-prompt_tokens // block_length) + -(-gen_length // block_length)) * block_length
    return -(-(prompt_tokens + gen_length) // block_length) * block_length


class _Sample:
    """A sample in flight: where it stands in its canvas. ``lead`` positions before its first fill a block up."""

    def __init__(self, prompt: Prompt, settings: DecodeSettings, slot: int) -> None:
        length = settings.block_length
        num_tokens = len(prompt.token_ids)
        self.prompt = prompt
        self.slot = slot
        self.block_length = length
        self.lead = -num_tokens % length if settings.grid == "prompt" else 0
        self.canvas = canvas_length(num_tokens, settings.gen_length, length, settings.grid) - self.lead
        self.tokens = list(prompt.token_ids) + [MASKED] * (self.canvas - num_tokens)
        self.block_start = num_tokens if settings.grid == "prompt" else num_tokens // length * length
        self.key = settings.noise.key(prompt.item_id, prompt.repeat)
        self.needs_prefill = self.block_start > 0
        self.generation = Generation(prompt=prompt, batch_position=slot)
        self._stops_inside = settings.stops if settings.stop_rule != "block" else ()
        self._needs_step = settings.stop_rule == "prefix_commit"

    @property
    def block(self) -> list[int]:
        return self.tokens[self.block_start : self.block_start + self.block_length]

    @property
    def prompt_in_block(self) -> int:
        return max(0, len(self.prompt.token_ids) - self.block_start)

    @property
    def commit_count(self) -> int:
        return self.block_length - self.block.count(MASKED) - self.prompt_in_block

    @property
    def has_stopped(self) -> bool:
        """Whether the block's state ends the sample: a stop id has no mask before it (stop rules ``prefix``).

        Under ``prefix_commit`` the reference looks only after a step, so a seed alone ends nothing.
        """
        if not self._stops_inside or (self._needs_step and self.commit_count <= 1):
            return False
        for token in self.block[self.prompt_in_block :]:
            if token == MASKED or token in self._stops_inside:
                return token != MASKED
        return False

    @property
    def is_block_complete(self) -> bool:
        """Whether the block takes no more steps."""
        return MASKED not in self.block or self.has_stopped

    @property
    def stored_span(self) -> tuple[int, int]:
        """First and last (exclusive) position that the next pass stores: the prompt's whole blocks, or the block."""
        if self.needs_prefill:
            return -self.lead, self.block_start
        return self.block_start, self.block_start + self.block_length

    @property
    def stored_tokens(self) -> list[int]:
        """The tokens of :attr:`stored_span`; masked where it is before the prompt."""
        first, last = self.stored_span
        return [MASKED] * max(0, -first) + self.tokens[max(0, first) : last]


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
        device, length = target.device, settings.block_length
        self._snapshots = Snapshots(target.num_slots, length, device) if self.drafts else None
        self._clock: Callable[[], float] = _device_clock(device) if settings.profiled else time.perf_counter

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Prompt], max_in_flight: int | None = None) -> list[Generation]:
        """Decode all prompts, at most ``max_in_flight`` at a time; results in the order of the prompts.

        Raises:
            ValueError: a prompt is empty, or its canvas is longer than the target's buffers.
        """
        for prompt in prompts:
            canvas = canvas_length(
                len(prompt.token_ids),
                self.settings.gen_length,
                self.settings.block_length,
                self.settings.grid,
            )
            if not prompt.token_ids or canvas > self.target.max_length:
                raise ValueError(
                    f"item {prompt.item_id!r}: {len(prompt.token_ids)} prompt tokens and gen_length "
                    f"{self.settings.gen_length} need {canvas} positions, the buffers hold {self.target.max_length}"
                )
        width = min(self.target.num_slots, max_in_flight or self.target.num_slots, len(prompts))
        waiting = deque(enumerate(prompts))
        free_slots = list(range(width))[::-1]
        in_flight: dict[int, _Sample] = {}
        done: dict[int, Generation] = {}
        while waiting or in_flight:
            while waiting and free_slots:
                index, prompt = waiting.popleft()
                in_flight[index] = _Sample(prompt, self.settings, free_slots.pop())
                in_flight[index].generation.batch_size = width
                if self.recorder is not None:
                    self.recorder.start(prompt)
                self._new_block(in_flight[index])
            self._pass(list(in_flight.values()))
            for index, sample in list(in_flight.items()):
                if sample.generation.stop_reason:
                    done[index] = sample.generation
                    free_slots.append(sample.slot)
                    del in_flight[index]
        return [done[index] for index in range(len(prompts))]

    def _pass(self, samples: list[_Sample]) -> None:
        """One packed pass: each sample prefills, denoises or commits, or commits and denoises the next block."""
        start = self._clock()
        storing = [s for s in samples if s.needs_prefill or s.is_block_complete]
        stored_spans = [s.stored_span for s in storing]
        if self.settings.fused_commit:
            for sample in storing:
                if sample.is_block_complete and not sample.needs_prefill and not self._ends(sample):
                    self._next_block(sample)
        denoising = [s for s in samples if not s.needs_prefill and not s.is_block_complete]
        tree = self._draft(denoising) if denoising else None
        drafted = self._clock()

        tokens: list[Tensor] = []
        slots: list[int] = []
        starts: list[int] = []
        rows = {id(s): 0 for s in samples}
        device, length = self.target.device, self.settings.block_length
        for sample, (first, last) in zip(storing, stored_spans, strict=True):
            tokens.append(
                torch.tensor(sample.stored_tokens, dtype=torch.int32, device=device).view(-1, length)
            )
            starts.extend(range(first, last, length))
            slots.extend([sample.slot] * ((last - first) // length))
            rows[id(sample)] = last - first
        num_stored = len(slots)
        first_segments: list[int] = []
        if tree is not None:
            nodes = tree.num_nodes.tolist()
            for index, sample in enumerate(denoising):
                first_segments.append(len(slots))
                tokens.append(tree.tokens[index, : nodes[index]])
                slots.extend([sample.slot] * nodes[index])
                starts.extend([sample.block_start] * nodes[index])
                rows[id(sample)] += nodes[index] * length
        hidden = self._forward(
            torch.cat(tokens), slots, starts, num_stored, self._fold_parents(tree, first_segments, len(slots))
        )
        verified = self._clock()
        seeds = self._seeds(storing, stored_spans, hidden) if self.settings.seed != "none" else {}
        if tree is not None:
            if self.settings.shifted:
                hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
            if self.settings.fold is not None:
                self._count_folds(denoising, tree, first_segments)
            self._walk(denoising, tree, hidden, first_segments, rows)
        sampled = self._clock()
        fused = {id(sample) for sample in denoising}
        for sample in storing:
            if id(sample) not in fused:
                self._stored(sample, seeds.get(id(sample)))
        for sample in denoising:
            if self.settings.stop_rule == "prefix" and sample.has_stopped:
                self._finish(sample)
        self._share_time(samples, rows, denoising, (start, drafted, verified, sampled, self._clock()))

    def _forward(
        self,
        tokens: Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        num_stored: int,
        fold_parents: list[int] | None = None,
    ) -> Tensor:
        """A packed pass whose first ``num_stored`` segments are stored: hidden states [N, L, H]."""
        device = self.target.device
        arguments = (
            tokens,
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.arange(len(slots), device=device) < num_stored,
            self.settings.causal,
        )
        if fold_parents is None or self.settings.fold is None:
            return self.target.forward(*arguments)
        if not isinstance(self.target, FoldingTarget):
            raise ValueError("fold: this target computes no folded pass")
        return self.target.forward(*arguments, fold=(self.settings.fold, fold_parents))

    def _fold_parents(
        self, tree: DraftTree | None, first_segments: Sequence[int], num_segments: int
    ) -> list[int] | None:
        """The fold parent's segment of each segment, -1 where it is never folded; None for a pass that folds nothing.

        A node folds onto its parent in the draft tree; where that has several, onto the one that the drafter names.
        """
        if self.settings.fold is None or tree is None:
            return None
        parents = [-1] * num_segments
        for first, count, of_sample in zip(
            first_segments, tree.num_nodes.tolist(), tree.parents.tolist(), strict=True
        ):
            for node in range(1, count):
                parents[first + node] = first + of_sample[node]
        return parents

    def _count_folds(self, samples: list[_Sample], tree: DraftTree, first_segments: Sequence[int]) -> None:
        assert isinstance(self.target, FoldingTarget)
        report = self.target.fold_report
        assert report is not None
        all_rows = sum(self.settings.block_length for _ in report.is_foldable)
        for sample, first, count in zip(samples, first_segments, tree.num_nodes.tolist(), strict=True):
            generation, rows = sample.generation, count * self.settings.block_length
            made = report.recomputed(first, first + count)
            before = generation.fold_recomputed or [0] * len(made)
            generation.fold_recomputed = [a + b for a, b in zip(before, made, strict=True)]
            generation.fold_rows += rows - self.settings.block_length
            share = rows / all_rows
            generation.seconds.select += report.select * share
            generation.seconds.move += report.move * share
            generation.seconds.compute += report.compute * share
            generation.seconds.correct += report.correct * share

    def _inputs(self, samples: list[_Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        device = self.target.device
        return (
            torch.tensor([s.block for s in samples], dtype=torch.int32, device=device),
            torch.tensor([s.commit_count for s in samples], dtype=torch.int64, device=device),
            torch.tensor([s.block_start for s in samples], dtype=torch.int64, device=device),
            torch.tensor([s.key for s in samples], dtype=torch.int64, device=device),
            torch.tensor([s.slot for s in samples], dtype=torch.int64, device=device),
        )

    def _draft(self, samples: list[_Sample]) -> DraftTree:
        settings = self.settings
        roots, counts, starts, keys, slots = self._inputs(samples)
        tree = DraftTree(len(samples), settings.budget, settings.block_length, self.target.device)
        tree.plant(roots)
        if self._snapshots is not None:
            inputs = DraftInputs(
                roots=roots,
                commit_counts=counts,
                block_starts=starts,
                keys=keys,
                snapshots=self._snapshots.select(slots),
                rule=settings.rule,
                temperature=settings.temperature,
                noise=settings.noise,
                stream=None
                if settings.verification == GREEDY_MATCH
                else VERIFICATIONS[settings.verification],
            )
            self.drafter.draft(inputs, tree)
        return tree

    def _walk(
        self,
        samples: list[_Sample],
        tree: DraftTree,
        hidden: Tensor,
        first_segments: list[int],
        rows: dict[int, int],
    ) -> None:
        roots, walked = self._transitions(samples, tree, hidden, first_segments)
        nodes = tree.num_nodes.tolist()
        if self.settings.fold is not None and self.settings.fold.recheck:
            self._recheck(samples, hidden, first_segments, roots, walked, rows)
        for sample, root, steps, count in zip(samples, roots.tolist(), walked, nodes, strict=True):
            sample.tokens[sample.block_start : sample.block_start + sample.block_length] = root
            self._account(sample, steps, count)

    def _recheck(
        self,
        samples: list[_Sample],
        hidden: Tensor,
        first_segments: Sequence[int],
        roots: Tensor,
        walked: list[WalkedSteps],
        rows: dict[int, int],
    ) -> None:
        """Compute the nodes that were walked again, unfolded, and walk them by their own transitions.

        A root is never folded, so a sample that stayed at its root is exact already. Both passes are forwards.
        Overwrites ``roots`` and ``walked`` of the samples it walks again.
        """
        again = [index for index, steps in enumerate(walked) if len(steps.commits) > 1]
        if not again:
            return
        length = self.settings.block_length
        most = max(len(walked[index].commits) for index in again)
        tree = DraftTree(len(again), most - 1, length, self.target.device)
        states: list[list[int]] = []
        slots: list[int] = []
        starts: list[int] = []
        for place, index in enumerate(again):
            state = list(samples[index].block)
            path = [list(state)]
            for commits in walked[index].commits[:-1]:
                for at, token in commits:
                    state[at] = token
                path.append(list(state))
            tree.tokens[place, : len(path)] = torch.tensor(path, dtype=torch.int32)
            tree.num_nodes[place] = len(path)
            states += path[1:]
            slots += [samples[index].slot] * (len(path) - 1)
            starts += [samples[index].block_start] * (len(path) - 1)
            samples[index].generation.nfe_denoise += 1
            rows[id(samples[index])] += (len(path) - 1) * length
        tree.hashes[:] = state_hashes(tree.tokens.flatten(0, 1)).view(tree.hashes.shape)
        computed = self._forward(
            torch.tensor(states, dtype=torch.int32, device=self.target.device), slots, starts, 0
        )
        if self.settings.shifted:
            computed = torch.cat((computed[:, :1], computed[:, :-1]), dim=1)
        parts: list[Tensor] = []
        firsts: list[int] = []
        used = 0
        for place, index in enumerate(again):
            count = int(tree.num_nodes[place]) - 1
            firsts.append(used + place)
            parts += [hidden[first_segments[index]][None], computed[used : used + count]]
            used += count
        chosen = [samples[index] for index in again]
        new_roots, new_walked = self._transitions(chosen, tree, torch.cat(parts), firsts)
        for place, index in enumerate(again):
            roots[index] = new_roots[place]
            walked[index] = new_walked[place]

    def _transitions(
        self, samples: list[_Sample], tree: DraftTree, hidden: Tensor, first_segments: list[int]
    ) -> tuple[Tensor, list[WalkedSteps]]:
        """Walk the trees of ``samples`` over the hidden rows of their nodes: new roots and steps."""
        _, counts, starts, keys, slots = self._inputs(samples)
        on_step: Callable[[SeenStep], None] | None = None
        if self.recorder is not None:
            on_step = functools.partial(self.recorder.record, [s.prompt for s in samples], starts)
        return walk(
            head=self.target,
            transition=TransitionRule(
                rule=self.settings.rule,
                temperature=self.settings.temperature,
                noise=self.settings.noise,
                accepts_argmax=self.settings.verification == GREEDY_MATCH,
                logits_pass=self._logits_pass,
            ),
            hidden=hidden,
            first_segment=torch.tensor(first_segments, dtype=torch.int64, device=hidden.device),
            tree=tree,
            commit_counts=counts,
            block_starts=starts,
            keys=keys,
            snapshots=self._snapshots,
            snapshot_rows=slots,
            on_step=on_step,
            has_stopped=self._has_stopped(samples),
        )

    def _has_stopped(self, samples: list[_Sample]) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Which states int32 [A, L] of the samples int64 [A] end them, bool [A]; None where none does so early."""
        if self.settings.stop_rule == "block" or not self.settings.stops:
            return None
        firsts = torch.tensor([s.prompt_in_block for s in samples], device=self.target.device)
        return lambda active, states: stopped_states(states, self.settings.stops, firsts[active][:, None])

    @staticmethod
    def _account(sample: _Sample, steps: WalkedSteps, nodes: int) -> None:
        generation, start = sample.generation, sample.block_start
        generation.steps.extend(
            tuple((start + at, token) for at, token in commits) for commits in steps.commits
        )
        generation.margins.extend(steps.margins)
        generation.digests.extend(steps.digests)
        generation.accepted.append(len(steps.commits) - 1)
        generation.drafted_nodes += nodes - 1
        generation.nfe_denoise += 1

    def _seeds(
        self, storing: list[_Sample], spans: Sequence[tuple[int, int]], hidden: Tensor
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

    def _stored(self, sample: _Sample, seed: int | None) -> None:
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

    def _ends(self, sample: _Sample) -> bool:
        """Whether the sample's finished block is its last: it fills the canvas or holds a stop id."""
        is_stopped = any(token in self.settings.stops for token in sample.block[sample.prompt_in_block :])
        return is_stopped or sample.block_start + sample.block_length >= sample.canvas

    def _next_block(self, sample: _Sample) -> None:
        sample.block_start += sample.block_length
        self._new_block(sample)

    def _finish(self, sample: _Sample) -> None:
        stops = self.settings.stops
        prompt_tokens = len(sample.prompt.token_ids)
        end = min(sample.block_start + sample.block_length, prompt_tokens + self.settings.gen_length)
        output = sample.tokens[prompt_tokens:end]
        cut = next((index for index, token in enumerate(output) if token in stops), None)
        sample.generation.token_ids = output if cut is None else output[: cut + 1]
        sample.generation.stop_reason = "length" if cut is None else "eos"

    def _new_block(self, sample: _Sample) -> None:
        if self._snapshots is not None:
            self._snapshots.invalidate(torch.tensor([sample.slot], device=self.target.device))

    def _share_time(
        self, samples: list[_Sample], rows: dict[int, int], denoising: list[_Sample], marks: Sequence[float]
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


def _device_clock(device: torch.device) -> Callable[[], float]:
    """A clock that waits for the device, so that a stage's work falls into its own interval."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
