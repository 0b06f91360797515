"""``score_run``: score the stored generations of an output folder, any time, adding rows by scorer version.

Reads the committed rows and the documents that go with them, each file verified against the manifest; writes
one file per benchmark, scorer and version, ``OUT/scores/<scorer>-<digest>.parquet``, staged in ``OUT/staging``
and renamed. The name is fixed by what it holds, so scoring again replaces a file by one that holds all its rows
and more; another version of a scorer writes another file and leaves the first alone. Nothing is locked: if
two commands score one folder at once the later rename wins, and the next call scores what it lost.

A row's ``status``: ``scored`` (a wrong answer has value 0), ``timed_out`` (value 0, after a second try
alone), ``errored`` (no value: the generation has an error, or its scorer failed), ``not_scored`` (no value:
running generated code was not allowed, or the benchmark has no scorer). A row counts as done when it is
``scored`` or ``timed_out`` for the same text.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Scorer
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.scoring_pool import Job, Key, score_jobs
from dlmgrid.workers.benchmarks.scoring_process import Reply
from dlmgrid.workers.benchmarks.stored_run import read_documents, read_generations, verify_inputs
from dlmgrid.workers.benchmarks.verdict import (
    ALONE,
    ERRORED,
    FIRST_TRY,
    NOT_SCORED,
    SCORED,
    TIMED_OUT,
    verdict,
)
from dlmgrid.workers.cache import make_cache_folder
from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.tables import SCORES, read_table, to_table, write_table

OPT_IN_VARIABLE = "HF_ALLOW_CODE_EVAL"
OPT_IN_REMEDY = f"pass --confirm-run-unsafe-code or set {OPT_IN_VARIABLE}=1 to run generated code"
FLUSH_SECONDS = 15.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSummary:
    """One metric of one scorer over one benchmark: the mean over rows with a value, and rows by status."""

    benchmark: str
    scorer: str
    scorer_version: str
    metric: str
    mean: float | None
    num_rows: int
    statuses: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSummary:
    """What a call of :func:`score_run` did. ``num_added``, ``num_kept`` and ``num_failed`` (the scorer gave no
    verdict) count rows of ``scores``; ``num_unanswered`` counts generations that hold an error and no text.
    """

    num_generations: int
    num_unanswered: int
    num_texts_scored: int
    num_added: int
    num_kept: int
    num_failed: int
    needs_opt_in: bool
    seconds: float
    metrics: tuple[MetricSummary, ...]


def score_run(
    out: str | Path,
    *,
    benchmarks: Sequence[str] | None = None,
    confirm_run_unsafe_code: bool = False,
    workers: int = 2,
    on_progress: Progress | None = None,
) -> ScoreSummary:
    """Score what is not yet scored by the installed versions of the scorers.

    ``benchmarks`` restricts the call to those named. Generated code runs only with
    ``confirm_run_unsafe_code`` or HF_ALLOW_CODE_EVAL=1. ``workers`` scoring processes run at once; time-outs
    are tried again one by one at the end. ``on_progress(done, total)`` is called per text. Raises InputError
    for a folder without generations, an unknown benchmark, a missing document, or a scoring package that is
    not installed.
    """
    started = time.monotonic()
    folder = Path(out)
    if workers < 1:
        raise InputError(f"workers is {workers}; give at least 1")
    generations = read_generations(folder, benchmarks)
    names = sorted({row["benchmark"] for row in generations})
    verify_inputs(folder, names)
    _make_folders(folder)
    may_run_code = confirm_run_unsafe_code or os.environ.get(OPT_IN_VARIABLE) == "1"
    run = _Run(folder, [get_benchmark(name) for name in names], may_run_code)
    jobs = run.plan(generations)
    documents = read_documents(folder, {(job.benchmark.name, job.item_id) for job in jobs})
    run.score(jobs, documents, workers, on_progress)
    return run.summary(len(generations), len(jobs), time.monotonic() - started)


def _make_folders(folder: Path) -> None:
    """Raises InputError where scores could not be written, before any is made."""
    for name in ("staging", "scores"):
        try:
            (folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{folder / name} cannot be written to ({error.strerror}); it must be a folder: move away what "
                "is there, or make its parent writable"
            ) from error


class _Run:
    """The score files of one call: which rows they hold, which are new, and their writing."""

    def __init__(self, folder: Path, benchmarks: list[Benchmark], may_run_code: bool) -> None:
        self._folder = folder
        self._may_run_code = may_run_code
        self._scorers = [(benchmark, scorer) for benchmark in benchmarks for scorer in benchmark.scorers]
        self._versions = {(b.name, s.name): self._installed_version(s) for b, s in self._scorers}
        self._rows: dict[tuple[str, str], dict[tuple[Key, str], dict[str, Any]]] = {}
        self._changed: set[tuple[str, str]] = set()
        self._num_added = 0
        self._num_kept = 0
        self._num_failed = 0
        self._num_unanswered = 0
        self._flushed_at = time.monotonic()

    def _runs(self, scorer: Scorer) -> bool:
        return self._may_run_code or not scorer.runs_code

    def _installed_version(self, scorer: Scorer) -> str:
        """The version that rows carry. A scorer that will not run need not be installed."""
        try:
            return scorer.version()
        except InputError:
            if self._runs(scorer):
                raise
            return f"{scorer.name} is not installed"

    def _path(self, benchmark: Benchmark, scorer: Scorer) -> Path:
        key = digest([benchmark.name, scorer.name, self._versions[benchmark.name, scorer.name]])
        return self._folder / "scores" / f"{scorer.name}-{key}.parquet"

    def plan(self, generations: list[dict[str, Any]]) -> list[Job]:
        """Keep what is done, write down what cannot be scored, and group the rest by distinct text."""
        by_benchmark: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in generations:
            by_benchmark[row["benchmark"]].append(row)
        wanted: dict[tuple[str, str, str], set[Key]] = defaultdict(set)
        self._num_unanswered = sum(_is_unanswered(row) for row in generations)
        for benchmark, scorer in self._scorers:
            path = self._path(benchmark, scorer)
            old = read_table([str(path)], SCORES).to_pylist() if path.exists() else []
            rows = self._rows[benchmark.name, scorer.name] = {
                ((row["cell_key"], row["item_id"], row["repeat"]), row["metric"]): row for row in old
            }
            for generation in by_benchmark[benchmark.name]:
                key = (generation["cell_key"], generation["item_id"], generation["repeat"])
                text = generation["text"]
                if _is_unanswered(generation):
                    cause = generation["error"] or "it has no text"
                    self._add(benchmark, scorer, key, "", ERRORED, f"generation: {cause}")
                elif scorer.why_not_scored:
                    self._add(benchmark, scorer, key, text, NOT_SCORED, scorer.why_not_scored)
                elif all(_is_done(rows.get((key, metric)), text) for metric in scorer.metrics):
                    self._num_kept += len(scorer.metrics)
                elif not self._runs(scorer):
                    self._add(benchmark, scorer, key, text, NOT_SCORED, OPT_IN_REMEDY)
                else:
                    wanted[benchmark.name, generation["item_id"], text].add(key)
        found = {benchmark.name: benchmark for benchmark, _ in self._scorers}
        return [
            Job(benchmark=found[name], item_id=item_id, text=text, keys=tuple(sorted(keys)))
            for (name, item_id, text), keys in sorted(wanted.items())
        ]

    def _add(
        self, benchmark: Benchmark, scorer: Scorer, key: Key, text: str, status: str, detail: str
    ) -> None:
        """Rows without a value for every metric of ``scorer``, unless they are there already."""
        for metric in scorer.metrics:
            entry = verdict(scorer.name, metric, None, status=status, detail=detail)
            self._put(benchmark, scorer, key, text, entry, 0.0)

    def _put(
        self, benchmark: Benchmark, scorer: Scorer, key: Key, text: str, entry: dict[str, Any], seconds: float
    ) -> None:
        rows = self._rows[benchmark.name, scorer.name]
        text_digest = _text_digest(text)
        old = rows.get((key, entry["metric"]))
        same = ("value", "status", "detail", "extracted")
        if old is not None and old["text_digest"] == text_digest and all(old[n] == entry[n] for n in same):
            self._num_kept += 1
            return
        cell_key, item_id, repeat = key
        rows[key, entry["metric"]] = {
            **entry,
            "cell_key": cell_key,
            "item_id": item_id,
            "repeat": repeat,
            "benchmark": benchmark.name,
            "scorer_version": self._versions[benchmark.name, scorer.name],
            "text_digest": text_digest,
            "seconds": seconds,
            "scored_at": datetime.now(UTC),
        }
        self._changed.add((benchmark.name, scorer.name))
        self._num_added += 1

    def score(
        self,
        jobs: list[Job],
        documents: dict[tuple[str, str], dict[str, Any]],
        workers: int,
        on_progress: Progress | None,
    ) -> None:
        """Score all jobs, then those that ran out of time once more, alone. Writes rows as they come."""
        cache = make_cache_folder() / "evalplus" if jobs else Path()
        again: list[Job] = []
        done = 0

        def finish(job: Job, reply: Reply, attempt: str) -> None:
            nonlocal done
            if attempt == FIRST_TRY and _deserves_retry(reply):
                again.append(job)
                return
            done += 1
            self._record(job, reply)
            if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
                self.write()
            if on_progress is not None:
                on_progress(done, len(jobs))

        try:
            for attempt, num_workers in ((FIRST_TRY, workers), (ALONE, 1)):
                pending = jobs if attempt == FIRST_TRY else list(again)
                for job, reply in score_jobs(pending, documents, attempt, num_workers, str(cache)):
                    finish(job, reply, attempt)
        finally:
            self.write()

    def _record(self, job: Job, reply: Reply) -> None:
        verdicts = {(entry["scorer"], entry["metric"]): entry for entry in reply.verdicts}
        for scorer in job.benchmark.scorers:
            if not self._runs(scorer):
                continue
            for metric in scorer.metrics:
                entry = verdicts.get((scorer.name, metric)) or _without_verdict(scorer.name, metric, reply)
                self._num_failed += entry["status"] == ERRORED
                for key in job.keys:
                    self._put(job.benchmark, scorer, key, job.text, entry, reply.seconds)

    def write(self) -> None:
        """Replace the files of what has changed, each whole or not at all."""
        staging = self._folder / "staging"
        for benchmark, scorer in self._scorers:
            if (benchmark.name, scorer.name) not in self._changed:
                continue
            path = self._path(benchmark, scorer)
            staged = partial_path(staging / path.name)
            rows = self._rows[benchmark.name, scorer.name]
            write_table(str(staged), to_table(SCORES, [rows[key] for key in sorted(rows)]))
            with staged.open("rb+") as file:
                os.fsync(file.fileno())
            staged.replace(path)
            self._changed.discard((benchmark.name, scorer.name))
        self._flushed_at = time.monotonic()

    def summary(self, num_generations: int, num_texts: int, seconds: float) -> ScoreSummary:
        metrics = []
        for benchmark, scorer in self._scorers:
            rows = list(self._rows[benchmark.name, scorer.name].values())
            for metric in scorer.metrics:
                chosen = [row for row in rows if row["metric"] == metric]
                values = [row["value"] for row in chosen if row["value"] is not None]
                metrics.append(
                    MetricSummary(
                        benchmark=benchmark.name,
                        scorer=scorer.name,
                        scorer_version=self._versions[benchmark.name, scorer.name],
                        metric=metric,
                        mean=sum(values) / len(values) if values else None,
                        num_rows=len(chosen),
                        statuses=dict(Counter(row["status"] for row in chosen)),
                    )
                )
        awaits_opt_in = {(b.name, s.name) for b, s in self._scorers if s.runs_code}
        return ScoreSummary(
            num_generations=num_generations,
            num_unanswered=self._num_unanswered,
            num_texts_scored=num_texts,
            num_added=self._num_added,
            num_kept=self._num_kept,
            num_failed=self._num_failed,
            needs_opt_in=any(
                metric.statuses.get(NOT_SCORED) and (metric.benchmark, metric.scorer) in awaits_opt_in
                for metric in metrics
            ),
            seconds=seconds,
            metrics=tuple(metrics),
        )


def _is_unanswered(generation: dict[str, Any]) -> bool:
    return generation["error"] is not None or generation["text"] is None


def _deserves_retry(reply: Reply) -> bool:
    return reply.cause in ("timed_out", "died") or any(e["status"] == TIMED_OUT for e in reply.verdicts)


def _without_verdict(scorer: str, metric: str, reply: Reply) -> dict[str, Any]:
    if reply.cause == "timed_out":
        return verdict(scorer, metric, 0.0, status=TIMED_OUT, detail=reply.detail)
    if reply.cause == "unruly":
        return verdict(scorer, metric, 0.0, detail=reply.detail)
    detail = reply.detail or f"the scorer gave no {metric}"
    return verdict(scorer, metric, None, status=ERRORED, detail=f"scorer: {detail}"[:500])


def _is_done(row: dict[str, Any] | None, text: str) -> bool:
    return (
        row is not None and row["status"] in (SCORED, TIMED_OUT) and row["text_digest"] == _text_digest(text)
    )


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
