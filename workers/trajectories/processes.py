"""Parts of a work on recorded runs, spread over the processors of this machine."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

from dlmgrid.workers.parent_watch import end_with_parent

BATCH = 64
"""Generations worked on together: a few hundred MB at a block length of 32."""

SMALLEST_PART = 16
"""Fewer generations together cost more time each than idle processes do."""

SECONDS_BETWEEN_LINES = 10.0

Part = TypeVar("Part")
Found = TypeVar("Found")


def available_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def part_size(num_generations: int, num_processes: int, *, smallest: int = SMALLEST_PART) -> int:
    """How many generations are worked on together: a few parts for each process, of 64 at most."""
    return max(smallest, min(BATCH, -(-num_generations // (3 * num_processes))))


def run_parts(
    work: Callable[[Part], Found],
    parts: Sequence[Part],
    num_processes: int,
    *,
    done: str,
    say: Callable[[str], None] | None = None,
) -> list[Found]:
    """``work`` of each part, in order; several processes take one thread each.

    ``say`` is told how many parts are ``done`` (a word for it), at most every ten seconds.
    """
    found: dict[int, Found] = {}
    told = time.monotonic()

    def tell() -> None:
        nonlocal told
        if say is not None and time.monotonic() - told > SECONDS_BETWEEN_LINES and len(found) < len(parts):
            say(f"{done} {len(found)} of {len(parts)} parts")
            told = time.monotonic()

    if num_processes <= 1 or len(parts) <= 1:
        for index, part in enumerate(parts):
            found[index] = work(part)
            tell()
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            min(num_processes, len(parts)), mp_context=context, initializer=_begin
        ) as pool:
            index_of = {pool.submit(work, part): index for index, part in enumerate(parts)}
            for future in as_completed(index_of):
                found[index_of[future]] = future.result()
                tell()
    return [found[index] for index in range(len(parts))]


def _begin() -> None:
    end_with_parent()
    torch.set_num_threads(1)
