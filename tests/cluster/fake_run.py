"""Runs a grid with the fake runner in a process of its own, for tests that kill it and for a submitted job.

python tests/cluster/fake_run.py GRID OUT [DATA]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.run import RunRequest, run_grid
from dlmgrid.cluster.sources import Sources
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing import fake_catalog

SOURCES = Sources(
    methods=fake_catalog.METHODS,
    benchmark_names=fake_catalog.benchmark_names,
    get_benchmark=fake_catalog.get_benchmark,
    resolve_checkpoint=fake_catalog.resolve_checkpoint,
    check_checkpoint=fake_catalog.check_checkpoint,
    weight_fingerprint=fake_catalog.weight_fingerprint,
    check_prompts=fake_catalog.check_prompts,
)


def main() -> int:
    grid, out, *data = sys.argv[1:]
    request = RunRequest(
        grid=read_grid(Path(grid)),
        out=Path(out),
        sources=SOURCES,
        data=data[0] if data else None,
        style="lines",
        runner="dlmgrid.workers.testing.fake_runner:FakeUnitRunner",
    )
    try:
        return int(run_grid(request))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
