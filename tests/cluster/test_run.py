"""Whole runs on a local Ray with the fake runner: resuming, extending, faults of every kind, exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster import driver
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.lock import RunLock
from dlmgrid.cluster.plan import UnitSettings, plan_chains
from dlmgrid.cluster.run import ExitCode, RunRequest, check_out, outcome, run_grid
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.store import Store, load
from dlmgrid.workers.errors import InputError

Rows = list[dict[str, Any]]
Run = Callable[..., ExitCode]
Reader = Callable[[Path], Rows]


@pytest.fixture
def run(sources: Sources, local_ray: None) -> Run:
    def call(grid: Path, out: Path, data: Path | None = None, limit: int | None = None) -> ExitCode:
        return run_grid(
            RunRequest(
                grid=read_grid(grid),
                out=out,
                sources=sources,
                data=str(data) if data else None,
                limit=limit,
                style="quiet",
                runner="dlmgrid.workers.testing.fake_runner:FakeUnitRunner",
            )
        )

    return call


def keys(rows: Rows) -> list[tuple[str, str, int]]:
    return [(row["cell_key"], row["item_id"], row["repeat"]) for row in rows]


def modification_times(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "generations").iterdir()}


def test_a_run_stores_each_key_once_a_second_computes_nothing_a_larger_grid_only_what_is_new(
    tmp_path: Path,
    write_grid: Callable[..., Path],
    write_data: Callable[..., Path],
    run: Run,
    stored_rows: Reader,
    run_record: Any,
    attempts: Reader,
) -> None:
    out = tmp_path / "out"
    data = write_data(12, {0: {"fault": "meet", "times": 2, "cells": ["none"]}})  # both actors take part
    assert run(write_grid(), out, data, limit=8) is ExitCode.DONE
    rows = stored_rows(out)
    assert len(rows) == 8 * 2 * 2
    assert len(set(keys(rows))) == len(rows)
    assert all(row["exact_tokens"] and row["exact_path"] and row["exact_bits"] for row in rows)
    assert all(path.suffix == ".parquet" for path in (out / "generations").iterdir())
    assert list((out / "staging").iterdir()) == []
    assert load(out).complete
    record = run_record(out)
    assert (record["status"], record["exit_code"]) == ("done", 0)
    assert {actor["name"] for actor in record["actors"]} == {"actor-0", "actor-1"}
    assert all(actor["environment"]["OMP_NUM_THREADS"] == "1" for actor in record["actors"])

    before = modification_times(out)
    assert run(write_grid(), out, data, limit=8) is ExitCode.DONE
    assert modification_times(out) == before
    assert {row["run_id"] for row in attempts(out)} == {record["run_id"]}

    assert run(write_grid(budgets=[6, 12]), out, data) is ExitCode.DONE
    assert modification_times(out).items() > before.items()
    extended = stored_rows(out)
    assert len(extended) == 12 * 2 * 3
    assert [row for row in extended if keys([row])[0] in set(keys(rows))] == rows
    assert {row["budget"] for row in extended} == {0, 6, 12}


@pytest.mark.parametrize("window", [1, 2])
def test_faults_that_pass_lose_and_double_nothing(
    tmp_path: Path, write_grid: Callable[..., Path], write_data: Callable[..., Path], run: Run, stored_rows: Reader,
    attempts: Reader, make_works: Any, run_units: Any, window: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With one call at a time on an actor every fault is an attempt. A call that waits behind another may begin, and
    meet its fault, before the driver hears that the first one failed: it goes back as one that never ran."""
    monkeypatch.setattr(driver, "WINDOW", window)
    grid = write_grid(resources={"num_actors": 2, "items_per_unit": 4, "unit_seconds": 8})
    undisturbed = Store(tmp_path / "undisturbed")
    run_units(
        undisturbed,
        plan_chains(make_works(grid, undisturbed.out), None, UnitSettings(run_id="a", device="cpu")),
    )
    faults = {
        1: {"fault": "crash", "times": 1},
        5: {"fault": "crash_after_writing", "times": 1},
        8: {"fault": "out_of_memory", "fits": 2, "cells": ["ssd"]},
        6: {"fault": "unforeseen", "times": 1, "cells": ["ssd"]},
        11: {"fault": "hang", "times": 1, "cells": ["none"]},
    }
    out = tmp_path / "out"
    assert run(grid, out, write_data(12, faults)) is ExitCode.DONE
    rows = stored_rows(out)
    assert len(set(keys(rows))) == len(rows)
    assert rows == stored_rows(undisturbed.out)
    seen = [row for row in attempts(out) if row["outcome"] != "done"]
    causes = {
        row["outcome"]: [other["cause"] for other in seen if other["outcome"] == row["outcome"]]
        for row in seen
    }
    written = [cause for cause in causes["died"] if "after its rows were written" in cause]
    if window == 1:
        assert len(written) == 1
        assert len(causes["died"]) == 3
        assert sum("no answer for 8 s" in cause for cause in causes["died"]) == 1
        assert len(causes["transient"]) == 1
    else:
        assert 1 <= len(causes["died"]) <= 4
    halved = [
        row["max_in_flight"] for row in seen if row["outcome"] == "out_of_memory" and row["num_keys"] == 4
    ]
    assert sorted(halved) == [4, 4, 8, 8]


def test_faults_that_stay_cost_only_their_items(
    tmp_path: Path, write_grid: Callable[..., Path], write_data: Callable[..., Path], run: Run, stored_rows: Reader,
    attempts: Reader, run_record: Any,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    faults = {
        2: {"fault": "crash", "cells": ["none"]},
        5: {"prompt_fits": False},
        7: {"fault": "out_of_memory", "fits": 0, "cells": ["ssd"]},
        8: {"fault": "input", "cells": ["ssd"]},
    }
    data, grid = write_data(12, faults), write_grid(temperatures=[0])
    assert run(grid, out, data) is ExitCode.ROWS_FAILED
    rows = stored_rows(out)
    assert len(set(keys(rows))) == len(rows) == 24
    errors = {
        (row["method"], int(row["item_id"].partition("-")[2])): row["error"] for row in rows if row["error"]
    }
    assert set(errors) == {("none", 2), ("none", 5)} | {("ssd", number) for number in (2, 5, 7, 8, 9, 10, 11)}
    assert "quarantined after 2 attempts" in errors["none", 2]
    assert "serialized run failed" in errors["ssd", 2]
    assert errors["none", 5] == "item letters-5: the prompt does not fit"
    assert "no room for 1 samples in flight" in errors["ssd", 7]
    assert errors["ssd", 8] == "item letters-8: the unit cannot be read; mend it"
    unverified = next(row for row in rows if (row["method"], row["item_id"]) == ("ssd", "letters-2"))
    assert unverified["exact_tokens"] is None
    assert unverified["token_ids"] is not None
    written = [row for row in attempts(out) if "after its rows were written" in row["cause"]]
    outcomes = [row["outcome"] for row in attempts(out) if row not in written]
    assert (outcomes.count("quarantined"), outcomes.count("input"), outcomes.count("died")) == (1, 1, 1)
    assert (run_record(out)["status"], run_record(out)["exit_code"]) == ("failed", 1)
    assert run(grid, out, data) is ExitCode.ROWS_FAILED
    assert stored_rows(out) == rows


def test_a_second_driver_another_grid_changed_data_and_impossible_actors_are_refused(
    tmp_path: Path, write_grid: Callable[..., Path], write_data: Callable[..., Path], run: Run, stored_rows: Reader,
    run_record: Any, make_works: Any, run_units: Any,
) -> None:  # fmt: skip
    out, grid = tmp_path / "out", write_grid(temperatures=[0])
    store = Store(out)
    works = make_works(grid, out, write_data(3, {}))
    run_units(store, plan_chains(works, None, UnitSettings(run_id="a", device="cpu")))
    rows = stored_rows(out)
    lock = RunLock(out / "run.lock", "first")
    lock.acquire()
    with pytest.raises(InputError, match=r"being written by the driver of run first \(process \d+ on "):
        run(grid, out)
    lock.release()
    with pytest.raises(InputError, match="holds another grid"):
        run(write_grid("other.yaml", temperatures=[0.5]), out)
    with pytest.raises(InputError, match=r"item 'letters-1' .* its data source changed"):
        run(grid, out, write_data(3, {1: {"prompt_fits": True}}))
    with pytest.raises(InputError, match="each needs 64 CPU an actor; the cluster has 2 CPU"):
        run(write_grid(temperatures=[0], resources={"cpus_per_actor": 64}), out)
    assert (run_record(out)["status"], run_record(out)["exit_code"]) == ("error", 2)
    with pytest.raises(InputError, match="1 GPU an actor; the cluster has 2 CPU, 0 GPU"):
        run(write_grid(temperatures=[0], numerics="fast", resources={"device": "cuda"}), tmp_path / "gpu")
    assert stored_rows(out) == rows


def test_rows_of_another_runtime_are_not_compared_with(
    tmp_path: Path,
    write_grid: Callable[..., Path],
    run: Run,
    make_works: Any,
    run_units: Any,
    monkeypatch: Any,
) -> None:
    out, grid = tmp_path / "out", write_grid(temperatures=[0])
    with monkeypatch.context() as patch:
        patch.setattr("dlmgrid.workers.testing.fake_runner.FINGERPRINT", "another")
        chains = plan_chains(make_works(grid, out), None, UnitSettings(run_id="a", device="cpu"))
        run_units(Store(out), chains, limit=1)
    with pytest.raises(InputError, match="holds serialized runs of another runtime"):
        run(grid, out)


def test_a_row_that_differs_from_its_serialized_run_outweighs_failed_rows(
    tmp_path: Path,
    write_grid: Callable[..., Path],
    write_data: Callable[..., Path],
    make_works: Any,
    run_units: Any,
) -> None:
    store = Store(tmp_path / "out")
    data = write_data(4, {1: {"prompt_fits": False}, 3: {"diverges": True}})
    works = make_works(write_grid(temperatures=[0]), store.out, data)
    chains = plan_chains(works, None, UnitSettings(run_id="a", device="cpu"))
    run_units(store, chains, limit=1)
    assert outcome(store, works) is ExitCode.ROWS_FAILED
    run_units(store, plan_chains(works, store, UnitSettings(run_id="a", device="cpu")))
    assert outcome(store, works) is ExitCode.NOT_EXACT


def test_under_a_ray_job_the_output_must_be_absolute_and_outside_the_working_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_out(Path("out")).is_absolute()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_1"}}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is relative, and under a Ray job"):
        check_out(Path("out"))
    with pytest.raises(InputError, match="temporary copy"):
        check_out(tmp_path / "out")
    assert check_out(tmp_path.parent / "elsewhere") == tmp_path.parent / "elsewhere"


def test_an_output_that_is_a_file_or_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; choose a folder"):
        check_out(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        Store(tmp_path / "file" / "below").create()
