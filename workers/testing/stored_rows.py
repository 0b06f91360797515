"""Rows of ``generations`` made from a path by hand, with every derived column as a decode would fill it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import dlmgrid
from dlmgrid.workers.cell import CELL_FIELDS, Cell, digest, reference_key
from dlmgrid.workers.decoding.paths import compare, logits_digest, path_digest
from dlmgrid.workers.items import Item, write_items
from dlmgrid.workers.models.catalog import REFERENCE, resolve_checkpoint
from dlmgrid.workers.run_folder import MANIFEST, InputsFile, shard_path
from dlmgrid.workers.shard import Shard
from dlmgrid.workers.tables import GENERATIONS, to_table, write_table
from dlmgrid.workers.tokenization import load_tokenizer
from dlmgrid.workers.units import Key

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


@cache
def _text(model: str, tokens: tuple[int, ...]) -> str:
    """What the shipped model's tokenizer makes of ``tokens``; the tokens themselves for a model that is not there."""
    if model != REFERENCE:
        return " ".join(map(str, tokens))
    return load_tokenizer(resolve_checkpoint(REFERENCE)).decode(list(tokens))


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
        text=_text(cell.model, tuple(tokens)),
        stop_reason="eos",
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
        argmax_commits=len(tokens),
        drafted_nodes=cell.budget * len(accepted),
        rows_computed=(len(accepted) * (cell.budget + 1) + 3) * cell.block_length,
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
    """Commit ``rows`` as the driver does, but unseen: a shard for each cell and its line of the manifest."""
    by_cell: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault(row["cell_key"], []).append(row)
    for of_cell in by_cell.values():
        commit_rows(run_dir, of_cell)
    return run_dir


def commit_rows(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write one committed file of these rows, whatever they hold, with its line of the manifest."""
    keys = tuple(Key(row["item_id"], row["repeat"]) for row in rows)
    cell_key = rows[0]["cell_key"]
    unit_key = digest([cell_key, [[key.item_id, key.repeat] for key in sorted(keys)]])
    path = shard_path(run_dir, unit_key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(str(path), to_table(GENERATIONS, [dict(row) for row in rows]))
    content = path.read_bytes()
    verdicts = [[row[f"exact_{level}"] for level in ("tokens", "path", "bits")] for row in rows]
    shard = Shard(
        unit_key=unit_key,
        cell_key=cell_key,
        keys=keys,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        failed=tuple(key for key, row in zip(keys, rows, strict=True) if row["error"] is not None),
        inexact=tuple(key for key, found in zip(keys, verdicts, strict=True) if False in found),
        num_unchecked=sum(None in found for found in verdicts),
        num_tokens=sum(row["generated_tokens"] or 0 for row in rows),
        runtime_fingerprint=rows[0]["runtime_fingerprint"] or "",
        run_id=rows[0]["run_id"] or "",
        attempt=rows[0]["attempt"] or 0,
    )
    _append(run_dir, shard.to_line())
    return path


def commit_items(run_dir: Path, name: str, items: Sequence[Item]) -> Path:
    """Write a file of ``inputs/`` with its line of the manifest."""
    path = run_dir / "inputs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_items(path, items)
    _append(run_dir, InputsFile.of(name, path.read_bytes()).to_line())
    return path


def _append(run_dir: Path, line: str) -> None:
    with (run_dir / MANIFEST).open("a", encoding="utf-8") as manifest:
        manifest.write(line)
