"""Timing of device work: warm-up, repeats, median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of one call: the median of ``repeats`` calls, the fastest and the slowest."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    repeats: int


def measure(
    call: Callable[[], object], device: torch.device, *, warm_up: int = 3, repeats: int = 10
) -> Timing:
    """Time ``call`` on ``device``; on CUDA by events around it, so that queued work is counted where it runs."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
    return Timing(
        median_ms=statistics.median(times), fastest_ms=min(times), slowest_ms=max(times), repeats=repeats
    )
