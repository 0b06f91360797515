"""Decode stored rows again, alone and from nothing: ``python -m dlmgrid.workers.recompute IN OUT …``.

IN is a Parquet file of ``generations`` rows of one checkpoint and one input file; OUT receives the same keys
decoded again, one sample at a time, in the order of IN, without verdicts. A row's own settings (drafter and
budget too) are used, so forwards and accepted counts can be compared as well as tokens, paths and bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dlmgrid.workers.cell import CELL_FIELDS, Cell
from dlmgrid.workers.drafting.drafter_file import stored_drafter
from dlmgrid.workers.errors import DlmgridError
from dlmgrid.workers.tables import GENERATIONS, read_table, to_table, write_table
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import Key, WorkUnit


def recompute_rows(
    rows: Sequence[Mapping[str, Any]],
    checkpoint: Path,
    inputs: Path,
    device: str = "cpu",
    drafters: Path | None = None,
) -> list[dict[str, Any]]:
    """Decode ``rows`` again, each alone; the new rows in the same order.

    ``drafters`` is the folder of the run's learned and calibrated drafters, needed where a row has one.

    Raises InputError for a checkpoint, an input file or a drafter that is not what the rows name.
    """
    runner = UnitRunner(device, actor="recompute")
    again: list[dict[str, Any]] = []
    for _, group in groupby(rows, key=lambda row: row["cell_key"]):
        of_cell = list(group)
        settings = {name: of_cell[0][name] for name in CELL_FIELDS} | {"seed": int(of_cell[0]["seed"])}
        cell = Cell.from_dict(settings)
        unit = WorkUnit(
            cell=cell,
            keys=tuple(Key(row["item_id"], row["repeat"]) for row in of_cell),
            checkpoint=str(checkpoint),
            inputs=str(inputs),
            output="",
            max_in_flight=1,
            device=device,
            attempt=2,
            drafter_path=stored_drafter(drafters or Path(), cell),
        )
        again.extend(runner.decode_rows(unit, max_in_flight=1))
    return again


def main() -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m dlmgrid.workers.recompute", description=__doc__)
    parser.add_argument("source", type=Path, metavar="IN")
    parser.add_argument("target", type=Path, metavar="OUT")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafters", type=Path)
    arguments = parser.parse_args()
    try:
        rows = read_table([str(arguments.source)], GENERATIONS).to_pylist()
        again = recompute_rows(
            rows, arguments.checkpoint, arguments.inputs, arguments.device, arguments.drafters
        )
    except DlmgridError as error:
        parser.exit(2, f"error: {error}\n")
    write_table(str(arguments.target), to_table(GENERATIONS, again))


if __name__ == "__main__":
    main()
