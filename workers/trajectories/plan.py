"""What a replay is asked to do, as the driver hands it to the process that does it. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.units import Key


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayWork:
    """One canonical cell to replay on the recorded generations of ``keys``.

    ``checkpoint`` and ``inputs`` are the model's folder and the file of items for live decoding; "" where none is
    asked for. ``drafter_path`` is the file of the drafter's learned or calibrated part, "" where it has none;
    ``records`` what of the recording is needed beyond its steps.
    """

    cell: Cell
    keys: tuple[Key, ...]
    checkpoint: str = ""
    inputs: str = ""
    drafter_path: str = ""
    records: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """All cells of a replay. The first ``num_verified`` keys of each are decoded live as well; ``out`` receives
    one ``<cell_key>.parquet`` a cell; ``device`` computes the networks of drafters that have one."""

    trajectories: str
    out: str
    works: tuple[ReplayWork, ...]
    num_verified: int = 0
    device: str = "cpu"

    def write(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ReplayPlan:
        """Read what :meth:`write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        works = tuple(
            ReplayWork(
                **{
                    **work,
                    "cell": Cell.from_dict(work["cell"]),
                    "keys": tuple(Key(**key) for key in work["keys"]),
                    "records": tuple(work["records"]),
                }
            )
            for work in values["works"]
        )
        return cls(**{**values, "works": works})
