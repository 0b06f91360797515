"""Fixtures of the cluster tests: fake catalogs, a fake checkpoint, grid texts, one local Ray per test module."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dlmgrid.cluster.cells import CellWork, make_cells
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.plan import Chain
from dlmgrid.cluster.run import look_up
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.store import Store, load
from dlmgrid.workers.items import Item, write_items
from dlmgrid.workers.tables import GENERATIONS, deterministic_columns
from dlmgrid.workers.testing import fake_catalog
from dlmgrid.workers.testing.fake_runner import FakeUnitRunner
from dlmgrid.workers.units import UnitResult, WorkUnit

GRID = """
name: test
models: [{model}]
benchmarks: [letters]
temperatures: [0, 1]
methods: [none, ssd]
budgets: [6]
resources: {{num_actors: 2, items_per_unit: 4}}
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return fake_catalog.write_fake_checkpoint(tmp_path / "model")


@pytest.fixture
def write_grid(tmp_path: Path, checkpoint: Path) -> Callable[..., Path]:
    """Writes a grid file: the usual one, with top-level keys replaced or added."""

    def write(name: str = "grid.yaml", **changes: Any) -> Path:
        values = yaml.safe_load(GRID.format(model=checkpoint))
        values.update(changes)
        path = tmp_path / name
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def write_data(tmp_path: Path) -> Callable[..., Path]:
    """Writes a data folder with ``letters``; keyword ``documents`` maps an item's number to its document."""

    def write(num_items: int, documents: dict[int, dict[str, Any]]) -> Path:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        items = [
            Item(item_id=f"letters-{number}", prompt=f"item {number}", document=documents.get(number, {}))
            for number in range(num_items)
        ]
        write_items(folder / "letters.jsonl", items)
        return folder

    return write


@pytest.fixture
def stored_rows() -> Callable[[Path], list[dict[str, Any]]]:
    """The deterministic columns of all committed rows, sorted by key: what identical runs share."""

    def read(out: Path) -> list[dict[str, Any]]:
        names = deterministic_columns(GENERATIONS)
        table: pa.Table = load(out).table.select(names)
        rows: list[dict[str, Any]] = table.to_pylist()
        return sorted(rows, key=lambda row: (row["cell_key"], row["item_id"], row["repeat"]))

    return read


@pytest.fixture
def attempts() -> Callable[[Path], list[dict[str, Any]]]:
    """All rows of the attempts table of a run folder."""

    def read(out: Path) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for path in sorted((out / "attempts").glob("*.parquet")):
            rows += pq.read_table(path).to_pylist()
        return rows

    return read


@pytest.fixture
def run_record() -> Callable[[Path], dict[str, Any]]:
    def read(out: Path) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((out / "run.json").read_text())
        return record

    return read


@pytest.fixture
def sources() -> Sources:
    return Sources(
        methods=fake_catalog.METHODS,
        benchmark_names=fake_catalog.benchmark_names,
        get_benchmark=fake_catalog.get_benchmark,
        resolve_checkpoint=fake_catalog.resolve_checkpoint,
        check_checkpoint=fake_catalog.check_checkpoint,
        weight_fingerprint=fake_catalog.weight_fingerprint,
        check_prompts=fake_catalog.check_prompts,
    )


@pytest.fixture
def make_works(sources: Sources) -> Callable[..., list[CellWork]]:
    """The cells of a grid file, their item files written into ``out``."""

    def make(grid_path: Path, out: Path, data: Path | None = None) -> list[CellWork]:
        grid = read_grid(grid_path).grid
        asked = look_up(grid, sources, data=str(data) if data else None, limit=None)
        store = Store(out)
        store.create()
        for questions in asked.questions:
            store.write_inputs(questions.file_name, questions.items)
        fingerprints = {str(model.folder): sources.weight_fingerprint(model.folder) for model in asked.models}
        return make_cells(grid, asked.models, asked.questions, fingerprints, store.inputs)

    return make


@pytest.fixture
def run_units() -> Callable[..., list[tuple[WorkUnit, UnitResult]]]:
    """Decodes the units of chains in this process with the fake runner, committing each unless told not to."""

    def run(
        store: Store, chains: Iterable[Chain], *, commit: bool = True, limit: int | None = None
    ) -> list[tuple[WorkUnit, UnitResult]]:
        runner, finished = FakeUnitRunner("cpu", "test"), []
        for unit in [unit for chain in chains for unit in chain.units][:limit]:
            reference = unit.cell.reference().cell_key
            shards = store.shards_of(reference, unit.keys) if unit.cell.cell_key != reference else []
            sent = replace(
                unit,
                output=str(store.staging / f"{unit.unit_key}.parquet"),
                reference_shards=tuple(str(store.path_of(shard.unit_key)) for shard in shards),
            )
            finished.append((sent, runner.run(sent)))
            if commit:
                assert store.commit(finished[-1:]) == {}
        return finished

    return run


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of two CPUs without a dashboard, shared by the tests of a module.

    One at a time: where the suite runs in several processes, they share the parent of their temporary folders.
    """
    import ray

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # as a run sets it: else a busy machine starves the actors
    with (shared / "ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
        yield
        ray.shutdown()
