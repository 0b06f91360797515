"""Settings of folding, and what it costs and saves in a pass. No kernels here."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmgrid.kernels.specfold.reference import GATES


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldSettings:
    """``tau``: one threshold, or one a layer; ``gate``: against ``parent`` or ``source``; ``recheck``: the walked nodes
    are computed again unfolded, so that the output is the serialized run's; ``pipelined``: in the next round's pass,
    not in one of their own."""

    tau: tuple[float, ...]
    gate: str = "parent"
    recheck: bool = False
    pipelined: bool = False

    def __post_init__(self) -> None:
        if not self.tau or any(not value >= 0 for value in self.tau):
            raise ValueError(f"fold: tau {list(self.tau)}; want numbers of 0 or more")
        if self.gate not in GATES:
            raise ValueError(f"fold: gate {self.gate!r} is not one of {', '.join(GATES)}")
        if self.pipelined and not self.recheck:
            raise ValueError("fold: pipelined is a way to recheck; set recheck")

    def by_layer(self, num_layers: int) -> tuple[float, ...]:
        """τ of each layer. Raises ValueError where the list has another length than the model has layers."""
        if len(self.tau) not in (1, num_layers):
            raise ValueError(f"fold: tau has {len(self.tau)} values, the model {num_layers} layers")
        return self.tau * num_layers if len(self.tau) == 1 else self.tau


STAGES = ("select", "move", "compute", "correct")
"""``select`` gate and provenance, ``move`` packing and gathering, ``compute`` the rows that are computed, ``correct``
attention to the own block and output projection of folded rows."""

_JOINT = "joint"  # one product does both ``compute`` and ``correct``: shared by rows


class StageTimer:
    """Times the stages of one pass apart, by events where the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._marks: list[tuple[str, int, float | torch.cuda.Event]] = []

    def mark(self, stage: str, layer: int) -> None:
        """What ``stage`` of a layer was working on is queued; the first mark of all only begins."""
        now: float | torch.cuda.Event
        if self._is_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((stage, layer, now))

    def seconds(self, shares: Sequence[float]) -> dict[str, float]:
        """Seconds by stage; ``shares``: of each layer's rows, how many were computed. Waits for the device."""
        found = dict.fromkeys(STAGES, 0.0)
        for (_, _, before), (stage, layer, after) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) or isinstance(after, float):
                assert isinstance(before, float) and isinstance(after, float)
                spent = after - before
            else:
                after.synchronize()
                spent = before.elapsed_time(after) / 1e3
            if stage == _JOINT:
                found["compute"] += spent * shares[layer]
                found["correct"] += spent * (1 - shares[layer])
            else:
                found[stage] += spent
        return found


class FoldReport:
    """What one pass recomputed and, where it was timed, spent.

    Args:
        is_foldable: which segments have a fold parent.
        length: rows of a segment.
        counts: int32 [layers, N], how many rows of each segment were computed; copied to the host once, and waited for
            when they are asked for.
    """

    def __init__(
        self, is_foldable: list[bool], length: int, counts: Tensor, timer: StageTimer | None = None
    ) -> None:
        self.is_foldable, self.length = is_foldable, length
        self._timer = timer
        self._copied: torch.cuda.Event | None = None
        if counts.device.type == "cuda":
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._counts = counts.clone()

    @property
    def is_read(self) -> bool:
        """Whether the counts have been asked for, so that they are here."""
        return "own_rows" in self.__dict__

    @functools.cached_property
    def own_rows(self) -> list[list[int]]:
        """By layer, how many rows of each segment were computed."""
        if self._copied is not None:
            self._copied.synchronize()
        rows: list[list[int]] = self._counts.tolist()
        return rows

    @functools.cached_property
    def seconds(self) -> dict[str, float] | None:
        """Seconds by stage (STAGES); None where the pass was not timed."""
        if self._timer is None:
            return None
        all_rows = len(self.is_foldable) * self.length
        return self._timer.seconds([sum(layer) / all_rows for layer in self.own_rows])

    def recomputed(self, first: int = 0, stop: int | None = None) -> list[int]:
        """Rows of foldable segments from ``first`` to ``stop`` that were computed, by layer."""
        part = slice(first, stop)
        return [
            sum(rows for rows, foldable in zip(layer[part], self.is_foldable[part], strict=True) if foldable)
            for layer in self.own_rows
        ]

    @property
    def ratios(self) -> list[float]:
        """Recomputed over foldable rows, by layer; empty where nothing could fold."""
        foldable = sum(self.is_foldable) * self.length
        return [count / foldable for count in self.recomputed()] if foldable else []


Mark = Callable[[str, int], None]
"""Says that a stage of a layer is queued."""
