"""Scoring processes side by side: jobs go in, replies come back as they are ready."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dlmgrid.workers.benchmarks.benchmark import Benchmark
from dlmgrid.workers.benchmarks.scoring_process import Reply, ScoringProcess

Key = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One distinct text to score, and the generations (cell, item, repeat) that have it."""

    benchmark: Benchmark
    item_id: str
    text: str
    keys: tuple[Key, ...]


def score_jobs(
    jobs: Sequence[Job],
    documents: dict[tuple[str, str], dict[str, Any]],
    attempt: str,
    workers: int,
    cache: str,
) -> Iterable[tuple[Job, Reply]]:
    """Score ``jobs`` in ``workers`` scoring processes and yield replies as they come. An error ends all.

    ``documents`` are by (benchmark, item); ``attempt`` and ``cache``, a folder, are passed on to the scorers.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    replies: queue.SimpleQueue[tuple[Job, Reply] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        try:
            with ScoringProcess(stop.is_set) as process:
                while not stop.is_set():
                    try:
                        job = waiting.get_nowait()
                    except queue.Empty:
                        return
                    module = job.benchmark.scoring
                    limit = import_module(module).wall_seconds(attempt)
                    options = {"attempt": attempt, "cache": cache, "benchmark": job.benchmark.name}
                    document = documents[job.benchmark.name, job.item_id]
                    replies.put((job, process.score(module, job.text, document, options, limit)))
        except BaseException as error:  # noqa: BLE001  raised again in the calling thread
            replies.put(error)

    threads = [
        threading.Thread(target=work, name=f"score-{index}") for index in range(min(workers, len(jobs)))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            reply = replies.get()
            if isinstance(reply, BaseException):
                raise reply
            yield reply
    finally:
        stop.set()
        for thread in threads:
            thread.join()
