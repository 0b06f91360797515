"""Answers made elsewhere as rows of an output folder, for scoring and reports; nothing of them was verified here.

An imported file is a cell of its own: its method and claim are ``imported``, its revision is the SHA-256 of the
file, so the same file taken in again adds nothing and a changed file is another cell. Of the columns that describe
a decode only those are filled that are known: there are no tokens, no path, no forwards and no verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlmgrid.cluster.lock import RunLock
from dlmgrid.cluster.records import RunRecord, new_run_id
from dlmgrid.cluster.store import Store
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.cell import IMPORTED, Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.exchange.answer_files import AnswerFile, read_answers
from dlmgrid.workers.items import inputs_file_name
from dlmgrid.workers.rows import Provenance, blank_row
from dlmgrid.workers.staging_lock import alone_in_staging
from dlmgrid.workers.tables import GENERATIONS, to_table, write_table
from dlmgrid.workers.units import Key, WorkUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest:
    """What to take in. ``model`` names whatever made the answers, ``temperature`` is what it sampled at."""

    file: Path
    benchmark: str
    out: Path
    data: str | None = None
    model: str = ""
    temperature: float = 0.0
    repeats: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportSummary:
    """What an import did: rows added and rows that were there, and the items the file has no answer for."""

    cell_key: str
    shape: str
    num_added: int
    num_kept: int
    missing: tuple[str, ...]


def import_answers(request: ImportRequest, say: Callable[[str], None] = print) -> ImportSummary:
    """Take a file of answers into an output folder of imports.

    Raises InputError, before anything is written, for an unknown benchmark, data that is missing, an answer file
    that is not sound (see ``answer_files``), and a folder that belongs to a grid run.
    """
    out = request.out.expanduser().absolute()
    benchmark = get_benchmark(request.benchmark)
    if request.temperature < 0:
        raise InputError(f"temperature is {request.temperature:g}; give 0 or more")
    items = benchmark.load(request.data, None, 0)
    answers = read_answers(request.file, items, request.repeats)
    if (out / "grids").is_dir() and any((out / "grids").iterdir()):
        raise InputError(f"{out} is the folder of a grid run; give imported answers an --out of their own")
    cell = Cell(
        model=request.model or request.file.stem,
        revision=f"sha256:{_file_digest(request.file)}",
        benchmark=benchmark.name,
        prompt_version=IMPORTED,
        method=IMPORTED,
        budget=0,
        temperature=request.temperature,
        decoder=IMPORTED,
        block_length=0,
        gen_length=0,
        numerics=IMPORTED,
        kernels=IMPORTED,
        dtype=IMPORTED,
    )
    store = Store(out)
    store.create()
    run_id = new_run_id()
    lock = RunLock(out / "run.lock", run_id)
    lock.acquire(say=say)
    try:
        with alone_in_staging(out):
            store.load(repair=True, say=say)
            store.recover(say=say)
            store.write_inputs(inputs_file_name(benchmark.name, IMPORTED, 0), items)
            keys = store.missing(cell.cell_key, list(answers.texts))
            if keys:
                record = RunRecord(out, run_id, cell.cell_key, "")
                record.begin()
                record.set(num_keys=len(keys), num_units=1, num_failed=0)
                _commit(store, cell, keys, answers, run_id)
                record.end("done", 0)
    finally:
        lock.release()
    return ImportSummary(
        cell_key=cell.cell_key,
        shape=answers.shape,
        num_added=len(keys),
        num_kept=len(answers.texts) - len(keys),
        missing=answers.missing,
    )


def _commit(store: Store, cell: Cell, keys: list[Key], answers: AnswerFile, run_id: str) -> None:
    """Write the rows to a staging file and make it part of the store."""
    provenance = Provenance(
        run_id=run_id,
        actor=f"import of {answers.shape}",
        attempt=1,
        device=IMPORTED,
        runtime_fingerprint=IMPORTED,
    )
    rows = [{**blank_row(cell, key, provenance), "text": answers.texts[key]} for key in keys]
    staged = store.staging / "imported.parquet"
    unit = WorkUnit(cell=cell, keys=tuple(keys), checkpoint="", inputs="", output=str(staged), run_id=run_id)
    write_table(str(staged), to_table(GENERATIONS, rows))
    if not store.adopt(unit):
        raise RuntimeError(f"{staged} could not be committed: it is not the file that was written")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
