"""Limits count the time that a program ran or slept, not the time that it waited for a processor."""

from __future__ import annotations

import time

import pytest

from dlmgrid.workers.benchmarks import time_limit as module
from dlmgrid.workers.benchmarks.time_limit import MAX_PATIENCE, Patience, time_limit, waiting_seconds


def test_waiting_is_granted_once_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = [5.0]
    monkeypatch.setattr(module, "waiting_seconds", lambda pid: waited[0])
    patience = Patience(1.0)
    assert patience.owed() == 0.0
    waited[0] = 7.0
    assert patience.owed() == 2.0
    assert patience.owed() == 0.0
    waited[0] = 1000.0
    assert patience.owed() == MAX_PATIENCE - 2.0
    assert patience.owed() == 0.0


def test_a_loop_gets_its_time_whatever_else_runs_and_then_ends() -> None:
    used, waited = time.process_time(), waiting_seconds()
    with pytest.raises(TimeoutError, match="not done within 1 s"), time_limit(1):
        while True:
            pass
    used, waited = time.process_time() - used, waiting_seconds() - waited
    assert used > 0.7 or waited > MAX_PATIENCE


def test_sleeping_is_no_waiting() -> None:
    started = time.monotonic() - waiting_seconds()
    with pytest.raises(TimeoutError), time_limit(1):
        time.sleep(60)
    assert time.monotonic() - waiting_seconds() - started < 5


def test_an_alarm_is_put_off_by_what_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter([0.0, 0.5, 0.5, 0.5])
    monkeypatch.setattr(module, "waiting_seconds", lambda pid: next(waited))
    started = time.monotonic()
    with pytest.raises(TimeoutError), time_limit(1):
        time.sleep(60)
    assert time.monotonic() - started >= 1.5


def test_waiting_of_a_process_that_is_gone_is_none() -> None:
    assert waiting_seconds(2**22 + 1) == 0.0
