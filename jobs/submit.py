"""``dlmgrid submit GRID --out DIR --address http://HOST:8265``: run a grid as a job of a Ray cluster.

The same as ``ray job submit --working-dir . -- python -m dlmgrid.jobs.grid GRID --out DIR`` from a checkout, after a
look at what would go wrong. Follows the job's log and returns its exit code, unless ``--no-wait``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from ray.exceptions import AuthenticationError

import dlmgrid
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.submission import (
    connect_client,
    entrypoint,
    explain_refusal,
    measure_upload,
    runtime_environment,
)
from dlmgrid.workers.errors import InputError


def command(
    grid: Annotated[Path, typer.Argument(help="Grid file (YAML), inside the checkout.")],
    out: Annotated[
        Path, typer.Option("--out", help="Output folder: absolute, on storage that every node sees.")
    ],
    address: Annotated[str, typer.Option(help="Dashboard of the cluster.", envvar="RAY_API_SERVER_ADDRESS")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many items of each benchmark.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with the benchmarks' data, as the cluster sees it.")
    ] = None,
    submission_id: Annotated[str | None, typer.Option(help="Name of the job; default chosen by Ray.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job to its end.")] = True,
) -> int:
    """Send a grid to a Ray cluster as a job."""
    if not out.is_absolute():
        raise InputError(f"--out {out} is relative; give an absolute path on storage that every node sees")
    checkout = Path(dlmgrid.__file__).parent.parent
    if not (checkout / "jobs" / "grid.py").is_file():
        raise InputError(
            f"{checkout} is not a checkout of dlmgrid; submit from one, so that the cluster gets its code"
        )
    read_grid(grid)
    upload = measure_upload(checkout, [grid])
    options = [] if limit is None else ["--limit", str(limit)]
    options += [] if data is None else ["--data", data]
    client = connect_client(address)
    line = entrypoint(grid.resolve().relative_to(checkout.resolve()).as_posix(), out, options)
    typer.echo(
        f"uploading {upload.num_files} files, {upload.num_bytes / 2**20:.1f} MiB, to {address}: {line}"
    )
    try:
        job = client.submit_job(
            entrypoint=line, runtime_env=runtime_environment(checkout), submission_id=submission_id
        )
    except (RuntimeError, AuthenticationError) as error:
        raise explain_refusal(address, error) from error
    typer.echo(f"job {job}; its record is {out}/run.json")
    if not wait:
        return 0
    asyncio.run(_follow(client, job))
    return _exit_code(client, job)


async def _follow(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        typer.echo(lines, nl=False)


def _exit_code(client: Any, job: str) -> int:
    """The driver's own exit code; 5 for a job that was stopped or never started."""
    details = client.get_job_info(job)
    typer.echo(f"job {job}: {details.status}")
    if details.driver_exit_code is not None and details.driver_exit_code >= 0:
        return int(details.driver_exit_code)
    return 5
