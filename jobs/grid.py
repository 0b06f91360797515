"""``python -m dlmgrid.jobs.grid GRID --out DIR``: the entry point of ``ray job submit``; the same as ``run``."""

from __future__ import annotations

import sys

import typer

from dlmgrid.jobs.run import command
from dlmgrid.workers.errors import InputError


def main() -> None:
    """Run, with bad input as one line and exit code 2."""
    try:
        typer.run(command)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
