"""Which recorded runs a drafter may learn from: those of benchmarks marked ``calibration``, and no others.

The rule: every recorded generation names its benchmark; the benchmark must be in the catalog and marked as made for
calibration (``words_train``, ``functions_train``: problems of the training range, which the benchmarks ``words`` and
``functions`` never hold). A benchmark that is scored, or that this version does not know, is refused whole: there is
no list of items to get wrong, and no switch that lets test items in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlmgrid.workers.benchmarks.catalog import BENCHMARKS
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.trajectories.files import RecordedGeneration


class Recorded(Protocol):
    """A recorded run, as far as its origin goes: a trajectory, or a label."""

    @property
    def item_id(self) -> str: ...

    @property
    def temperature(self) -> float: ...

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of the draft-free cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A recorded run without its steps."""

    item_id: str
    temperature: float
    settings: dict[str, Any]


def labels_of(generations: Iterable[RecordedGeneration]) -> list[Label]:
    """The labels of recorded generations."""
    return [
        Label(item_id=found.key.item_id, temperature=found.cell.temperature, settings=found.cell.to_dict())
        for found in generations
    ]


def check_calibration(runs: Sequence[Recorded]) -> None:
    """Raises InputError when there are no runs, or when one is not of a calibration set."""
    allowed = [name for name, benchmark in BENCHMARKS.items() if benchmark.calibration]
    if not runs:
        raise InputError(f"nothing is recorded there; record a calibration set ({', '.join(allowed)}) first")
    for run in runs:
        name = run.settings["benchmark"]
        if name not in allowed:
            raise InputError(
                f"item {run.item_id!r} is of {name!r}, which is no calibration set: a drafter must not see what it "
                f"is tested on; record {' or '.join(allowed)} instead"
            )


def describe_calibration(runs: Sequence[Recorded]) -> dict[str, Any]:
    """What a file's card says of the runs: items of each benchmark, generations, model, decoder, temperatures."""
    items: dict[str, set[str]] = {}
    for run in runs:
        items.setdefault(run.settings["benchmark"], set()).add(run.item_id)
    return {
        "items": {name: len(ids) for name, ids in sorted(items.items())},
        "generations": len(runs),
        "models": sorted({run.settings["model"] for run in runs}),
        "weight_fingerprints": sorted({run.settings["weight_fingerprint"] for run in runs}),
        "decoders": sorted({run.settings["decoder"] for run in runs}),
        "temperatures": sorted({run.temperature for run in runs}),
    }
