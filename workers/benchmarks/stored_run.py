"""What scoring reads of a run's output folder: the texts, and the documents with the gold answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import read_items
from dlmgrid.workers.tables import GENERATIONS, read_table


def read_generations(folder: Path, benchmarks: Sequence[str] | None) -> list[dict[str, Any]]:
    """What scoring reads of ``OUT/generations/*.parquet``, of the named benchmarks or of all.

    Raises InputError for a folder without generations and for a benchmark that is unknown or has none there.
    """
    paths = sorted(str(path) for path in (folder / "generations").glob("*.parquet"))
    if not paths:
        raise InputError(f"{folder}: no generations/*.parquet; give the output folder of a run")
    columns = ("cell_key", "benchmark", "item_id", "repeat", "text", "error")
    table: pa.Table = read_table(paths, GENERATIONS, columns)
    rows: list[dict[str, Any]] = table.to_pylist()
    if benchmarks is None:
        return rows
    wanted = {get_benchmark(name).name for name in benchmarks}
    absent = wanted - {row["benchmark"] for row in rows}
    if absent:
        raise InputError(f"{folder}: no generations of {', '.join(sorted(absent))}")
    return [row for row in rows if row["benchmark"] in wanted]


def read_documents(folder: Path, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Documents of the wanted (benchmark, item) pairs, from every ``OUT/inputs/<benchmark>[-<digest>].jsonl``.

    Raises InputError for an item that is missing, or whose document differs between files.
    """
    documents: dict[tuple[str, str], dict[str, Any]] = {}
    names = {name for name, _ in wanted}
    for path in sorted((folder / "inputs").glob("*.jsonl")):
        name = path.stem.split("-", 1)[0]
        if name not in names:
            continue
        for item in read_items(path):
            known = documents.setdefault((name, item.item_id), item.document)
            if known != item.document:
                raise InputError(
                    f"{path}: item {item.item_id} has another document in another file of {name}: the data "
                    "changed between runs; score them in separate output folders"
                )
    missing = sorted(wanted - documents.keys())
    if missing:
        name, item_id = missing[0]
        raise InputError(
            f"{folder}/inputs: no item {item_id!r} of {name}; it is needed to score its generations"
        )
    return documents
