"""The learned or calibrated part of a method as a file: found, checked and identified before a model loads.

A run keeps a copy of every such file in its output folder under the fingerprint, so that ``check`` and a later
resume decode with the very drafter that the rows name. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.catalog import MethodInfo, get_method
from dlmgrid.workers.drafting.order_checkpoint import REFERENCE, find_order_checkpoint, read_order_checkpoint
from dlmgrid.workers.drafting.set_checkpoint import read_set_checkpoint
from dlmgrid.workers.drafting.spiffy_graph import DraftGraph, load_graph
from dlmgrid.workers.errors import InputError

SUFFIXES = {"order_model": ".safetensors", "set_model": ".safetensors", "draft_graph": ".json"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterFile:
    """A checked file. ``graph`` is the draft graph that it holds, None for a model; ``target`` is the weight
    fingerprint of the one target that a model was made for, "" where any will do; ``records`` is what a recording must
    hold beyond its steps for a replay with the file."""

    path: Path
    fingerprint: str
    graph: DraftGraph | None = None
    target: str = ""
    records: tuple[str, ...] = ()

    @property
    def stored_name(self) -> str:
        """Its name in the ``drafters`` folder of a run."""
        return self.fingerprint + SUFFIXES["order_model" if self.graph is None else "draft_graph"]


def read_drafter_file(method: MethodInfo, path: Path) -> DrafterFile:
    """Check the file of a method that has one. Raises InputError for a missing, damaged or foreign file."""
    if method.reads == "draft_graph":
        graph = load_graph(path)
        return DrafterFile(path=path, fingerprint=graph.fingerprint, graph=graph)
    if method.reads == "set_model":
        sets = read_set_checkpoint(path)
        return DrafterFile(path=path, fingerprint=sets.fingerprint, target=sets.target, records=sets.records)
    order = read_order_checkpoint(path)
    return DrafterFile(path=path, fingerprint=order.fingerprint, target=order.target, records=order.records)


def find_drafter_file(method: MethodInfo, name: str) -> DrafterFile:
    """The checked file that a grid names for ``method``; see :func:`read_drafter_file`."""
    if method.reads == "order_model":
        return read_drafter_file(method, find_order_checkpoint(name))
    path = Path(name).expanduser().absolute()
    if name == REFERENCE and not path.exists():
        raise InputError(
            f"method {method.name!r} has no shipped {method.file_key}, `{REFERENCE}` is SPOT's order model; make one "
            f"with dlmgrid {'train-sets' if method.reads == 'set_model' else 'calibrate'}"
        )
    return read_drafter_file(method, path)


def misfit(file: DrafterFile, cell: Cell) -> str | None:
    """Why a file cannot draft for a cell, or None. The weights are compared only where the cell knows them."""
    if file.target and cell.weight_fingerprint not in ("", file.target):
        weights = (
            f"of other weights ({file.target}) than model {cell.model!r} has ({cell.weight_fingerprint})"
        )
        if get_method(cell.method).reads == "set_model":
            return f"set model {file.path}: it reads tokens {weights}; fit it with dlmgrid train-sets --refit"
        return (
            f"order model {file.path}: it reads tokens {weights}; train one with dlmgrid train-order --tokens, or "
            "without it one for any target"
        )
    reason = None if file.graph is None else _graph_misfit(file.graph, cell)
    return reason and f"draft graph {file.path}: {reason}; calibrate one for this cell"


def _graph_misfit(graph: DraftGraph, cell: Cell) -> str | None:
    key = graph.key
    for name in (
        "decoder", "commits_per_step", "threshold", "comparison", "factor", "confidence", "sub_block_length",
        "temperature", "block_length", "noise",
    ):  # fmt: skip
        if name == "noise" and cell.temperature == 0:
            continue
        wanted, found = getattr(cell, name), getattr(key, name)
        if wanted != found:
            return f"it was calibrated for {name} {found}, the cell has {wanted}"
    if cell.weight_fingerprint and cell.weight_fingerprint != key.weight_fingerprint:
        return (
            f"it was calibrated on other weights ({key.weight_fingerprint or 'unknown'}) than model {cell.model!r} "
            f"has ({cell.weight_fingerprint})"
        )
    if cell.method == "spiffy" and cell.budget > graph.budget:
        return f"it was calibrated for {graph.budget} nodes, the budget is {cell.budget}"
    return None


def stored_drafter(folder: Path, cell: Cell) -> str:
    """The path of a cell's drafter in the ``drafters`` folder of a run, "" where it has none."""
    if not cell.drafter_fingerprint:
        return ""
    return str(folder / (cell.drafter_fingerprint + SUFFIXES[get_method(cell.method).reads]))
