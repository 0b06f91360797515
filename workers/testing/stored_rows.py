"""Rows of ``generations`` made from a path by hand, with every derived column as a decode would fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dlmgrid
from dlmgrid.workers.cell import CELL_FIELDS, Cell, digest, reference_key
from dlmgrid.workers.decoding.paths import compare, logits_digest, path_digest
from dlmgrid.workers.tables import GENERATIONS, to_table, write_table

PROMPT_TOKENS = 5
RUNTIME = "cpu/torch/testing"


def small_cell(**changes: Any) -> Cell:
    """A small draft-free cell of the reference model; ``changes`` are fields of Cell."""
    settings: dict[str, Any] = {
        "model": "reference",
        "benchmark": "words",
        "prompt_version": "1",
        "method": "none",
        "budget": 0,
        "temperature": 0.0,
        "block_length": 4,
        "gen_length": 8,
    }
    return Cell(**{**settings, **changes}).canonical()


def make_row(
    cell: Cell,
    item_id: str,
    tokens: Sequence[int],
    *,
    accepted: Sequence[int] | None = None,
    repeat: int = 0,
    reference: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A row that commits ``tokens`` from left to right, one a step.

    ``accepted`` holds the drafted states that each round accepted (default: none, as many rounds as tokens). The
    verdict is taken against ``reference``, or is that of an equal second run for a draft-free cell. ``changes``
    are applied last, to plant what a test wants to find.
    """
    accepted = [0] * len(tokens) if accepted is None else list(accepted)
    positions = [PROMPT_TOKENS + offset for offset in range(len(tokens))]
    steps = [[commit] for commit in zip(positions, tokens, strict=True)]
    seed = digest([cell.reference().cell_key, item_id, repeat])
    digests = [digest([seed, step, token])[:16] for step, token in enumerate([0, *tokens[:-1]])]
    row: dict[str, Any] = dict.fromkeys(GENERATIONS.names)
    row.update({name: getattr(cell, name) for name in CELL_FIELDS})
    row.update(
        cell_key=cell.cell_key,
        item_id=item_id,
        repeat=repeat,
        temperature_text=f"{cell.temperature:g}",
        seed=str(cell.seed),
        claim=cell.claim,
        reference_key=reference_key(cell, repeat, RUNTIME),
        prompt_tokens=PROMPT_TOKENS,
        prompt_digest=digest([cell.prompt_version, item_id]),
        token_ids=list(tokens),
        text=" ".join(map(str, tokens)),
        stop_reason="canvas",
        generated_tokens=len(tokens),
        commit_positions=positions,
        commit_tokens=list(tokens),
        commit_steps=list(range(len(tokens))),
        commit_margins=[1.0] * len(tokens),
        path_digest=path_digest(steps),
        step_digests=digests,
        logits_digest=logits_digest(digests),
        nfe_prefill=1,
        nfe_denoise=len(accepted),
        nfe_commit=2,
        nfe_draft=0,
        nfe_total=len(accepted) + 3,
        rounds=len(accepted),
        accepted_per_round=sum(accepted) / len(accepted),
        accepted=accepted,
        drafted_nodes=cell.budget * len(accepted),
        rows_computed=len(accepted) * (cell.budget + 1) * cell.block_length,
        recompute_ratio=1.0,
        seconds_wall=0.01 * (len(accepted) + 3),
        profiled=False,
        tokens_per_second=len(tokens) / (0.01 * (len(accepted) + 3)),
        batch_size=1,
        batch_position=0,
        run_id="testing",
        actor="testing",
        attempt=1,
        device="cpu",
        runtime_fingerprint=RUNTIME,
        product_version=dlmgrid.__version__,
        finished_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    verdict = compare(row, row if reference is None else reference)
    if reference is not None or cell.is_reference:
        row.update({name: getattr(verdict, name) for name in verdict.__slots__})
    return row | changes


def write_run(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Store ``rows`` as a run folder does: a shard for each cell, in ``generations/``."""
    folder = run_dir / "generations"
    folder.mkdir(parents=True, exist_ok=True)
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault(row["cell_key"], []).append(dict(row))
    for cell_key, of_cell in by_cell.items():
        write_table(str(folder / f"{cell_key}.parquet"), to_table(GENERATIONS, of_cell))
    return run_dir
