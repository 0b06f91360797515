"""The run record: readable at any time, attempts kept even of a run that was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dlmgrid.cluster.records import RunRecord, new_run_id, submission_id
from dlmgrid.cluster.store import Store
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.tables import ATTEMPTS, RUNS
from dlmgrid.workers.units import Key, WorkUnit


@pytest.fixture
def out(tmp_path: Path) -> Path:
    Store(tmp_path).create()
    return tmp_path


def add_attempt(record: RunRecord) -> None:
    from datetime import UTC, datetime

    cell = Cell(model="m", benchmark="b", prompt_version="1", method="none", budget=0, temperature=0.0,
                block_length=32, gen_length=64)  # fmt: skip
    unit = WorkUnit(cell=cell, keys=(Key("a", 0),), checkpoint="", inputs="", output="")
    record.add_attempt(
        unit, actor="actor-0", outcome="died", cause="killed", started_at=datetime.now(UTC), seconds=1.5
    )


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_a_run_is_on_record_from_its_start_to_its_end(out: Path) -> None:
    record = RunRecord(out, "r1", "digest", "name: demo\n")
    record.begin()
    assert json.loads((out / "run.json").read_text())["status"] == "running"
    add_attempt(record)
    record.set(num_units=3, job_id="01")
    record.end("failed", 1, "some rows failed")
    state = json.loads((out / "run.json").read_text())
    assert (state["status"], state["exit_code"], state["message"]) == ("failed", 1, "some rows failed")
    assert pq.read_schema(out / "runs" / "r1.parquet").equals(RUNS)
    assert read(out / "runs" / "r1.parquet")[0]["grid"] == "name: demo\n"
    assert pq.read_schema(out / "attempts" / "r1.parquet").equals(ATTEMPTS)
    assert [row["cause"] for row in read(out / "attempts" / "r1.parquet")] == ["killed"]


def test_the_attempts_of_a_killed_run_are_saved_by_the_next(out: Path) -> None:
    killed = RunRecord(out, "r1", "digest", "")
    killed.begin()
    add_attempt(killed)
    with (out / "attempts" / "r1.jsonl").open("a") as file:
        file.write('{"torn')
    RunRecord(out, "r2", "digest", "").begin()
    assert [row["outcome"] for row in read(out / "attempts" / "r1.parquet")] == ["died"]
    assert not (out / "attempts" / "r1.jsonl").exists()


def test_the_ray_job_of_this_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert submission_id() is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_7"}}')
    assert submission_id() == "raysubmit_7"


def test_run_ids_sort_by_time_and_differ() -> None:
    assert len({new_run_id() for _ in range(20)}) > 1
    assert new_run_id()[:8].isdigit()
