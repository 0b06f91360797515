"""``dlmgrid prefetch [NAME …]``: fetch the benchmarks' data once, so that everything after needs no network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dlmgrid.jobs.benchmarks import wide_console
from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.benchmarks.data import DATA_VARIABLE, MANIFEST, prefetch, prefetched_folder
from dlmgrid.workers.errors import InputError


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Benchmarks to fetch; all without a name.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder to fill; the cache folder without this option."),
    ] = None,
) -> None:
    """Fetch benchmark data from its pinned sources and write row counts and sha256 beside it.

    What the folder holds already is checked and not fetched again. A run, and everything else that reads
    benchmark data, then finds it: in the cache folder by itself, in another by --data DIR or DLMGRID_DATA.
    """
    folder = (data or prefetched_folder()).expanduser()
    benchmarks = [get_benchmark(name) for name in names or benchmark_names()]
    files = {file.path: file for benchmark in benchmarks for file in benchmark.files}
    table = Table("file", "rows", "sha256", "state")
    failures = []
    for path, file in sorted(files.items()):
        try:
            found = prefetch(file, folder)
        except InputError as error:
            failures.append(error)
            table.add_row(path, "-", "-", "missing")
            continue
        table.add_row(path, str(found.num_rows), found.sha256, "fetched" if found.is_new else "there")
    console = wide_console()
    if files:
        console.print(table)
    console.print(f"{len(files) - len(failures)} of {len(files)} files in {folder}, listed in its {MANIFEST}")
    for failure in failures[1:]:
        print(f"error: {failure}", file=sys.stderr)
    if failures:
        raise failures[0]
    if data is not None:
        console.print(f"Use it by --data {folder}, or by {DATA_VARIABLE}={folder.absolute()}")
