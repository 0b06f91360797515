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

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlmgrid.kernels.logits import LogitsPass, choose
from dlmgrid.workers.decoding.folded import (
    count_folds,
)
from dlmgrid.workers.decoding.generation import Generation, Prompt, Sample, canvas_length
from dlmgrid.workers.decoding.noise import Stream
from dlmgrid.workers.decoding.packing import Packed, Round
from dlmgrid.workers.decoding.settings import GREEDY_MATCH, STOP_POLICIES, VERIFICATIONS, DecodeSettings
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.decoding.target import Recorder, Target
from dlmgrid.workers.decoding.walker import RoundWalker
from dlmgrid.workers.decoding.window import draft_round, refreshes, wants_following
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs, DraftSetting, place, reads_hidden

__all__ = [
    "GREEDY_MATCH", "STOP_POLICIES", "VERIFICATIONS", "DecodeSettings", "Decoder", "Generation", "Prompt", "Recorder",
    "Target", "canvas_length",
]  # fmt: skip

logger = logging.getLogger(__name__)


class Decoder(RoundWalker):
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
        self.growth = (
            "device of the states"  # where trees grow, with the reason if another place was asked for
        )
        if self.drafts and device != target.device:
            setting = DraftSetting(rule=settings.rule, block_length=length, budget=settings.budget)
            self.growth = place(drafter, target.device, setting if settings.drafts == "device" else None)
            logger.info("drafts grow on the %s", self.growth)
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
        width = min(self._num_samples, max_in_flight or self._num_samples, len(prompts))
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

    @property
    def _num_samples(self) -> int:
        """Samples that the target's slots take."""
        return self.target.num_slots

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


def _device_clock(device: torch.device) -> Callable[[], float]:
    """A clock that waits for the device, so that a stage's work falls into its own interval."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
