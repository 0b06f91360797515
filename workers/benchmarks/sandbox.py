"""Killing process trees, and running one program in a limited process of its own.

What is guarded: wall time, processor time, memory, size of files, number of processes; starting processes,
signals, sockets and writing outside a scratch folder (see ``program_runner``); and when a job ends,
everything it started is killed, whatever session it moved to. What is not: a program can read every file that
its user can read, and code written to break out of a guard inside its own process can. Run untrusted answers
as a user without secrets, best in a container without a network.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dlmgrid.workers.benchmarks.time_limit import Patience

MEMORY_BYTES = 2 * 1024**3
MAX_PROCESSES = 48
_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0

PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a program ended: ``passed``, ``failed`` or ``timed_out``, why, and its wall time in seconds."""

    status: str
    detail: str
    seconds: float


_subreaper_pid: int | None = None


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that none can hide from
    :func:`kill_descendants`.

    Linux only (prctl PR_SET_CHILD_SUBREAPER); elsewhere a process that detaches itself twice may survive.
    """
    global _subreaper_pid
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    _subreaper_pid = os.getpid()


def die_with_parent() -> None:
    """Ask for SIGTERM when the thread that started this process ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def find_descendants(pid: int) -> list[int]:
    """The living processes below ``pid``; none when it is gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_descendants(pid: int) -> int:
    """Kill every process below ``pid``, which must be a subreaper. Returns how many were killed.

    All are stopped before any is killed, so that a process that forks without end cannot outrun the killing.
    """
    killed = 0
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        while found := {child.pid for child in _children(pid)} - stopped:
            for member in found:
                _send(member, signal.SIGSTOP)
            stopped |= found
        for member in stopped:
            _send(member, signal.SIGKILL)
        killed += len(stopped)
        if pid == os.getpid():
            _reap()
        if not stopped:
            break
        time.sleep(0.01)
    return killed


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that we started and everything below it, then wait for it."""
    if process.poll() is None:
        _send(process.pid, signal.SIGSTOP)
        kill_descendants(process.pid)
        process.kill()
    process.wait()


def kill_marked(variable: str, value: str) -> int:
    """Kill every process that was started with ``variable=value`` in its environment. Returns how many.

    The last resort: it finds what outlived its parents, whatever session or parent it has now.
    """
    killed = 0
    while True:
        found = [process for process in psutil.process_iter() if _is_marked(process, variable, value)]
        if not found:
            return killed
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                _send(process.pid, number)
        killed += len(found)
        time.sleep(0.01)


def _is_marked(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return process.environ().get(variable) == value and _alive(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def run_program(
    program: str, *, scratch: Path, wall_seconds: float, memory_bytes: int = MEMORY_BYTES
) -> Outcome:
    """Run ``program`` in a fresh interpreter, started by exec, with ``scratch`` as its working folder.

    It passes when it runs to its end without an exception. Call it from a process that has nothing else to do
    and has called :func:`become_subreaper`: all children of the calling process are killed when the program
    is over.
    """
    if _subreaper_pid != os.getpid():
        raise RuntimeError(
            "run_program kills all children of its process: call become_subreaper() there first"
        )
    token = secrets.token_hex(16)
    read_fd, write_fd = os.pipe()
    runner = Path(__file__).with_name("program_runner.py")
    cpu_seconds = int(wall_seconds) + 1
    limits = [str(write_fd), str(scratch), str(memory_bytes), str(cpu_seconds)]
    command = [sys.executable, "-I", "-B", str(runner), *limits]
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    try:
        assert process.stdin is not None
        try:
            process.stdin.write(f"{token}\n{program}".encode("utf-8", "surrogatepass"))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died while reading; the outcome below says so
        return _watch(process, read_fd, token, started, wall_seconds)
    finally:
        kill_tree(process)
        kill_descendants(os.getpid())
        os.close(read_fd)


def _watch(
    process: subprocess.Popen[bytes], read_fd: int, token: str, started: float, wall_seconds: float
) -> Outcome:
    answer = b""
    status, detail = TIMED_OUT, f"still running after {wall_seconds:g} s"
    end = started + wall_seconds
    patience = Patience(wall_seconds, process.pid, before=0.0)
    while True:
        left = end - time.monotonic()
        if left <= 0:
            if not (owed := patience.owed()):
                break
            end += owed
            continue
        readable, _, _ = select.select([read_fd], [], [], min(left, _POLL_SECONDS))
        if readable:
            chunk = os.read(read_fd, 4096)
            answer += chunk
            # End of file: the program closed it or ended. A token or an error ends the wait as well.
            if not chunk or answer == token.encode() or answer.startswith(b"error "):
                status, detail = _verdict(process, answer, token, left)
                break
            if len(answer) > 4096:
                status, detail = FAILED, "wrote to the result channel"
                break
        elif len(find_descendants(process.pid)) > MAX_PROCESSES:
            status, detail = FAILED, f"started more than {MAX_PROCESSES} processes"
            break
    return Outcome(status=status, detail=detail, seconds=time.monotonic() - started)


def _verdict(process: subprocess.Popen[bytes], answer: bytes, token: str, left: float) -> tuple[str, str]:
    if answer == token.encode():
        return PASSED, "ran to its end"
    if answer.startswith(b"error "):
        return FAILED, answer[len(b"error ") :].decode("utf-8", "replace")
    try:
        code = process.wait(timeout=left)
    except subprocess.TimeoutExpired:
        return TIMED_OUT, "closed its result channel and went on running"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return TIMED_OUT, f"processor time used up (signal {-code})"
    return FAILED, f"the process ended before the program did (exit status {code})"


def _children(pid: int) -> list[psutil.Process]:
    try:
        return [child for child in psutil.Process(pid).children(recursive=True) if _alive(child)]
    except psutil.NoSuchProcess:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap() -> None:
    """Collect all dead children of this process, its own and adopted ones."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return
