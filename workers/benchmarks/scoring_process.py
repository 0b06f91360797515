"""The parent's side of a scoring process: starts it clean, bounds its jobs' time, kills what is left."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import dlmgrid
from dlmgrid.workers.benchmarks.execution import SCRATCH_VARIABLE
from dlmgrid.workers.benchmarks.sandbox import MAX_PROCESSES, find_descendants, kill_marked, kill_tree
from dlmgrid.workers.benchmarks.time_limit import MAX_PATIENCE, waiting_seconds
from dlmgrid.workers.errors import InputError

MARK = "DLMGRID_SCORING_PROCESS"
# For what a scorer does before it sees the text: imports, expected outputs of the slowest reference solution.
PREPARE_SECONDS = 300.0
# Far above any verdict; a program that gets hold of the channel can write without end.
MAX_REPLY_BYTES = 32 * 1024**2
_POLL_SECONDS = 0.25
_PASSED_ON = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "TMPDIR",
    "SYSTEMROOT",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What became of a job: ``verdicts`` when it was scored, else why not.

    ``cause`` is "" with verdicts, else ``timed_out`` (wall limit), ``unruly`` (killed for too many
    processes or a flooded channel), ``died`` (the process ended, or was not ready in time) or ``failed`` (the
    scorer raised).
    """

    verdicts: list[dict[str, Any]]
    cause: str
    detail: str
    seconds: float


class ScoringProcess:
    """One scoring process, started when a job comes and replaced after it was killed.

    It gets no standard streams, no GPU, one thread per numeric library, a fixed hash seed, a scratch folder
    as home and temporary folder, and no variable of the caller's environment but those that Python needs: a
    generated program finds no credentials there. Use it from one thread, as a context manager.
    """

    def __init__(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self._is_cancelled = is_cancelled
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._mark = ""
        self._job_fd = -1
        self._reply_fd = -1

    def __enter__(self) -> ScoringProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process that waits for the next job; None where it has yet to be started."""
        return None if self._process is None else self._process.pid

    def score(
        self, module: str, text: str, document: dict[str, Any], options: dict[str, Any], wall_seconds: float
    ) -> Reply:
        """Score one text within ``wall_seconds``, which run from when the scorer is ready for it.

        Raises InputError when the scorer reports one (a missing package, say).
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        assert self._process is not None
        identity = secrets.token_hex(8)
        job = {"id": identity, "module": module, "text": text, "document": document, "options": options}
        started, limit, is_ready = time.monotonic(), PREPARE_SECONDS, False
        patience = _TreePatience(self._process.pid)
        message = (json.dumps(job) + "\n").encode()
        buffer, num_bytes = bytearray(), 0
        while True:
            left = started + limit + patience.seconds(limit) - time.monotonic()
            if self._is_cancelled():
                self.close()
                return _no_verdict("died", "cancelled", started)
            if left <= 0:
                self.close()
                if not is_ready:
                    return _no_verdict("died", f"the scorer was not ready within {limit:g} s", started)
                return _no_verdict("timed_out", f"not scored within {limit:g} s", started)
            writable = [self._job_fd] if message else []
            readable, ready, _ = select.select([self._reply_fd], writable, [], min(left, _POLL_SECONDS))
            if ready:
                try:
                    message = message[os.write(self._job_fd, message) :]
                except BrokenPipeError:
                    message = b""
            if readable:
                chunk = os.read(self._reply_fd, 1 << 16)
                if not chunk:
                    self._process.wait()
                    status = self._process.returncode
                    self.close()
                    return _no_verdict("died", f"the scoring process ended (exit status {status})", started)
                buffer += chunk
                num_bytes += len(chunk)
                if num_bytes > MAX_REPLY_BYTES:
                    self.close()
                    return _no_verdict(
                        "unruly", f"wrote more than {MAX_REPLY_BYTES} bytes as a reply", started
                    )
                if b"\n" not in chunk:
                    continue
                *lines, rest = buffer.split(b"\n")
                buffer = bytearray(rest)
                for line in lines:
                    reply = _parse(line, identity)
                    if reply is not None and "ready" not in reply:
                        return _reply(reply)
                    if reply is not None and not is_ready:
                        started, limit, is_ready = time.monotonic(), wall_seconds, True
                        patience = _TreePatience(self._process.pid)
            elif (status := self._process.poll()) is not None:
                # Its replies are read first. A child may hold the channel open, so its end is not waited for.
                self.close()
                return _no_verdict("died", f"the scoring process ended (exit status {status})", started)
            elif not ready and patience.look() > MAX_PROCESSES:
                self.close()
                return _no_verdict("unruly", f"started more than {MAX_PROCESSES} processes", started)

    def close(self) -> None:
        """Kill the process, everything it started, and its scratch folder."""
        if self._process is not None:
            kill_tree(self._process)
            kill_marked(MARK, self._mark)
            self._process = None
            os.close(self._job_fd)
            os.close(self._reply_fd)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _start(self) -> None:
        self._mark = secrets.token_hex(16)
        self._scratch = Path(tempfile.mkdtemp(prefix="dlmgrid-score-"))
        job_read, self._job_fd = os.pipe()
        self._reply_fd, reply_write = os.pipe()
        os.set_blocking(self._job_fd, False)
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dlmgrid.workers.benchmarks.execution",
                    str(job_read),
                    str(reply_write),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(job_read, reply_write),
                start_new_session=True,
                cwd=self._scratch,
                env={**_environment(self._scratch), MARK: self._mark},
            )
        finally:
            os.close(job_read)
            os.close(reply_write)


class _TreePatience:
    """How long a process and its descendants, dead ones too, have waited for a processor since it was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._waited = {pid: 0.0}
        self._before = waiting_seconds(pid)

    def look(self) -> int:
        """Take note of every descendant's waiting; returns how many there are."""
        descendants = find_descendants(self._pid)
        for pid in descendants:
            self._waited[pid] = waiting_seconds(pid)
        self._waited[self._pid] = waiting_seconds(self._pid) - self._before
        return len(descendants)

    def seconds(self, limit: float) -> float:
        """By how much a limit is to be put off, by what was seen so far."""
        return min(sum(self._waited.values()), MAX_PATIENCE * limit)


def _environment(scratch: Path) -> dict[str, str]:
    root = Path(dlmgrid.__file__).resolve().parent.parent
    paths = [str(root), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    return {
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUSERBASE": site.getuserbase(),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        SCRATCH_VARIABLE: str(scratch),
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(scratch),
        "HF_HOME": str(scratch / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _parse(line: bytes | bytearray, identity: str) -> dict[str, Any] | None:
    """The reply to job ``identity``; None for anything else that found its way into the channel."""
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) and reply.get("id") == identity else None


def _reply(reply: dict[str, Any]) -> Reply:
    if "input_error" in reply:
        raise InputError(reply["input_error"])
    if "error" in reply:
        return Reply(verdicts=[], cause="failed", detail=reply["error"], seconds=reply["seconds"])
    return Reply(verdicts=reply["verdicts"], cause="", detail="", seconds=reply["seconds"])


def _no_verdict(cause: str, detail: str, started: float) -> Reply:
    return Reply(verdicts=[], cause=cause, detail=detail, seconds=time.monotonic() - started)
