"""``dlmgrid export OUT --format lm-eval|evalplus --to DIR``: a run's answers for the tools that others score with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dlmgrid.cluster.export import ExportedFile, export_run
from dlmgrid.workers.exchange.evalplus_samples import DATASETS, PROBLEM_VARIABLES, evaluate_words


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of a run.")],
    file_format: Annotated[str, typer.Option("--format", help="lm-eval or evalplus.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder for the files.")],
    benchmarks: Annotated[
        list[str] | None, typer.Option("--benchmarks", help="Export only these, separated by commas.")
    ] = None,
) -> None:
    """Write a run's answers as files of another tool, one a cell.

    evalplus: samples with the programs that our scorer runs, and the command that scores them. lm-eval: samples
    as it logs them, with its filters' answers, and its metrics where the run is scored.
    """
    names = None
    if benchmarks is not None:
        names = [name for given in benchmarks for name in given.split(",") if name]
    for file in export_run(out, file_format, to, names):
        typer.echo(_line(file))
        if file.num_left_out:
            _warn(f"{file.path.name}: {file.num_left_out} rows hold an error and are left out")
        if file.num_without_program:
            _warn(f"{file.path.name}: {file.num_without_program} answers held no program that could be found")


def _line(file: ExportedFile) -> str:
    line = f"{file.path}: {file.num_answers} answers to {file.benchmark}"
    if file.problems is None:
        return line
    variable = PROBLEM_VARIABLES[DATASETS[file.benchmark][0]]
    words = shlex.join(evaluate_words(file.benchmark, str(file.path)))
    return f"{line}\n  {variable}={shlex.quote(str(file.problems))} evalplus.evaluate {words}"


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
