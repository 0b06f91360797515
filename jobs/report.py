"""``dlmgrid report OUT``: forwards, acceptance, speed, accuracy and exactness of a run, complete or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import dlmgrid
from dlmgrid.cluster.report import build_report
from dlmgrid.cluster.report_views import csv_text, html_page, json_text, terminal_view
from dlmgrid.jobs.console import table_console
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of a run.")],
    html: Annotated[Path | None, typer.Option(help="Also write one self-contained page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write every figure as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write one line a cell as CSV.")] = None,
) -> int:
    """Show forwards, acceptance, speed, accuracy and exactness of a run.

    Works on a run that is still going or has stopped, and then says what is missing. A speed-up is shown only
    together with its exactness verdict. Exits with 5 for a run that has no rows yet.
    """
    given = [path.absolute() for path in (html, json, csv) if path is not None]
    if len(set(given)) < len(given):
        raise InputError("--html, --json and --csv name one file twice; give each a file of its own")
    report = build_report(out)
    table_console().print(terminal_view(report))
    if html is not None:
        _write(html, html_page(report, dlmgrid.__version__))
    if json is not None:
        _write(json, json_text(report))
    if csv is not None:
        _write(csv, csv_text(report))
    return 0 if report.cells else 5


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; name a file in a folder you can write"
        ) from error
