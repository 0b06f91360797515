"""``FakeUnitRunner``: valid rows that follow from cell and key alone, in no time, with faults on request."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from dlmgrid.workers.cell import Cell, digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, read_items
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.rows import Provenance, blank_row, error_row
from dlmgrid.workers.tables import GENERATIONS, read_table, to_table, write_table
from dlmgrid.workers.testing.faults import BEFORE_WRITING, commit_fault, find_fault
from dlmgrid.workers.units import Key, UnitResult, WorkUnit

FINGERPRINT = "fake-runtime"


class FakeUnitRunner:
    """Stands in for ``UnitRunner`` in tests of the driver: same interface, same files, no model.

    A row's tokens are a hash of its reference cell, item and repeat, so an accelerated row equals its reference.
    An item whose document says ``{"prompt_fits": false}`` gets an error row, ``{"diverges": true}`` a false
    verdict in accelerated cells. Accelerated rows take their verdict from the reference shard on disk.
    """

    def __init__(self, device: str, actor: str) -> None:
        self._device = device
        self._actor = actor

    def fingerprint(self) -> str:
        return f"{FINGERPRINT}-{self._device}"

    def run(self, unit: WorkUnit) -> UnitResult:
        start = time.perf_counter()
        items = {item.item_id: item for item in read_items(Path(unit.inputs))}
        faults: list[tuple[str, Item]] = []
        for item in [items[key.item_id] for key in unit.keys]:
            fault = find_fault(item, unit)
            if fault in BEFORE_WRITING:
                commit_fault(fault, item, unit)
            elif fault is not None:
                faults.append((fault, item))
        references = _read_references(unit)
        rows = [self._row(unit, key, items[key.item_id], references) for key in unit.keys]
        temporary = partial_path(Path(unit.output))
        write_table(str(temporary), to_table(GENERATIONS, rows))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            content = file.read()
        temporary.replace(unit.output)
        for fault, item in faults:
            commit_fault(fault, item, unit)
        verdicts = [(row["exact_tokens"], row["exact_path"], row["exact_bits"]) for row in rows]
        return UnitResult(
            unit_key=unit.unit_key,
            output=unit.output,
            num_rows=len(rows),
            num_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            num_errors=sum(row["error"] is not None for row in rows),
            num_inexact=sum(False in verdict for verdict in verdicts),
            num_unchecked=sum(None in verdict for verdict in verdicts),
            num_tokens=sum(row["generated_tokens"] or 0 for row in rows),
            seconds=time.perf_counter() - start,
            runtime_fingerprint=self.fingerprint(),
            failures={row["item_id"]: row["error"] for row in rows if row["error"] is not None},
        )

    def _row(
        self, unit: WorkUnit, key: Key, item: Item, references: dict[Key, list[int] | None]
    ) -> dict[str, Any]:
        cell = unit.cell.canonical()
        provenance = Provenance(
            run_id=unit.run_id,
            actor=self._actor,
            attempt=unit.attempt,
            device=self._device,
            runtime_fingerprint=self.fingerprint(),
        )
        if item.document.get("prompt_fits") is False:
            return error_row(cell, key, provenance, f"item {item.item_id}: the prompt does not fit")
        tokens = _tokens(cell.reference(), key)
        row = blank_row(cell, key, provenance)
        row.update(
            prompt_tokens=3,
            prompt_digest=digest(item.prompt),
            token_ids=tokens,
            text=" ".join(map(str, tokens)),
            stop_reason="eos",
            generated_tokens=len(tokens),
            nfe_prefill=1,
            nfe_denoise=len(tokens),
            nfe_commit=1,
            nfe_draft=0,
            nfe_total=len(tokens) + 2,
            rounds=len(tokens),
            seconds_wall=0.001,
            batch_size=min(unit.max_in_flight, len(unit.keys)),
        )
        reference = tokens if cell.is_reference else references.get(key)
        if reference is None:
            row["error"] = f"item {item.item_id}: its serialized run failed, so there is no verdict"
        else:
            is_equal = reference == tokens and not (item.document.get("diverges") and not cell.is_reference)
            row.update(exact_tokens=is_equal, exact_path=is_equal, exact_bits=is_equal)
        return row


def _tokens(reference: Cell, key: Key) -> list[int]:
    seed = hashlib.sha256(f"{reference.cell_key}/{key.item_id}/{key.repeat}".encode()).digest()
    return [int(byte) for byte in seed[: 4 + seed[0] % 12]]


def _read_references(unit: WorkUnit) -> dict[Key, list[int] | None]:
    columns = ["cell_key", "item_id", "repeat", "token_ids"]
    table = read_table(unit.reference_shards, GENERATIONS, columns)
    wanted = unit.cell.reference().cell_key
    if set(table["cell_key"].to_pylist()) - {wanted}:
        raise InputError(f"a reference shard of unit {unit.unit_key} holds rows of another cell")
    rows = table.to_pylist()
    return {Key(row["item_id"], row["repeat"]): row["token_ids"] for row in rows}
