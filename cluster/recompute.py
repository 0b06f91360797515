"""A sample of stored rows decoded again, each model in a fresh process, and written checks.

The process is started by exec and takes its rows from a Parquet file, so this module needs no torch and the
decoder starts from nothing: another process, another batch, another order than in the run.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlmgrid.cluster.check import Check, check_files, compare_again, now, rows_of
from dlmgrid.cluster.worker_process import run_worker_module
from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import inputs_file_name
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.fingerprint import weight_fingerprint
from dlmgrid.workers.partial_files import partial_path
from dlmgrid.workers.tables import CHECKS, GENERATIONS, read_table, to_table, write_table

Row = dict[str, Any]

_SOURCE = ("model", "revision", "weight_fingerprint", "benchmark", "prompt_version", "num_fewshot")


def sample_rows(run_dir: Path, size: int, seed: int) -> list[Row]:
    """``size`` rows that have tokens, drawn without replacement, cells in turn so that few leave none out."""
    by_cell: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path in check_files(run_dir).sound:
        table = read_table([path], GENERATIONS, ["cell_key", "generated_tokens"])
        for number, row in enumerate(table.to_pylist()):
            if row["generated_tokens"] is not None:
                by_cell[row["cell_key"]].append((path, number))
    generator = random.Random(seed)
    queues = [generator.sample(places, len(places)) for _, places in sorted(by_cell.items())]
    generator.shuffle(queues)
    depth = max((len(queue) for queue in queues), default=0)
    in_turn = [queue[turn] for turn in range(depth) for queue in queues if turn < len(queue)]
    return [rows_of(path)[number] for path, number in sorted(in_turn[:size])]


def check_recomputed(run_dir: Path, rows: Sequence[Row], device: str) -> list[Check]:
    """Decode ``rows`` again on ``device`` and compare.

    Raises InputError when a checkpoint or the inputs are gone or have changed, and RuntimeError when the
    decoding process dies.
    """
    by_source: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_source[tuple(row[name] for name in _SOURCE)].append(row)
    checks = []
    for source, stored in by_source.items():
        model, revision, fingerprint, benchmark, prompt_version, num_fewshot = source
        checkpoint = resolve_checkpoint(model, revision)
        found = weight_fingerprint(checkpoint)
        if found != fingerprint:
            raise InputError(
                f"{checkpoint}: the weights of {model} have changed since the run (fingerprint {found}, was "
                f"{fingerprint}); put the old ones back, or check with --sample 0"
            )
        inputs = run_dir / "inputs" / inputs_file_name(benchmark, prompt_version, num_fewshot)
        if not inputs.is_file():
            raise InputError(f"{inputs} is missing; put it back, or check with --sample 0")
        again = _decode_again(stored, checkpoint, inputs, device, run_dir / "drafters")
        checks += [compare_again(row, new) for row, new in zip(stored, again, strict=True)]
    return checks


def write_checks(run_dir: Path, name: str, checks: Sequence[Check]) -> Path:
    """Write ``checks/<name>.parquet`` whole or not at all, replacing an earlier file of that name."""
    checked_at = now()
    for folder in ("staging", "checks"):
        (run_dir / folder).mkdir(exist_ok=True)
    staged = partial_path(run_dir / "staging" / f"checks-{name}.parquet")
    write_table(str(staged), to_table(CHECKS, [check.to_row(checked_at) for check in checks]))
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    return staged.replace(run_dir / "checks" / f"{name}.parquet")


def sample_name(checks: Sequence[Check]) -> str:
    """The file name of a sample: the same keys give the same name."""
    return "recomputed-" + digest(sorted([check.cell_key, check.item_id, check.repeat] for check in checks))


def _decode_again(rows: list[Row], checkpoint: Path, inputs: Path, device: str, drafters: Path) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="dlmgrid-check-") as folder:
        source, target = Path(folder) / "in.parquet", Path(folder) / "out.parquet"
        write_table(str(source), to_table(GENERATIONS, rows))
        arguments = [
            str(source), str(target), "--checkpoint", str(checkpoint), "--inputs", str(inputs), "--device", device,
            "--drafters", str(drafters),
        ]  # fmt: skip
        run_worker_module("dlmgrid.workers.recompute", arguments, "decoding again")
        decoded = read_table([str(target)], GENERATIONS).to_pylist()
    by_key = {(row["cell_key"], row["item_id"], row["repeat"]): row for row in decoded}
    return [by_key[row["cell_key"], row["item_id"], row["repeat"]] for row in rows]
