"""What the decoder sees of a model, and who may watch it decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dlmgrid.kernels.logits import Summary
from dlmgrid.workers.decoding.generation import Prompt
from dlmgrid.workers.decoding.verification import SeenStep


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
