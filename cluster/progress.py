"""Progress of a run: a live line on a terminal, one plain line every few seconds in a job log, never one
per item.

The same numbers go to ``OUT/progress.json`` for notebooks and dashboards to poll.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from dlmgrid.workers.partial_files import write_whole

Style = Literal["auto", "live", "lines", "quiet"]
LINE_SECONDS = 5.0
FILE_SECONDS = 1.0


@dataclass(kw_only=True, slots=True)
class Counts:
    """Rows of this run. ``num_stored`` were there at the start, ``num_done`` is of this run."""

    num_wanted: int
    num_stored: int
    num_done: int = 0
    num_failed: int = 0
    num_inexact: int = 0
    num_retried: int = 0
    num_actors: int = 0
    cells: Sequence[str] = field(default=())

    @property
    def percent(self) -> float:
        return 100.0 * (self.num_stored + self.num_done) / self.num_wanted if self.num_wanted else 100.0


class Progress:
    """Shows :class:`Counts`; call :meth:`update` as often as you like, it limits itself.

    ``say`` prints a message between the lines, in every style but ``quiet``.
    """

    def __init__(
        self,
        path: Path,
        counts: Counts,
        *,
        style: Style = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._counts = counts
        self._clock = clock
        self._start = self._last_line = clock()
        self._last_file = -1e9
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        if style == "auto":
            style = "live" if self._console.is_terminal else "lines"
        self._style = style
        self._live = (
            Live(console=self._console, refresh_per_second=4, transient=True) if style == "live" else None
        )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._write()
        if self._style != "quiet":
            self._print(self.line())

    def say(self, message: str) -> None:
        if self._style != "quiet":
            self._print(message)

    def update(self) -> None:
        now = self._clock()
        if now - self._last_file >= FILE_SECONDS:
            self._last_file = now
            self._write()
            if self._live is not None:
                self._live.update(self._bar())
        if self._style == "lines" and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self._print(self.line())

    @property
    def rows_per_second(self) -> float:
        return self._counts.num_done / max(self._clock() - self._start, 1e-9)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds left at the mean rate so far; None before the first row."""
        counts = self._counts
        left = counts.num_wanted - counts.num_stored - counts.num_done
        if left == 0:
            return 0.0
        return left / self.rows_per_second if counts.num_done else None

    def line(self) -> str:
        """One line: percent, rows, rate, ETA, failed, retried, actors, current cells."""
        counts = self._counts
        parts = [
            f"{counts.percent:.0f}%",
            f"{counts.num_stored + counts.num_done}/{counts.num_wanted} rows",
            _rate(self.rows_per_second),
            f"ETA {_duration(self.eta_seconds)}",
            f"failed {counts.num_failed}",
            f"retried {counts.num_retried}",
        ]
        if counts.num_inexact:
            parts.append(f"NOT EXACT {counts.num_inexact}")
        parts.append(f"{counts.num_actors} actors")
        if counts.cells:
            shown = list(dict.fromkeys(counts.cells))
            parts.append(", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else ""))
        return " | ".join(parts)

    def _bar(self) -> Table:
        counts = self._counts
        table = Table.grid(padding=(0, 1))
        done = counts.num_stored + counts.num_done
        table.add_row(ProgressBar(total=max(counts.num_wanted, 1), completed=done, width=30), self.line())
        return table

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _write(self) -> None:
        values = {
            **asdict(self._counts),
            "cells": list(dict.fromkeys(self._counts.cells)),
            "percent": round(self._counts.percent, 2),
            "rows_per_second": round(self.rows_per_second, 3),
            "eta_seconds": self.eta_seconds,
            "updated_at": time.time(),
        }
        write_json(self._path, values)


def write_json(path: Path, values: object) -> None:
    """Replace a small JSON file whole, so that a reader never sees half of it."""
    write_whole(path, json.dumps(values, indent=1, sort_keys=True) + "\n")


def _rate(rows_per_second: float) -> str:
    """Rows a second, or a minute where that is less than one a second."""
    return f"{rows_per_second:.1f} rows/s" if rows_per_second >= 1 else f"{rows_per_second * 60:.1f} rows/min"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
