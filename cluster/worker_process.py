"""Work that needs torch, in a process of its own, so that the driver side imports none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import dlmgrid
from dlmgrid.workers.errors import InputError

_STDERR = 2  # the descriptor: sys.stderr may be an object that has none


def run_worker_module(module: str, arguments: Sequence[str], doing: str) -> None:
    """Run ``python -m module`` by exec, with this package on its path. What it prints goes to this process's stderr.

    Raises:
        InputError: the process ended with status 2 and one line ``error: …``, which becomes the message.
        RuntimeError: it ended otherwise; ``doing`` says in words what it was doing.
    """
    root = str(Path(dlmgrid.__file__).resolve().parent.parent)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdout=_STDERR,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or ["no output"]
        if process.returncode == 2 and lines[-1].startswith("error: "):
            raise InputError(lines[-1].removeprefix("error: "))
        raise RuntimeError(f"{doing} ended with status {process.returncode}: {lines[-1]}")
