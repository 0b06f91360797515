"""``dlmgrid study OUT …``: replayed methods in one table, and the goals of the study beside what was measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from dlmgrid.cluster.out_folder import ExitCode
from dlmgrid.cluster.study import (
    Goal,
    Line,
    drafter_names,
    goals_of,
    num_disagreeing,
    read_replays,
    study_lines,
)
from dlmgrid.jobs.console import table_console
from dlmgrid.workers.out_file import check_out_file

_FIGURES = ("nfe", "ratio", "accepted_per_round", "drafted_nodes")


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="OUT …", help="Folders of dlmgrid replay.")],
    drafters: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter", help="A graph or order model, to name its lines by; give it several times."
        ),
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the lines as CSV too.")] = None,
) -> int:
    """Compare replayed methods: forwards, their cut, acceptance, for each method, budget and temperature.

    Goals are those of the papers' models, which a small model need not meet. Ends with code 4 where replayed rows do
    not agree with live decoding.
    """
    if csv_file is not None:
        check_out_file(csv_file, "--csv")
    lines = study_lines(read_replays(folders), drafter_names(drafters or []))
    goals = goals_of(lines)
    console = table_console()
    console.print(lines_table(lines))
    console.print(LEGEND)
    if goals:
        console.print(goals_table(goals))
        typer.echo(f"{sum(goal.is_met for goal in goals)} of {len(goals)} goals met")
    if csv_file is not None:
        write_csv(lines, csv_file)
    if disagreeing := num_disagreeing(folders):
        typer.echo(
            f"{disagreeing} of these rows do not agree with live decoding (replay --verify), so these are not the "
            "numbers of a run; record again into a new folder",
            err=True,
        )
        return int(ExitCode.NOT_EXACT)
    return int(ExitCode.DONE)


LEGEND = (
    "NFE: target forwards per item, mean of the benchmarks. × fewer: forwards of the serialized run, its commit passes "
    "apart, over these. accepted: drafted states accepted per round. drafted: drafted states per item."
)


def lines_table(lines: list[Line]) -> Table:
    """A line for each method, budget and temperature; the last columns are forwards by benchmark."""
    benchmarks = sorted({name for line in lines for name in line.nfe_by_benchmark})
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("model", "T", "decoder", "method", "D", "items", "NFE", "× fewer", "accepted", "drafted",
                 *benchmarks):  # fmt: skip
        table.add_column(name, justify="left" if name in ("model", "decoder", "method") else "right")
    for line in lines:
        table.add_row(*_cells(line, benchmarks))
    return table


def _cells(line: Line, benchmarks: list[str]) -> list[str]:
    return [
        line.passes.model,
        f"{line.passes.temperature:g}",
        line.passes.decoder,
        line.method,
        str(line.budget),
        str(line.num_items),
        f"{line.nfe:.1f}",
        f"{line.ratio:.2f}x",
        f"{line.accepted_per_round:.2f}",
        f"{line.drafted_nodes:.0f}",
        *(
            f"{line.nfe_by_benchmark[name]:.1f}" if name in line.nfe_by_benchmark else "–"
            for name in benchmarks
        ),
    ]


def goals_table(goals: list[Goal]) -> Table:
    """Each goal, measured and wanted."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("goal", "measured", "wanted", "met"):
        table.add_column(name, justify="left" if name == "goal" else "right")
    for goal in goals:
        sign = "≥" if goal.at_least else "≤"
        table.add_row(
            goal.text, f"{goal.measured:.3f}", f"{sign} {goal.wanted:g}", "yes" if goal.is_met else "no"
        )
    return table


def write_csv(lines: list[Line], path: Path) -> None:
    """The lines with all their digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "temperature", "decoder", "method", "budget", "items", *_FIGURES))
        for line in lines:
            passes = line.passes
            figures = [getattr(line, name) for name in _FIGURES]
            writer.writerow(
                (
                    passes.model,
                    passes.temperature,
                    passes.decoder,
                    line.method,
                    line.budget,
                    line.num_items,
                    *figures,
                )
            )
