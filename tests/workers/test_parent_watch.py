"""A process ends when its parent is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import dlmgrid

CHILD = "from dlmgrid.workers.parent_watch import end_with_parent; end_with_parent(); import time; time.sleep(120)"
PARENT = (
    "import subprocess, sys, time; "
    f"print(subprocess.Popen([sys.executable, '-c', {CHILD!r}]).pid, flush=True); time.sleep(120)"
)


def is_running(process: Path) -> bool:
    """Whether a folder of /proc is of a process that has not ended; one that no one waits for stays as a zombie."""
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_ends_when_its_parent_is_killed() -> None:
    root = Path(dlmgrid.__file__).resolve().parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip()
        time.sleep(2)
        assert child.is_dir()  # while the parent lives, so does it
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 30
        while is_running(child):
            assert time.monotonic() < deadline
            time.sleep(0.2)
