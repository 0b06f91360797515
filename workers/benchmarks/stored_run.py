"""What scoring reads of a run's output folder: the texts, and the documents with the gold answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dlmgrid.workers import run_folder
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.errors import InputError


def read_generations(folder: Path, benchmarks: Sequence[str] | None) -> list[dict[str, Any]]:
    """What scoring reads of the committed rows of ``OUT/generations``, of the named benchmarks or of all.

    Raises InputError for a folder that is not a run's or is damaged, and for a benchmark that is unknown or has
    no rows there.
    """
    columns = ("cell_key", "benchmark", "item_id", "repeat", "text", "error")
    rows: list[dict[str, Any]] = run_folder.read_generations(folder, columns).to_pylist()
    if benchmarks is None:
        return rows
    wanted = {get_benchmark(name).name for name in benchmarks}
    absent = wanted - {row["benchmark"] for row in rows}
    if absent:
        raise InputError(f"{folder}: no generations of {', '.join(sorted(absent))}")
    return [row for row in rows if row["benchmark"] in wanted]


def verify_inputs(folder: Path, names: Collection[str]) -> None:
    """Hold the item files of the named benchmarks against what the manifest says of them.

    Raises InputError for a file that is gone or changed, and for a benchmark of which none is recorded.
    """
    recorded = recorded_inputs(folder, names)
    for file in recorded:
        if fault := run_folder.inputs_fault(folder, file):
            raise InputError(
                f"{folder}/inputs/{file.name} {fault}; restore it from a backup, or run the grid into a new --out"
            )
    for name in sorted(set(names) - {_benchmark_of(file.name) for file in recorded}):
        raise InputError(
            f"{folder}: {run_folder.MANIFEST} names no inputs of {name}: the folder was written by an older "
            "version; run the same grid again, which records them"
        )


def recorded_inputs(folder: Path, names: Collection[str]) -> list[run_folder.InputsFile]:
    """The files ``OUT/inputs/<benchmark>[-<digest>].jsonl`` of these benchmarks that the manifest names."""
    recorded = run_folder.open_run(folder).inputs
    return [file for name, file in sorted(recorded.items()) if _benchmark_of(name) in names]


def _benchmark_of(file_name: str) -> str:
    return Path(file_name).stem.split("-", 1)[0]


def read_documents(folder: Path, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Documents of the wanted (benchmark, item) pairs, from every recorded file of these benchmarks.

    Raises InputError for a file that is gone or changed, and for an item that is missing or whose document
    differs between files.
    """
    documents: dict[tuple[str, str], dict[str, Any]] = {}
    for file in recorded_inputs(folder, {name for name, _ in wanted}):
        name = _benchmark_of(file.name)
        for item in run_folder.read_inputs(folder, file):
            known = documents.setdefault((name, item.item_id), item.document)
            if known != item.document:
                raise InputError(
                    f"{folder}/inputs/{file.name}: item {item.item_id} has another document in another file of "
                    f"{name}: the data changed between runs; score them in separate output folders"
                )
    missing = sorted(wanted - documents.keys())
    if missing:
        name, item_id = missing[0]
        raise InputError(
            f"{folder}/inputs: no item {item_id!r} of {name}; it is needed to score its generations"
        )
    return documents
