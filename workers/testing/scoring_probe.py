"""A scorer for tests of the scoring process: it looks around, and misbehaves on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.verdict import ALONE, SCORED, TIMED_OUT, verdict

_VALUES = {"wrong": 0.0, "right": 1.0}


def wall_seconds(attempt: str) -> float:
    """A short wall limit, whatever the attempt."""
    return 3.0


def prepare(document: dict[str, Any], options: dict[str, Any]) -> None:
    """Take as long as ``options["prepare_seconds"]`` says."""
    time.sleep(options.get("prepare_seconds", 0.0))


def score(text: str, document: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Do what ``text`` says."""
    if text in _VALUES:
        return [verdict("probe", "m", _VALUES[text])]
    if text in ("slow unless alone", "always slow"):
        is_late = text == "always slow" or options["attempt"] != ALONE
        return [verdict("probe", "m", float(not is_late), status=TIMED_OUT if is_late else SCORED)]
    if text.startswith("touch "):
        Path(text.removeprefix("touch ")).touch()
        return [verdict("unsafe", "m", 1.0)]
    if text == "describe":
        return [{"pid": os.getpid(), "environment": dict(os.environ), "modules": sorted(sys.modules)}]
    if text == "raise":
        raise ZeroDivisionError("on purpose")
    if text == "die":
        os._exit(3)
    if text == "hang":
        time.sleep(3600)
    if text == "noise":
        for descriptor in range(3, 32):
            try:
                os.write(descriptor, b'not json\n{"id": "of another job"}\n[1]\nhalf a line')
            except OSError:
                continue
        return [{"answer": "after the noise"}]
    if text == "flood":
        block = b"x" * (1 << 20)
        while True:
            for descriptor in range(3, 32):
                try:
                    os.write(descriptor, block)
                except OSError:
                    continue
    if text == "orphan and die":
        subprocess.Popen(["setsid", "sleep", "234.75"])
        os._exit(3)
    if text == "swarm":
        for _ in range(100):
            subprocess.Popen(["sleep", "456.5"])
        time.sleep(3600)
    if text == "spawn and hang":
        subprocess.Popen(["setsid", "sleep", "345.5"])
        time.sleep(3600)
    raise ValueError(f"unknown request {text!r}")
