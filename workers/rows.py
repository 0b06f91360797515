"""The columns of a ``generations`` row that follow from its cell and key alone, and rows that hold an error.

Torch-free: the driver writes a row for an item whose worker died, so that every key is stored exactly once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dlmgrid import __version__
from dlmgrid.workers.cell import reference_key
from dlmgrid.workers.tables import GENERATIONS
from dlmgrid.workers.units import Key, WorkUnit

_SETTINGS = (
    "model", "revision", "weight_fingerprint", "benchmark", "prompt_version", "chat_template", "num_fewshot",
    "method", "drafter_fingerprint", "budget", "temperature", "verification", "noise", "decoder",
    "commits_per_step", "threshold", "gamma", "fold_tau", "product_tau", "cache", "block_length", "gen_length",
    "stop", "numerics", "kernels", "dtype", "max_in_flight",
)  # fmt: skip


def temperature_text(temperature: float) -> str:
    """The temperature as the shortest decimal text that reads back as the same number: ``0``, ``0.7``, ``1``."""
    return repr(float(temperature)).removesuffix(".0")


def blank_row(unit: WorkUnit, key: Key, runtime_fingerprint: str) -> dict[str, Any]:
    """Every column of ``generations``: identity, settings and provenance filled, the generation null."""
    cell = unit.cell.canonical()
    row: dict[str, Any] = dict.fromkeys(GENERATIONS.names)
    row.update({name: getattr(cell, name) for name in _SETTINGS})
    row.update(
        cell_key=cell.cell_key,
        item_id=key.item_id,
        repeat=key.repeat,
        temperature_text=temperature_text(cell.temperature),
        seed=str(cell.seed),
        claim=cell.claim,
        reference_key=reference_key(cell, key.repeat, runtime_fingerprint),
        run_id=unit.run_id,
        attempt=unit.attempt,
        device=unit.device,
        runtime_fingerprint=runtime_fingerprint,
        product_version=__version__,
        finished_at=datetime.now(UTC),
    )
    return row


def error_row(unit: WorkUnit, key: Key, runtime_fingerprint: str, error: str) -> dict[str, Any]:
    """A row that says why this key has no generation. ``error`` is cut to its first line, 500 characters."""
    lines = error.strip().splitlines() or ["unknown error"]
    return {**blank_row(unit, key, runtime_fingerprint), "error": lines[0][:500]}
