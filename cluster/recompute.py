"""A sample of stored rows decoded again, each model in a fresh process, and written checks.

The process is started by exec and takes its rows from a Parquet file, so this module needs no torch and the
decoder starts from nothing: another process, another batch, another order than in the run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dlmgrid
from dlmgrid.cluster.check import Check, compare_again, now
from dlmgrid.cluster.report import load_generations
from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import read_items
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.checkpoint import weight_fingerprint
from dlmgrid.workers.tables import CHECKS, GENERATIONS, read_table, to_table, write_table

Row = dict[str, Any]


def sample_rows(run_dir: Path, size: int, seed: int) -> list[Row]:
    """``size`` rows that have tokens, drawn without replacement, cells in turn so that few leave none out."""
    keys = load_generations(run_dir, ["cell_key", "item_id", "repeat", "token_ids"])
    has_tokens = keys.column("token_ids").is_valid()
    by_cell: dict[str, list[int]] = defaultdict(list)
    for number, (cell_key, valid) in enumerate(
        zip(keys.column("cell_key").to_pylist(), has_tokens.to_pylist(), strict=True)
    ):
        if valid:
            by_cell[cell_key].append(number)
    generator = random.Random(seed)
    queues = [generator.sample(numbers, len(numbers)) for _, numbers in sorted(by_cell.items())]
    generator.shuffle(queues)
    depth = max((len(queue) for queue in queues), default=0)
    in_turn = [queue[turn] for turn in range(depth) for queue in queues if turn < len(queue)]
    rows: list[Row] = load_generations(run_dir).take(sorted(in_turn[:size])).to_pylist()
    return rows


def check_recomputed(run_dir: Path, rows: Sequence[Row]) -> list[Check]:
    """Decode ``rows`` again and compare. Raises InputError when a checkpoint or the inputs are gone or have
    changed, and RuntimeError when the decoding process dies."""
    by_source: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row["model"], row["revision"], row["weight_fingerprint"], row["benchmark"]].append(row)
    checks = []
    for (model, revision, fingerprint, benchmark), of_source in by_source.items():
        checkpoint = resolve_checkpoint(model, revision or None)
        found = weight_fingerprint(checkpoint)
        if found != fingerprint:
            raise InputError(
                f"{checkpoint}: the weights of {model} have changed since the run (fingerprint {found}, was "
                f"{fingerprint}); put the old ones back, or check without --sample"
            )
        checks += _check_source(run_dir, of_source, checkpoint, _inputs_of(run_dir, benchmark, of_source))
    return checks


def write_checks(run_dir: Path, name: str, checks: Sequence[Check]) -> Path:
    """Write ``checks/<name>.parquet`` whole or not at all, replacing an earlier file of that name."""
    checked_at = now()
    for folder in ("staging", "checks"):
        (run_dir / folder).mkdir(exist_ok=True)
    staged = run_dir / "staging" / f"checks-{name}-{os.getpid()}.parquet"
    write_table(str(staged), to_table(CHECKS, [check.to_row(checked_at) for check in checks]))
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    return staged.replace(run_dir / "checks" / f"{name}.parquet")


def sample_name(checks: Sequence[Check]) -> str:
    """The file name of a sample: the same keys give the same name."""
    return "recomputed-" + digest(sorted([check.cell_key, check.item_id, check.repeat] for check in checks))


def _inputs_of(run_dir: Path, benchmark: str, rows: Sequence[Row]) -> list[Path]:
    """The input files that hold every item of ``rows``: one, unless shots or limits gave a benchmark several."""
    wanted = {row["item_id"] for row in rows}
    paths = sorted((run_dir / "inputs").glob(f"{benchmark}-*.jsonl"))
    found = [path for path in paths if wanted & {item.item_id for item in read_items(path)}]
    if not found:
        raise InputError(
            f"{run_dir}/inputs holds no items of {benchmark}; the run's inputs are needed to decode again"
        )
    return found


def _check_source(run_dir: Path, rows: list[Row], checkpoint: Path, inputs: Sequence[Path]) -> list[Check]:
    """Each row is decoded from the input file whose prompt it had; the prompt digest tells."""
    checks: list[Check] = []
    waiting = rows
    for number, path in enumerate(inputs):
        held = {item.item_id for item in read_items(path)}
        here = [row for row in waiting if row["item_id"] in held]
        if not here:
            continue
        again = _decode_again(run_dir, here, checkpoint, path)
        is_last = number == len(inputs) - 1
        matched = [
            (row, new)
            for row, new in zip(here, again, strict=True)
            if is_last or row["prompt_digest"] == new["prompt_digest"]
        ]
        checks += [compare_again(row, new) for row, new in matched]
        done = {id(row) for row, _ in matched}
        waiting = [row for row in waiting if id(row) not in done]
    return checks + [_not_found(row) for row in waiting]


def _not_found(row: Row) -> Check:
    check = compare_again(row, {**row, "prompt_digest": None})
    return replace(check, faults=("no input file of the run holds this prompt",))


def _decode_again(run_dir: Path, rows: list[Row], checkpoint: Path, inputs: Path) -> list[Row]:
    root = str(Path(dlmgrid.__file__).resolve().parent.parent)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    staging = run_dir / "staging"
    staging.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging, prefix="check-") as folder:
        source, target = Path(folder) / "in.parquet", Path(folder) / "out.parquet"
        write_table(str(source), to_table(GENERATIONS, rows))
        command = [
            sys.executable, "-m", "dlmgrid.workers.recompute", str(source), str(target),
            "--checkpoint", str(checkpoint), "--inputs", str(inputs),
        ]  # fmt: skip
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            lines = process.stderr.strip().splitlines() or ["no output"]
            if process.returncode == 2 and lines[-1].startswith("error: "):
                raise InputError(lines[-1].removeprefix("error: "))
            raise RuntimeError(f"decoding again ended with status {process.returncode}: {lines[-1]}")
        decoded = read_table([str(target)], GENERATIONS).to_pylist()
    by_key = {(row["cell_key"], row["item_id"], row["repeat"]): row for row in decoded}
    return [by_key[row["cell_key"], row["item_id"], row["repeat"]] for row in rows]
