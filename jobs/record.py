"""``dlmgrid record GRID --out TRAJ``: the draft-free cells of a grid, with every step recorded.

The folder is that of a run whose rows are the serialized ones, plus ``TRAJ/trajectories/``. Exit codes are those of
``dlmgrid run``, and the same command resumes.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.out_folder import ExitCode
from dlmgrid.cluster.progress import Style
from dlmgrid.cluster.run import RunRequest, run_grid
from dlmgrid.cluster.sources import installed_sources
from dlmgrid.jobs.run import summary


def command(
    grid: Annotated[Path, typer.Argument(help="Grid file (YAML); its methods are not run.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to record into.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many items of each benchmark.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with the benchmarks' data, instead of the hub.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster; default RAY_ADDRESS, else a local Ray.")
    ] = None,
    progress: Annotated[
        bool | None,
        typer.Option("--progress/--quiet", help="Live display or plain lines; --quiet for neither."),
    ] = None,
) -> int:
    """Record the draft-free runs of a grid. Replay and diagnosis read them without a model."""
    style: Style = "quiet" if progress is False else "auto"
    code = run_grid(
        RunRequest(
            grid=read_grid(grid),
            out=out,
            sources=installed_sources(),
            data=data,
            limit=limit,
            address=address,
            style=style,
            records=True,
        )
    )
    if code is ExitCode.DONE:
        folder = shlex.quote(str(out))
        typer.echo(
            f"recorded into {folder}; next: dlmgrid replay {folder} {shlex.quote(str(grid))} --out DIR, "
            f"or, where these are runs to learn from, dlmgrid calibrate or train-order {folder}"
        )
    else:
        typer.echo(summary(out, code))
    return int(code)
