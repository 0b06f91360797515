"""The driver in a process of its own: killed, stopped politely, run again; always the same rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from dlmgrid.cluster.plan import UnitSettings, plan_chains
from dlmgrid.cluster.store import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("fake_run.py")


def start(grid: Path, out: Path, data: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(grid), str(out), str(data)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for_commits(process: subprocess.Popen[str], out: Path, *, after: str | None) -> str:
    """Until the run that follows run ``after`` has committed two units of its own; returns its run id."""
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
        if (out / "run.json").exists() and (out / "manifest.jsonl").exists():
            run_id: str = json.loads((out / "run.json").read_text())["run_id"]
            own = [
                line for line in (out / "manifest.jsonl").read_text().splitlines() if f'"{run_id}"' in line
            ]
            if run_id != after and len(own) >= 2:
                return run_id


@pytest.mark.usefixtures("local_ray")
def test_a_driver_that_was_killed_and_one_that_was_stopped_are_resumed_to_the_same_rows(
    tmp_path: Path, write_grid: Callable[..., Path], write_data: Callable[..., Path], stored_rows: Any, run_record: Any,
    make_works: Any, run_units: Any,
) -> None:  # fmt: skip
    grid = write_grid()
    undisturbed = Store(tmp_path / "undisturbed")
    works = make_works(grid, undisturbed.out, write_data(12, {}))
    run_units(undisturbed, plan_chains(works, None, UnitSettings(run_id="a", device="cpu")))
    data = write_data(12, {number: {"fault": "slow", "seconds": 0.15} for number in range(12)})
    out = tmp_path / "out"

    killed = start(grid, out, data)
    first = wait_for_commits(killed, out, after=None)
    killed.kill()  # SIGKILL: nothing can be tidied up
    killed.communicate()
    assert run_record(out)["status"] == "running"
    some = len(stored_rows(out))
    assert 0 < some < 48

    stopped = start(grid, out, data)
    wait_for_commits(stopped, out, after=first)
    stopped.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    while run_record(out)["status"] == "running":
        assert time.monotonic() - begun < 3, "a job's driver has 3 s before it is killed"
        time.sleep(0.05)
    output, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 5, output
    assert "taking over from the driver" in output
    assert (run_record(out)["status"], run_record(out)["exit_code"]) == ("stopped", 5)
    assert {path.suffix for path in (out / "generations").iterdir()} == {".parquet"}

    finished = start(grid, out, data)
    output, _ = finished.communicate(timeout=120)
    assert finished.returncode == 0, output
    rows = stored_rows(out)
    assert len({(row["cell_key"], row["item_id"], row["repeat"]) for row in rows}) == len(rows) == 48
    assert rows == stored_rows(undisturbed.out)
    assert len(output.splitlines()) < 48
