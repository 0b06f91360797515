"""The record of a run: ``run.json`` (its terminal state, whatever Ray says), and rows of ``runs`` and
``attempts``.

Attempts are appended to a line file while the run goes on and turned into Parquet at its end, or by the
next run if it was killed, so that a cause of failure is never lost.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlmgrid import __version__
from dlmgrid.cluster.progress import write_json
from dlmgrid.workers.actor import ActorDescription
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.tables import ATTEMPTS, RUNS, to_table, write_table
from dlmgrid.workers.units import WorkUnit

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def submission_id() -> str | None:
    """The id of the Ray job that this process is the driver of; "" where Ray does not say, None for no
    job."""
    text = os.environ.get(JOB_CONFIG_VARIABLE)
    if text is None:
        return "" if os.environ.get("RAY_JOB_ID") else None
    metadata = json.loads(text).get("metadata") or {}
    return str(metadata.get("job_submission_id", ""))


def new_run_id() -> str:
    """A name for one call of ``run``: the time in UTC and four random hexadecimal digits."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(2).hex()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What ``run.json`` says of the last run: ``running`` or how it ended, and why."""

    status: str
    message: str


def read_record(out: Path) -> RunState | None:
    """The state of the last run into a folder, None where it left none. Raises InputError for a damaged file."""
    path = out / "run.json"
    try:
        values = json.loads(path.read_bytes())
        status, message = values["status"], values["message"]
        if not (isinstance(status, str) and isinstance(message, str)):
            raise TypeError("status and message are not texts")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read ({type(error).__name__}: {error}); delete it: the next run writes it again"
        ) from error
    return RunState(status=status, message=message)


class RunRecord:
    """Keeps the record of one run; every method leaves readable files behind."""

    def __init__(self, out: Path, run_id: str, grid_digest: str, grid_text: str) -> None:
        self._out = out
        self._lines = out / "attempts" / f"{run_id}.jsonl"
        self._row: dict[str, Any] = {
            **dict.fromkeys(RUNS.names),
            "run_id": run_id,
            "grid_digest": grid_digest,
            "grid": grid_text,
            "command": shlex.join(sys.argv),
            "submission_id": submission_id(),
            "status": "running",
            "product_version": __version__,
            "started_at": datetime.now(UTC),
        }
        self._actors: list[dict[str, Any]] = []
        self._message = ""

    def begin(self) -> None:
        """Write the first state, and finish the attempt files of runs that were killed."""
        for lines in sorted((self._out / "attempts").glob("*.jsonl")):
            _attempts_to_parquet(lines)
        self._write()

    def set(self, **values: Any) -> None:
        """Set columns of the ``runs`` row."""
        unknown = values.keys() - self._row.keys()
        assert not unknown, unknown
        self._row.update(values)

    def add_actor(self, description: ActorDescription) -> None:
        """Note who ran: import place, version, effective environment."""
        self._actors.append(asdict(description))
        self._row["environment"] = json.dumps(self._actors, sort_keys=True)
        self._write()

    def add_attempt(
        self, unit: WorkUnit, *, actor: str, outcome: str, cause: str, started_at: datetime, seconds: float
    ) -> None:
        row = {
            "run_id": self._row["run_id"],
            "unit_key": unit.unit_key,
            "attempt": unit.attempt,
            "cell_key": unit.cell.cell_key,
            "num_keys": len(unit.keys),
            "actor": actor,
            "outcome": outcome,
            "cause": cause,
            "max_in_flight": unit.max_in_flight,
            "started_at": started_at.isoformat(),
            "seconds": seconds,
        }
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def end(self, status: str, exit_code: int, message: str = "") -> None:
        """Write the terminal state: ``done``, ``failed``, ``stopped``, ``incomplete`` or ``error``."""
        self._message = message
        self.set(status=status, exit_code=exit_code, finished_at=datetime.now(UTC))
        self._write()
        if self._lines.exists():
            _attempts_to_parquet(self._lines)

    def _write(self) -> None:
        run_id = self._row["run_id"]
        target = self._out / "runs" / f"{run_id}.parquet"
        temporary = partial_path(target)
        write_table(str(temporary), to_table(RUNS, [self._row]))
        temporary.replace(target)
        values = {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in self._row.items()
            if name not in ("grid", "environment")
        }
        write_json(self._out / "run.json", {**values, "message": self._message, "actors": self._actors})


def _attempts_to_parquet(lines: Path) -> None:
    rows = []
    for line in lines.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # a torn last line is of an attempt that the kill cut short
            row = json.loads(line)
            rows.append({**row, "started_at": datetime.fromisoformat(row["started_at"])})
    target = lines.with_suffix(".parquet")
    temporary = partial_path(target)
    write_table(str(temporary), to_table(ATTEMPTS, rows))
    temporary.replace(target)
    lines.unlink()
