"""``dlmgrid methods [NAME]``: the drafting methods and what each needs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dlmgrid.jobs.console import table_console
from dlmgrid.workers.drafting.catalog import DIAGNOSTIC_METHODS, METHODS, get_method


def command(
    name: Annotated[str | None, typer.Argument(help="Describe this method in full.")] = None,
) -> None:
    """List the drafting methods, or describe one in full."""
    if name is not None:
        console = Console(soft_wrap=True, highlight=False)
        method = DIAGNOSTIC_METHODS.get(name) or get_method(name)
        console.print(f"{method.name}: {method.title}", style="bold", markup=False)
        for label, text in (
            ("what", method.summary),
            ("source", method.source),
            ("lossless", _lossless(method.lossless)),
            ("decoders", ", ".join(method.decoders)),
            ("needs", ", ".join(method.needs) or "nothing but the model"),
            ("parameters", ", ".join(method.parameters) or "none"),
        ):
            console.print(f"{label + ':':<12}{text}", markup=False)
        return
    table = Table("method", "title", "lossless", "parameters", box=box.SIMPLE_HEAD)
    for method in (*METHODS.values(), *DIAGNOSTIC_METHODS.values()):
        parameters = ", ".join(method.parameters) or "–"
        table.add_row(method.name, method.title, "yes" if method.lossless else "no", parameters)
    table_console().print(table)


def _lossless(lossless: bool) -> str:
    if lossless:
        return "yes: under coupled noise every row equals the serialized run"
    return "no: rows are approximate and say how many differ"
