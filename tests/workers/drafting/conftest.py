"""Recorded runs of a tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.testing.tiny_runs import record_tiny_runs
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_trajectories


@pytest.fixture
def tiny_runs(tmp_path: Path) -> Callable[..., list[Trajectory]]:
    """Recorded runs of the tiny target, in memory; settings are those of a cell."""

    def runs(num_items: int = 12, records: tuple[str, ...] = (), **settings: Any) -> list[Trajectory]:
        path = tmp_path / "runs.parquet"
        record_tiny_runs(path, num_items, records=records, **settings)
        return list(load_trajectories(path, records=records))

    return runs
