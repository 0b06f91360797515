"""Where commands print their tables: as wide as the terminal, or wide enough for a table in a job log."""

from __future__ import annotations

from rich.console import Console

WIDTH_OF_A_LOG = 220


def table_console() -> Console:
    """A console on stdout. A log has no width of its own, and a table folded to 80 columns cannot be read."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_OF_A_LOG)
