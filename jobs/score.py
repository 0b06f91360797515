"""``dlmgrid score OUT``: score the stored generations of a run; scoring again adds only what is missing."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dlmgrid.jobs.benchmarks import wide_console
from dlmgrid.workers.benchmarks.scoring import OPT_IN_REMEDY, ScoreSummary, score_run

PROGRESS_SECONDS = 5.0
STATUSES = ("scored", "timed_out", "errored", "not_scored")


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of a run.")],
    benchmarks: Annotated[
        list[str] | None, typer.Option("--benchmarks", help="Score only these, separated by commas.")
    ] = None,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code",
            help="Run generated code, under limits that guard against accidents but are no sandbox.",
        ),
    ] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Scoring processes at once.")] = 2,
) -> None:
    """Score stored generations with lm-eval, EvalPlus and the benchmarks' own scorers.

    Code is run only with --confirm-run-unsafe-code or HF_ALLOW_CODE_EVAL=1: in CPU processes with limits on
    time, memory, processes and files, killed as a whole afterwards. They can still read what your user can
    read. Exits with 0 when every answer has a score or is marked not scored, with 1 when a scorer failed or every
    generation holds an error instead of an answer, with 5 when there are no rows yet.
    """
    names = None
    if benchmarks is not None:
        names = [name for given in benchmarks for name in given.split(",") if name]
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            print(f"scored {done} of {total} texts ({100 * done // total} %)", file=sys.stderr)

    summary = score_run(
        out,
        benchmarks=names,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
        workers=workers,
        on_progress=report,
    )
    if not summary.num_generations:
        print(f"{out}: no rows yet, so nothing to score; run its grid first")
        raise typer.Exit(5)
    print_summary(summary)
    if summary.num_failed or summary.num_unanswered == summary.num_generations:
        raise typer.Exit(1)


def print_summary(summary: ScoreSummary) -> None:
    """Print one line a metric, then what is missing and how to get it."""
    table = Table("benchmark", "scorer", "metric", "mean", "scored", "timed out", "errored", "not scored")
    for row in summary.metrics:
        counts = [str(row.statuses.get(status, 0)) for status in STATUSES]
        mean = "-" if row.mean is None else f"{row.mean:.4f}"
        table.add_row(row.benchmark, row.scorer, row.metric, mean, *counts)
    console = wide_console()
    console.print(table)
    console.print(
        f"{summary.num_added} score rows added, {summary.num_kept} kept; {summary.num_texts_scored} distinct "
        f"texts scored in {summary.seconds:.1f} s"
    )
    if summary.needs_opt_in:
        console.print(f"Some rows are not scored: {OPT_IN_REMEDY}.")
    if summary.num_unanswered:
        console.print(
            f"{summary.num_unanswered} of {summary.num_generations} generations hold an error instead of an answer "
            "and have no score; run the grid again with --retry-failed."
        )
    if summary.num_failed:
        console.print(
            f"{summary.num_failed} rows could not be scored: see the column detail of their score rows."
        )
