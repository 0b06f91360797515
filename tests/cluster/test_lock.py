"""One driver per folder: living holders are named and respected, dead ones replaced."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster import lock as lock_module
from dlmgrid.cluster.lock import RunLock
from dlmgrid.workers.errors import InputError


def quiet(_: str) -> None:
    pass


def write_holder(path: Path, **values: Any) -> None:
    holder = {
        "host": socket.gethostname(),
        "pid": 1,
        "process_start": 0,
        "run_id": "old",
        "beat": 7,
        "released": False,
    }
    path.write_text(json.dumps({**holder, **values}))


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""
    monkeypatch.setattr(lock_module, "_try_flock", lambda _: False)


def test_a_living_holder_is_named_and_a_released_lock_taken(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    first, second = RunLock(path, "first"), RunLock(path, "second")
    first.acquire(say=quiet)
    with pytest.raises(InputError, match=f"run first .process {os.getpid()} on {socket.gethostname()}"):
        second.acquire(say=quiet)
    first.release()
    second.acquire(say=quiet)
    second.release()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    code = (
        "import sys, time; from pathlib import Path; from dlmgrid.cluster.lock import RunLock\n"
        "RunLock(Path(sys.argv[1]), 'killed').acquire(); print('held', flush=True); time.sleep(60)"
    )
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    lock = RunLock(path, "next")
    with pytest.raises(InputError, match="run killed"):
        lock.acquire(say=quiet)
    process.kill()
    process.wait()
    process.stdout.close()
    said: list[str] = []
    start = time.monotonic()
    lock.acquire(say=said.append)
    assert time.monotonic() - start < 1
    assert said == [
        f"taking over from the driver of run killed (process {process.pid} on {socket.gethostname()}), which is gone"
    ]
    lock.release()


def test_another_host_with_a_still_heartbeat_is_taken_over_after_watching(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    write_holder(path, host="elsewhere")
    lock = RunLock(path, "next")
    lock.acquire(watch_seconds=0.2, say=quiet)
    assert json.loads(path.read_text())["run_id"] == "next"
    lock.release()


@pytest.mark.parametrize("change", [{"beat": 8}, {"run_id": "newer"}])
def test_another_host_whose_heartbeat_moves_is_respected(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "run.lock"
    write_holder(path, host="elsewhere")
    timer = threading.Timer(0.3, lambda: write_holder(path, host="elsewhere", **change))
    timer.start()
    with pytest.raises(InputError, match="on elsewhere"):
        RunLock(path, "next").acquire(watch_seconds=5, say=quiet)
    timer.join()


def test_another_host_that_releases_while_watched_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    write_holder(path, host="elsewhere")
    timer = threading.Timer(0.3, lambda: write_holder(path, host="elsewhere", released=True))
    timer.start()
    lock = RunLock(path, "next")
    lock.acquire(watch_seconds=5, say=quiet)
    lock.release()
    timer.join()


@pytest.mark.usefixtures("no_flock")
def test_without_file_locks_the_process_itself_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    first = RunLock(path, "first")
    first.acquire(say=quiet)
    timer = threading.Timer(0.2, first._write)
    timer.start()
    with pytest.raises(InputError, match="run first"):
        RunLock(path, "second").acquire(watch_seconds=3, say=quiet)
    timer.join()
    first.release()
    write_holder(path, pid=os.getpid(), process_start=-1)
    third = RunLock(path, "third")
    third.acquire(watch_seconds=60, say=quiet)
    third.release()


def test_the_heartbeat_moves_while_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.05)
    path = tmp_path / "run.lock"
    lock = RunLock(path, "r")
    lock.acquire(say=quiet)
    first = json.loads(path.read_text())["beat"]
    deadline = time.monotonic() + 5
    while json.loads(path.read_text())["beat"] < first + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lock.release()
    assert json.loads(path.read_text())["released"] is True


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        RunLock(tmp_path / "missing" / "run.lock", "r").acquire(say=quiet)
