"""Decode planned work units in this process, without Ray: ``python -m dlmgrid.workers.offline UNITS …``.

For machines that have a device but no cluster (a batch queue, a borrowed GPU). UNITS is what ``dlmgrid plan GRID
--out DIR --units FILE`` wrote. Files land in ``DIR/staging``; the next ``dlmgrid run GRID --out DIR`` adopts them.
Units of ``dlmgrid plan … --record`` also write ``DIR/trajectories``, which can be replayed and learned from at once;
the next ``dlmgrid record`` adopts them.
Units whose files are already there, whole, are left alone, so an interrupted call goes on where it stopped. A second
process on the same units is refused, and so is a run of the folder meanwhile.

Exit codes: 0 done, 1 rows hold an error, 2 bad input, 4 rows that must equal their serialized run do not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dlmgrid.workers.drafting.catalog import get_method
from dlmgrid.workers.errors import DlmgridError, InputError, TransientError
from dlmgrid.workers.run_folder import read_manifest
from dlmgrid.workers.runtime import check_device
from dlmgrid.workers.shard import RejectedShardError, Shard, read_shard
from dlmgrid.workers.staging_lock import decoding_units
from dlmgrid.workers.trajectories.files import is_recorded
from dlmgrid.workers.unit_file import read_units
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import Key, UnitResult, WorkUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """What the files of decoded units hold: rows with an error, and rows that differ from their serialized run."""

    num_errors: int
    num_inexact: int

    @property
    def exit_code(self) -> int:
        """4 where a row is not exact, 1 where one holds an error, 0 otherwise: the codes of ``dlmgrid run``."""
        return 4 if self.num_inexact else 1 if self.num_errors else 0


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
    """The unit with its output folder, checkpoint and device as they are on this machine.

    Raises InputError where its settings do not work there, or its files lie outside the planned folder.
    """
    planned = folder_of(unit)

    def move(path: str) -> str:
        if out is None or not path:
            return path
        if not Path(path).is_relative_to(planned):
            raise InputError(f"{path} lies outside the planned folder {planned}; plan the units again")
        return str(out / Path(path).relative_to(planned))

    moved = replace(
        unit,
        output=move(unit.output),
        inputs=move(unit.inputs),
        reference_shards=tuple(move(shard) for shard in unit.reference_shards),
        trajectories=move(unit.trajectories),
        checkpoint=unit.checkpoint if checkpoint is None else str(checkpoint),
        device=unit.device if device is None else device,
        drafter_path=move(unit.drafter_path),
    )
    cell = moved.cell
    if moved.device.startswith("cuda") and cell.numerics == "exact" and cell.kernels == "torch":
        raise InputError(
            f"device {moved.device}: numerics: exact on a GPU needs kernels: triton (the torch twins fix their bits on "
            "the CPU only); plan with kernels: triton, or with numerics: fast"
        )
    return moved


def folder_of(unit: WorkUnit) -> Path:
    """The output folder that a unit was planned for."""
    return Path(unit.output).parent.parent


def decode_units(
    path: Path,
    *,
    out: Path | None = None,
    checkpoint: Path | None = None,
    device: str | None = None,
    num_compared: int | None = None,
    part: tuple[int, int] = (1, 1),
    say: Callable[[str], None] = print,
) -> Decoded:
    """Decode every unit of ``path`` that has no whole file yet; returns what the files of all of them hold.

    ``num_compared`` keys of each draft-free unit are compared with their serialized run, all for None.
    ``part`` (i, n) is the i-th of n disjoint parts, so that n processes share a file of units and a device.

    Raises InputError for a file that is not one of units, for a planned folder that is not there, and while a run or
    another process works on these units; TransientError where the device or torch fails; and what
    :meth:`UnitRunner.run` raises.
    """
    planned = read_units(path)
    chosen = part_of(planned, *part)
    if not chosen:
        where = (
            f"part {part[0]}/{part[1]} holds none of its {len(planned)} units"
            if planned
            else "no units in it"
        )
        say(f"{path}: {where}")
        return Decoded(num_errors=0, num_inexact=0)
    if checkpoint is not None and len(models := sorted({unit.checkpoint for unit in planned})) > 1:
        raise InputError(
            f"--checkpoint is one folder, and {path} is of {len(models)} models; plan them apart"
        )
    units = [replace(rebase(unit, out, checkpoint, device), num_compared=num_compared) for unit in chosen]
    for unit in units:
        get_method(unit.cell.method)
    for name in sorted({unit.device for unit in units}):
        check_device(name)
    by_folder: dict[Path, list[WorkUnit]] = {}
    for unit in units:
        by_folder.setdefault(folder_of(unit), []).append(unit)
    with ExitStack() as locks:
        for folder, own in by_folder.items():
            if not folder.is_dir():
                raise InputError(
                    f"{folder}: the folder that the units were planned for is not there; bring it here and give its "
                    "place with --out"
                )
            locks.enter_context(decoding_units(folder, own))
            _refuse_other_units(folder, own, path)
            try:
                (folder / "staging").mkdir(exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"{folder} cannot be written ({error.strerror}); choose another --out"
                ) from error
        return _decode(units, say)


def _refuse_other_units(folder: Path, units: Sequence[WorkUnit], path: Path) -> None:
    """Raises InputError where rows of ``units``, read from ``path``, are decoded already in units of another plan."""
    todo = [unit for unit in units if stored_shard(unit) is None]
    if not todo:
        return
    whole = list(read_manifest(folder).shards.values())
    for file in sorted((folder / "staging").glob("*.parquet")):
        with suppress(RejectedShardError):
            whole.append(read_shard(file, sync=False))
    decoded: dict[tuple[str, Key], str] = {
        (shard.cell_key, key): shard.unit_key for shard in whole for key in shard.keys
    }
    twice = 0
    for unit in todo:
        records = Path(unit.trajectories) if unit.trajectories else None
        for key in unit.keys:
            other = decoded.get((unit.cell.cell_key, key))
            if other is not None and other != unit.unit_key:
                twice += records is None or is_recorded(records / f"{other}.parquet", unit.records)
    if twice:
        raise InputError(
            f"{path}: {twice} rows of its units are decoded in {folder} already, in units of another plan; give the "
            "command dlmgrid plan again, which leaves them out"
        )


def _decode(units: Sequence[WorkUnit], say: Callable[[str], None]) -> Decoded:
    # One thread, as an actor has it: several beside busy processes wait for one another.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    runners: dict[str, UnitRunner] = {}
    num_errors = num_inexact = 0
    for number, unit in enumerate(units, 1):
        cell = unit.cell.canonical()
        label = f"{number}/{len(units)} {cell.benchmark} {cell.method} D={cell.budget} T={cell.temperature:g}"
        shard = stored_shard(unit)
        if shard is not None:
            errors, inexact = len(shard.failed), len(shard.inexact) if cell.keeps_to_reference else 0
            say(f"{label}: already decoded, {errors} errors, {inexact} not exact")
        else:
            runner = runners.setdefault(unit.device, UnitRunner(unit.device, actor="offline"))
            shards = tuple(_present(unit, shard) for shard in unit.reference_shards)
            result = _run(runner, replace(unit, reference_shards=shards), label)
            errors, inexact = result.num_errors, result.num_inexact
            say(f"{label}: {_summary(result)}")
        num_errors += errors
        num_inexact += inexact
    return Decoded(num_errors=num_errors, num_inexact=num_inexact)


def stored_shard(unit: WorkUnit) -> Shard | None:
    """What the unit's file holds, staged or adopted by a run since; None where it is not whole, is of another unit, or
    lacks the trajectories that the unit asks for."""
    adopted = folder_of(unit) / "generations" / f"{unit.unit_key}.parquet"
    for path in (Path(unit.output), adopted):
        try:
            shard = read_shard(path, sync=False)
        except RejectedShardError:
            continue
        recorded = Path(unit.trajectories) / f"{unit.unit_key}.parquet"
        needs_record = unit.trajectories and len(shard.failed) < len(shard.keys)
        if shard.unit_key == unit.unit_key and (not needs_record or is_recorded(recorded, unit.records)):
            return shard
    return None


def _present(unit: WorkUnit, shard: str) -> str:
    """A file of reference rows where it is now: a run moves it from staging/ to generations/."""
    adopted = folder_of(unit) / "generations" / Path(shard).name
    return str(adopted) if not Path(shard).exists() and adopted.exists() else shard


def _run(runner: UnitRunner, unit: WorkUnit, label: str) -> UnitResult:
    try:
        return runner.run(unit)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise InputError(
            f"{label}: {place}{error.strerror or error}; mend it, then give the command again"
        ) from error
    except RuntimeError as error:  # torch's errors, an exhausted device among them
        text = " ".join(str(error).split())[:500]
        raise TransientError(f"{label}: {type(error).__name__}: {text}; give the command again") from error


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
        decoded = decode_units(
            arguments.units,
            out=arguments.out,
            checkpoint=arguments.checkpoint,
            device=arguments.device,
            num_compared=arguments.compare,
            part=(int(number), int(count)),
        )
    except (DlmgridError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    return decoded.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
