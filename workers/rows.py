"""Rows of ``generations`` before anything is generated: identity, settings and provenance; and rows of errors.

Torch-free: the driver writes a row for an item whose worker died, so that every key is stored exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dlmgrid import __version__
from dlmgrid.workers.cell import Cell, reference_key
from dlmgrid.workers.tables import GENERATIONS
from dlmgrid.workers.units import Key

MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a row was made: the same for all rows of an actor's unit. ``versions`` are those of torch, triton
    and transformers, where they took part."""

    run_id: str
    actor: str
    attempt: int
    device: str
    runtime_fingerprint: str
    versions: Mapping[str, str] = field(default_factory=dict)


def blank_row(cell: Cell, key: Key, provenance: Provenance) -> dict[str, Any]:
    """A row with the key, the settings and the provenance; every other column null."""
    row: dict[str, Any] = dict.fromkeys(GENERATIONS.names)
    row.update(cell.to_dict())
    row.update(
        cell_key=cell.cell_key,
        seed=str(cell.seed),
        temperature_text=format(cell.temperature, "g"),
        claim=cell.claim,
        item_id=key.item_id,
        repeat=key.repeat,
        reference_key=reference_key(cell, key.repeat, provenance.runtime_fingerprint),
        run_id=provenance.run_id,
        actor=provenance.actor,
        attempt=provenance.attempt,
        device=provenance.device,
        runtime_fingerprint=provenance.runtime_fingerprint,
        product_version=__version__,
        torch_version=provenance.versions.get("torch"),
        triton_version=provenance.versions.get("triton"),
        transformers_version=provenance.versions.get("transformers"),
        finished_at=datetime.now(UTC),
    )
    return row


def error_row(cell: Cell, key: Key, provenance: Provenance, error: str) -> dict[str, Any]:
    """The row of a key that could not be generated; ``error`` is cut to one line of 500 characters."""
    return {**blank_row(cell, key, provenance), "error": " ".join(error.split())[:MAX_ERROR_CHARACTERS]}
