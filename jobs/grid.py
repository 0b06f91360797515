"""``python -m dlmgrid.jobs.grid GRID --out DIR``: the same as ``dlmgrid run``, as an entry point of a Ray job."""

from __future__ import annotations

import sys

from dlmgrid.jobs.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
