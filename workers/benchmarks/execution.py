"""The scoring process: ``python -m dlmgrid.workers.benchmarks.execution JOB_FD REPLY_FD``.

It is started by exec from ``scoring_process``, never forked from a caller that may hold a model or a Ray
connection. It reads one job a line, ``{"id", "module", "text", "document", "options"}``, calls
``module.prepare`` (imports, expected outputs: work that does not depend on the text), says ``{"id", "ready"}``,
calls ``module.score`` in its main thread (lm-eval's math verifier and every alarm-based limit need that), kills
whatever the job left running, and answers with one line. Standard input, output and error are the null
device, so a text that prints cannot break the protocol. The parent enforces the wall limits of both.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

from dlmgrid.workers.benchmarks.sandbox import become_subreaper, die_with_parent, kill_descendants
from dlmgrid.workers.errors import InputError

# Set by ``scoring_process`` to the scratch folder of this process.
SCRATCH_VARIABLE = "DLMGRID_SCORING_SCRATCH"


def _answer(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        scoring = import_module(job["module"])
        scoring.prepare(job["document"], job["options"])
        say({"id": job["id"], "ready": True})
        started = time.monotonic()
        result = {"verdicts": scoring.score(job["text"], job["document"], job["options"])}
    except InputError as error:
        result = {"input_error": str(error)}
    except Exception as error:  # noqa: BLE001  reported to the parent, which marks the row
        result = {"error": f"{type(error).__name__}: {error}"}
    kill_descendants(os.getpid())
    return {"id": job["id"], "seconds": time.monotonic() - started, **result}


def _leave(number: int, frame: FrameType | None) -> None:
    """The caller is gone: nobody else will kill what runs here, nor remove the scratch folder."""
    kill_descendants(os.getpid())
    shutil.rmtree(os.environ[SCRATCH_VARIABLE], ignore_errors=True)
    os._exit(128 + number)


def main() -> None:
    job_fd, reply_fd = (int(argument) for argument in sys.argv[1:])
    multiprocessing.set_start_method("fork")  # EvalPlus hands closures to its check; nothing here has threads
    become_subreaper()
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent()

    def say(message: dict[str, Any]) -> None:
        # On a line of its own, whatever a program has left on the channel.
        view = memoryview(f"\n{json.dumps(message)}\n".encode())
        while view:
            view = view[os.write(reply_fd, view) :]

    with os.fdopen(job_fd, encoding="utf-8", errors="surrogatepass") as jobs:
        for line in jobs:
            say(_answer(json.loads(line), say))


if __name__ == "__main__":
    main()
