"""Decode planned work units in this process, without Ray: ``python -m dlmgrid.workers.offline UNITS …``.

For machines that have a device but no cluster (a batch queue, a borrowed GPU). UNITS is what ``dlmgrid plan GRID
--out DIR --units FILE`` wrote. Files land in ``DIR/staging``; the next ``dlmgrid run GRID --out DIR`` adopts them.
Units of ``dlmgrid plan … --record`` also write ``DIR/trajectories``, which can be replayed and learned from at once;
the next ``dlmgrid record`` adopts them.
Units that are already there are left alone, so an interrupted call goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import DlmgridError, InputError
from dlmgrid.workers.runtime import check_device
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import Key, UnitResult, WorkUnit


def read_units(path: Path) -> list[WorkUnit]:
    """The units of a file. Raises InputError naming the file when it is not one that ``plan`` wrote."""
    try:
        return [_unit(values) for values in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no such file; write one with dlmgrid plan GRID --out DIR --units {path}"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: not a file of work units ({error}); write it with dlmgrid plan --units"
        ) from error


def _unit(values: dict[str, Any]) -> WorkUnit:
    return WorkUnit(
        **{
            **values,
            "cell": Cell.from_dict(values["cell"]),
            "keys": tuple(Key(**key) for key in values["keys"]),
            "reference_shards": tuple(values["reference_shards"]),
        }
    )


def part_of(units: Sequence[WorkUnit], number: int, count: int) -> list[WorkUnit]:
    """Part ``number`` (from 1) of ``count``: a unit is in the part of the unit that its rows are compared with."""
    number_of: dict[str, int] = {}
    for unit in units:
        if not unit.reference_shards:
            number_of[unit.output] = len(number_of)
    return [
        unit
        for index, unit in enumerate(units)
        if number_of.get(unit.reference_shards[-1] if unit.reference_shards else unit.output, index) % count
        == number - 1
    ]


def rebase(unit: WorkUnit, out: Path | None, checkpoint: Path | None, device: str | None) -> WorkUnit:
    """The unit with its output folder, checkpoint and device as they are on this machine."""
    planned = Path(unit.output).parent.parent

    def move(path: str) -> str:
        return path if out is None else str(out / Path(path).relative_to(planned))

    return replace(
        unit,
        output=move(unit.output),
        inputs=move(unit.inputs),
        reference_shards=tuple(move(shard) for shard in unit.reference_shards),
        trajectories=move(unit.trajectories) if unit.trajectories else "",
        checkpoint=unit.checkpoint if checkpoint is None else str(checkpoint),
        device=unit.device if device is None else device,
        drafter_path=move(unit.drafter_path) if unit.drafter_path else "",
    )


def decode_units(
    path: Path,
    *,
    out: Path | None = None,
    checkpoint: Path | None = None,
    device: str | None = None,
    num_compared: int | None = None,
    part: tuple[int, int] = (1, 1),
    say: Callable[[str], None] = print,
) -> int:
    """Decode every unit of ``path`` that has no file yet; returns how many rows hold an error.

    ``num_compared`` keys of each draft-free unit are compared with their serialized run, all for None.
    ``part`` (i, n) is the i-th of n disjoint parts, so that n processes share a file of units and a device.

    Raises InputError for a file that is not one of units, and what :meth:`UnitRunner.run` raises.
    """
    units = [
        replace(rebase(unit, out, checkpoint, device), num_compared=num_compared)
        for unit in part_of(read_units(path), *part)
    ]
    for name in sorted({unit.device for unit in units}):
        check_device(name)
    runners: dict[str, UnitRunner] = {}
    num_errors = 0
    for number, unit in enumerate(units, 1):
        cell = unit.cell.canonical()
        name = f"{cell.benchmark} {cell.method} D={cell.budget} T={cell.temperature:g}"
        if Path(unit.output).exists():
            say(f"{number}/{len(units)} {name}: already decoded")
            continue
        Path(unit.output).parent.mkdir(parents=True, exist_ok=True)
        runner = runners.setdefault(unit.device, UnitRunner(unit.device, actor="offline"))
        result = runner.run(unit)
        num_errors += result.num_errors
        say(f"{number}/{len(units)} {name}: {_summary(result)}")
    return num_errors


def _summary(result: UnitResult) -> str:
    rate = result.num_tokens / result.seconds
    return (
        f"{result.num_rows} rows, {result.num_errors} errors, {result.num_inexact} not exact, {result.num_tokens} "
        f"tokens in {result.seconds:.1f} s ({rate:.1f} tokens/s with the check)"
    )


def main() -> int:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m dlmgrid.workers.offline", description=__doc__)
    parser.add_argument("units", type=Path)
    parser.add_argument("--out", type=Path, help="where the planned output folder is on this machine")
    parser.add_argument("--checkpoint", type=Path, help="where the model's folder is on this machine")
    parser.add_argument("--device", help="cpu or a CUDA device, instead of the planned one")
    parser.add_argument(
        "--compare", type=int, metavar="N", help="compare only the first N rows of each draft-free unit with their "
        "serialized run; the others are stored unchecked"
    )  # fmt: skip
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="decode the I-th of N disjoint parts only"
    )
    arguments = parser.parse_args()
    number, _, count = arguments.part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        parser.exit(2, f"error: --part {arguments.part}: give I/N with 1 <= I <= N, as 2/4\n")
    if arguments.compare is not None and arguments.compare < 0:
        parser.exit(2, f"error: --compare {arguments.compare}: give 0 or more\n")
    try:
        num_errors = decode_units(
            arguments.units,
            out=arguments.out,
            checkpoint=arguments.checkpoint,
            device=arguments.device,
            num_compared=arguments.compare,
            part=(int(number), int(count)),
        )
    except DlmgridError as error:
        parser.exit(2, f"error: {error}\n")
    return 1 if num_errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
