"""Hostile programs end in bounded time, leave nothing running, and do not pass."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlmgrid.workers.benchmarks import sandbox
from dlmgrid.workers.benchmarks.sandbox import run_program
from dlmgrid.workers.benchmarks.time_limit import MAX_PATIENCE

RUNNER = str(Path(sandbox.__file__).with_name("program_runner.py"))
DRIVER = """
import json, sys, tempfile
from pathlib import Path
from dlmgrid.workers.benchmarks.sandbox import become_subreaper, run_program
become_subreaper()
outcomes = []
for program in json.load(sys.stdin):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        outcome = run_program(program, scratch=Path(scratch), wall_seconds=0.6)
    outcomes.append([outcome.status, outcome.detail, outcome.seconds])
print(json.dumps(outcomes))
"""


def run(*programs: str) -> list[Any]:
    """[status, detail, seconds] of each program, run one after the other in a process that does only that."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps(programs), capture_output=True, text=True, check=True
    )
    outcomes: list[Any] = json.loads(done.stdout)
    return outcomes


# multiprocessing's own way to start a process raises no audit event: what gets past is still killed.
DETACHED = (
    "from multiprocessing.util import spawnv_passfds\n"
    "command = b'setsid sleep 123.25 & setsid sleep 123.25'\n"
    "def spawn(): spawnv_passfds(b'/bin/sh', [b'sh', b'-c', command], [])\n"
)
FORK_BY_LIBC = "import ctypes\nlibc = ctypes.PyDLL(None)\nwhile True: libc.fork()\n"

HOSTILE = {
    "infinite loop": ("while True: pass", "timed_out"),
    "loop that ignores signals": (
        "import signal\nfor n in (2, 14, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "timed_out",
    ),
    "sleep": ("import time; time.sleep(60)", "timed_out"),
    "fork": ("import os\nwhile True: os.fork()", "failed"),
    "fork through libc": (FORK_BY_LIBC, "failed"),
    "one detached process": (DETACHED + "spawn()", "passed"),
    "processes without end": (DETACHED + "while True: spawn()", "failed"),
    "subprocess": ("import subprocess; subprocess.run(['sleep', '60'])", "failed"),
    "kill the parent": ("import os; os.kill(os.getppid(), 9)", "failed"),
    "huge output": ("while True: print('x' * 100000)", "timed_out"),
    "closed streams": ("import os\nfor n in range(3): os.close(n)\nprint(1)", "passed"),
    "closed result channel": ("import os\nos.closerange(3, 100)\nwhile True: pass", "timed_out"),
    "exit 0": ("import os; os._exit(0)", "failed"),
    "sys.exit": ("import sys; sys.exit(0)", "failed"),
    "memory": ("x = bytearray(1 << 33)", "failed"),
    "tower of powers": ("9 ** 9 ** 9 ** 9", "timed_out"),
    "big number as text": ("str(10 ** 100000)", "failed"),
    "recursion": ("def f(): f()\nf()", "failed"),
    "crash": ("import faulthandler; faulthandler._sigsegv()", "failed"),
    "syntax": ("def f(:", "failed"),
    "null byte": ("x = 1\x00", "failed"),
    "stray thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "passed",
    ),
    "socket": ("import socket; socket.create_connection(('127.0.0.1', 9))", "failed"),
    "wrong": ("assert 1 + 1 == 3", "failed"),
    "error with a broken message": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "failed",
    ),
    "right": ("assert 1 + 1 == 2", "passed"),
}


def is_ours(process: psutil.Process) -> bool:
    """Whether a program under test or something that it started is this process, dead or alive."""
    try:
        return any(mark in process.cmdline() for mark in ("123.25", RUNNER))
    except psutil.ZombieProcess:
        return process.name() == "sleep"
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    before = {process.pid for process in psutil.process_iter()}
    found = dict(zip(HOSTILE, run(*(program for program, _ in HOSTILE.values())), strict=True))
    found["left over"] = [
        process.pid for process in psutil.process_iter() if process.pid not in before and is_ours(process)
    ]
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_outcome_and_bounded_time(name: str, outcomes: dict[str, list[Any]]) -> None:
    status, detail, seconds = outcomes[name]
    assert status == HOSTILE[name][1], detail
    assert seconds < 0.6 * (1 + MAX_PATIENCE) + 10


def test_nothing_is_left_running(outcomes: dict[str, list[Any]]) -> None:
    assert outcomes["left over"] == []


def test_files_outside_the_scratch_folder_are_safe(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("still here")
    folder = tmp_path / "folder"
    folder.mkdir()
    attacks = [
        f"import os; os.remove({str(kept)!r})",
        f"open({str(kept)!r}, 'w').write('')",
        f"import shutil; shutil.rmtree({str(folder)!r})",
        f"import os; os.rename({str(kept)!r}, 'mine')",
        f"import os\nos.rmdir('folder', dir_fd=os.open({str(tmp_path)!r}, os.O_RDONLY))",
        f"import os; os.chdir({str(tmp_path)!r}); os.remove('kept.txt')",
        f"import os; os.symlink({str(kept)!r}, 'link'); open('link', 'w').write('')",
        f"from pathlib import Path; Path({str(kept)!r}).write_text('')",
    ]
    assert [status for status, _, _ in run(*attacks)] == ["failed"] * len(attacks)
    assert kept.read_text() == "still here"
    assert folder.is_dir()


def test_scratch_folder_is_writable() -> None:
    program = (
        "open('a', 'w').write('1')\n"
        "import os; os.mkdir('b'); os.rename('a', 'b/a'); assert open('b/a').read() == '1'"
    )
    assert run(program)[0][:2] == ["passed", "ran to its end"]


def test_refuses_to_run_where_it_would_kill_other_children(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="become_subreaper"):
        run_program("pass", scratch=tmp_path, wall_seconds=1.0)


def test_time_is_spent_on_the_program_not_on_starting_it() -> None:
    started = time.monotonic()
    assert [outcome[0] for outcome in run(*["pass"] * 10)] == ["passed"] * 10
    assert time.monotonic() - started < 10
