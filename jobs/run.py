"""``dlmgrid run GRID --out DIR``: run a grid, or what is still missing of it.

Exit codes: 0 every row is there and exact; 1 rows failed; 2 bad input; 4 a row that claims to be exact is
not; 5 stopped or incomplete (run the same command again).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.out_folder import ExitCode
from dlmgrid.cluster.progress import Style
from dlmgrid.cluster.run import RunRequest, run_grid
from dlmgrid.cluster.sources import installed_sources


def command(
    grid: Annotated[Path, typer.Argument(help="Grid file (YAML); see jobs/grids/.")],
    out: Annotated[Path, typer.Option("--out", help="Output folder; an absolute path under a Ray job.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many items of each benchmark.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with the benchmarks' data, instead of the hub.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster; default RAY_ADDRESS, else a local Ray.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run rows that hold an error again.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option("--progress/--quiet", help="Live display or plain lines; --quiet for neither."),
    ] = None,
) -> int:
    """Run a grid into a folder. The same command again resumes; a larger grid extends."""
    style: Style = "quiet" if progress is False else "auto"
    request = RunRequest(
        grid=read_grid(grid),
        out=out,
        sources=installed_sources(),
        data=data,
        limit=limit,
        address=address,
        style=style,
        retry_failed=retry_failed,
    )
    code = run_grid(request)
    typer.echo(summary(out, code))
    return int(code)


def summary(out: Path, code: ExitCode) -> str:
    """One line for the end of a run: what is there, and what to do next."""
    counts = json.loads((out / "progress.json").read_text()) if (out / "progress.json").exists() else {}
    stored, wanted = counts.get("num_stored", 0) + counts.get("num_done", 0), counts.get("num_wanted", 0)
    rows = f"{stored}/{wanted} rows in {out}"
    folder = shlex.quote(str(out))
    return {
        ExitCode.DONE: f"done: {rows}, all without error; next: dlmgrid score {folder}",
        ExitCode.ROWS_FAILED: f"done, but some rows hold an error: {rows}; see their column error, mend the cause, "
        "then run the same command with --retry-failed",
        ExitCode.NOT_EXACT: f"NOT EXACT, rows differ from their serialized run: {rows}; see dlmgrid check {folder}",
        ExitCode.INCOMPLETE: f"incomplete: {rows}; run the same command again",
    }[code]
