"""Faults that a fake runner commits on request, and the flag files by which they happen a set number of times.

A fault is named in the item's document: ``{"fault": "crash", "times": 1, "cells": ["ssd"]}``; without ``times``
it happens at every attempt, without ``cells`` in every cell, else only in cells of the named methods.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError, OutOfMemoryError, TransientError
from dlmgrid.workers.items import Item
from dlmgrid.workers.units import WorkUnit

BEFORE_WRITING = ("crash", "hang", "input", "meet", "out_of_memory", "slow", "transient", "unforeseen")

MEETING_SECONDS = 120.0


def find_fault(item: Item, unit: WorkUnit) -> str | None:
    """The fault due now for this item, counted in a file beside the inputs so that a new process knows."""
    fault: Any = item.document.get("fault")
    if fault is None:
        return None
    cells = item.document.get("cells")
    if cells is not None and unit.cell.canonical().method not in cells:
        return None
    times = item.document.get("times")
    if times is None:
        return str(fault)
    folder = Path(unit.inputs).parent.parent / "faults"
    folder.mkdir(exist_ok=True)
    for occurrence in range(int(times)):
        try:
            (folder / f"{fault}-{item.item_id}-{occurrence}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return str(fault)
    return None


def commit_fault(fault: str, item: Item, unit: WorkUnit) -> None:
    """Do what ``fault`` says; a crash is a SIGKILL of this process, so nothing can be tidied up."""
    if fault in ("crash", "crash_after_writing"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "slow":
        time.sleep(float(item.document.get("seconds", 0.2)))
    elif fault == "meet":
        _meet(
            Path(unit.inputs).parent.parent / "faults" / f"meet-{item.item_id}-{item.document['times'] - 1}"
        )
    elif fault == "transient":
        raise TransientError(f"item {item.item_id}: a fault that may pass")
    elif fault == "unforeseen":
        raise ValueError(f"item {item.item_id}: nobody thought of this")
    elif fault == "input":
        raise InputError(f"item {item.item_id}: the unit cannot be read; mend it")
    elif fault == "out_of_memory":
        if unit.max_in_flight > int(item.document.get("fits", 1)):
            raise OutOfMemoryError(f"no room for {unit.max_in_flight} samples in flight")
    else:
        raise ValueError(f"no fault is called {fault!r}")


def _meet(last: Path) -> None:
    """Wait until ``last``, the flag of the fault's last occurrence, is there: who waits in one cannot come into the
    next, so as many processes work at once, however late one of them starts."""
    deadline = time.monotonic() + MEETING_SECONDS
    while not last.exists():
        if time.monotonic() > deadline:
            raise TransientError(f"no other process came within {MEETING_SECONDS:g} s")
        time.sleep(0.05)
