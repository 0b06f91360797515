"""One driver per output folder: ``run.lock`` names the holder, and a heartbeat in it shows that it lives.

``flock`` decides on one machine. Across machines, where it may not reach, the heartbeat does: a newcomer
watches it for a while, and takes over only if it stands still. Clocks are never compared.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError

try:
    import fcntl
except ImportError:  # Windows: the heartbeat alone decides
    fcntl = None  # type: ignore[assignment]

HEARTBEAT_SECONDS = 3.0
WATCH_SECONDS = 12.0


class RunLock:
    """The right to write to an output folder, held from :meth:`acquire` to :meth:`release`."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._descriptor = -1
        self._beats = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, watch_seconds: float = WATCH_SECONDS, say: Callable[[str], None] = print) -> None:
        """Take the lock, over from a dead holder if need be.

        Raises InputError naming the holder when another driver is alive, or when the folder cannot be
        written.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(
                f"{self._path.parent} cannot be written ({error.strerror}); choose another --out"
            ) from error
        try:
            is_reliable = _try_flock(descriptor)
            if is_reliable is None:
                raise self._refusal(_read(descriptor))
            holder = _read(descriptor)
            is_local = holder.get("host") == socket.gethostname()
            if holder and not holder.get("released"):
                if not (is_local and (is_reliable or not _is_alive(holder))):
                    say(f"waiting {watch_seconds:.0f} s to see whether the driver {_name(holder)} is alive")
                    self._watch(descriptor, holder, watch_seconds)
                say(f"taking over from the driver {_name(holder)}, which is gone")
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._write()
        self._thread = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back; the file stays, marked released."""
        if self._descriptor < 0:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._write(released=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._write()

    def _write(self, *, released: bool = False) -> None:
        self._beats += 1
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_start": _process_start(os.getpid()),
            "run_id": self._run_id,
            "beat": self._beats,
            "released": released,
        }
        os.pwrite(self._descriptor, json.dumps(holder).ljust(400).encode() + b"\n", 0)

    def _watch(self, descriptor: int, holder: dict[str, Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(0.5, seconds))
            found = _read(descriptor)
            if found.get("released"):
                return
            if (found.get("run_id"), found.get("beat")) != (holder.get("run_id"), holder.get("beat")):
                raise self._refusal(found)

    def _refusal(self, holder: dict[str, Any]) -> InputError:
        return InputError(
            f"{self._path.parent} is being written by the driver {_name(holder)}; wait for it, stop it, "
            "or choose another --out"
        )


def _try_flock(descriptor: int) -> bool | None:
    """True: taken. None: another process has it. False: this file system has no such locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def _read(descriptor: int) -> dict[str, Any]:
    content = os.pread(descriptor, 4096, 0).strip()
    try:
        holder = json.loads(content) if content else {}
    except ValueError:
        # torn by a crash in the middle of a write: nobody who lives leaves it so for long
        return {"run_id": "unknown", "beat": -1}
    return holder if isinstance(holder, dict) else {}


def _name(holder: dict[str, Any]) -> str:
    return f"of run {holder.get('run_id')} (process {holder.get('pid')} on {holder.get('host')})"


def _is_alive(holder: dict[str, Any]) -> bool:
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _process_start(pid) in (None, holder.get("process_start"))


def _process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: tells it from a later one of the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])
