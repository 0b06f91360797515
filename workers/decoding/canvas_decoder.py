"""The decode loop of bidirectional models: blocks of one canvas, filled from left to right.

A sample's canvas is its prompt and the whole blocks that cover gen_length, from the prompt's end on, all masked at
first. Block by block, rounds of denoising run until no mask is left; under a cache the first pass of a block is the
one that refreshes it. There is no prefill and no commit pass: every pass is a denoising pass. Nothing is drafted for
the first pass of a block, and no draft leaves its block, so none crosses a refresh.

Source of the block loop: ``generate.py`` of ML-GSAI/LLaDA; of the caches: llada/generate.py of NVlabs/Fast-dLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Recorder
from dlmgrid.workers.decoding.generation import Prompt, Sample
from dlmgrid.workers.decoding.packing import Packed
from dlmgrid.workers.drafting.drafter import Drafter


class CanvasTarget(Protocol):
    """The bidirectional model as the decoder sees it: canvases in slots, passes over branches, and the head."""

    num_slots: int
    max_length: int
    device: torch.device
    cache: str

    @property
    def control_device(self) -> torch.device: ...

    @property
    def hidden_size(self) -> int: ...

    def begin(self, slot: int, tokens: Sequence[int]) -> None: ...

    def fill(self, slot: int, start: int, tokens: Sequence[int]) -> None: ...

    def num_rows(self, slot: int, block_start: int, block_length: int, *, is_refresh: bool) -> int: ...

    def forward(
        self, tokens: Tensor, slots: Tensor, block_starts: Tensor, store: Tensor, causal: bool = False
    ) -> Tensor: ...

    def logits(self, rows: Tensor) -> Tensor: ...


def whole_canvas_length(prompt_tokens: int, gen_length: int, block_length: int) -> int:
    """Tokens of the prompt and of the whole blocks after it that cover the generation."""
    return prompt_tokens + -(-gen_length // block_length) * block_length


class CanvasSample(Sample):
    """A sample in flight whose blocks start at the end of its prompt."""

    def __init__(self, prompt: Prompt, settings: DecodeSettings, slot: int) -> None:
        super().__init__(prompt, settings, slot)
        self.needs_prefill = False


class CanvasDecoder(Decoder):
    """Decodes prompts with one drafter on one bidirectional target."""

    def __init__(
        self,
        target: CanvasTarget,
        drafter: Drafter,
        settings: DecodeSettings,
        recorder: Recorder | None = None,
    ) -> None:
        if settings.fused_commit or settings.window or settings.records_window:
            raise ValueError(
                "fused_commit and window belong to block-causal models: a bidirectional one commits nothing"
            )
        if settings.fold is not None:
            raise ValueError(
                "fold belongs to block-causal models: canvases of a bidirectional one do not fold"
            )
        if settings.grid != "prompt" or settings.causal or settings.seed != "none":
            raise ValueError("blocks of a bidirectional model start at the end of the prompt, all masked")
        super().__init__(target, drafter, settings, recorder)
        self.canvas_target = target

    def _canvas_length(self, prompt: Prompt) -> int:
        settings = self.settings
        return whole_canvas_length(len(prompt.token_ids), settings.gen_length, settings.block_length)

    def _begin(self, prompt: Prompt, slot: int) -> Sample:
        sample = CanvasSample(prompt, self.settings, slot)
        self.canvas_target.begin(slot, sample.tokens)
        return sample

    def _pass(self, samples: list[Sample]) -> None:
        """One packed pass: each sample denoises its block, or refreshes its cache with the block's first pass."""
        start = self._clock()
        round_ = self._draft(samples)
        drafted = self._clock()
        target, length = self.canvas_target, self.settings.block_length
        packed = Packed(target.control_device)
        round_.pack(packed)
        rows: dict[int, int] = {}
        for sample, first, nodes in zip(
            samples, round_.first_segments, round_.counted_segments(), strict=True
        ):
            is_refresh = target.cache != "none" and sample.block_steps == 0
            assert nodes == 1 or not is_refresh, "a draft crosses a refresh"
            if is_refresh:
                packed.store(first)
            rows[id(sample)] = nodes * target.num_rows(
                sample.slot, sample.block_start, length, is_refresh=is_refresh
            )
        hidden = packed.run(self.target)
        verified = self._clock()
        self._walk(round_, hidden, rows)
        sampled = self._clock()
        for sample in samples:
            if sample.is_block_complete:
                target.fill(sample.slot, sample.block_start, sample.block)
                if self._ends(sample):
                    self._finish(sample)
                else:
                    self._next_block(sample)
        self._share_time(samples, rows, samples, (start, drafted, verified, sampled, self._clock()))
