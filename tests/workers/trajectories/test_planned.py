"""What a recording was planned to hold is known beside what it holds, cells without any row included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.tiny_runs import tiny_cell
from dlmgrid.workers.trajectories.files import unrecorded_text
from dlmgrid.workers.trajectories.planned import FILE_NAME, PlannedCell, add_planned, read_planned
from dlmgrid.workers.units import Key


def keys(count: int, repeats: int = 1) -> list[Key]:
    return [Key(f"item-{index}", repeat) for index in range(count) for repeat in range(repeats)]


def test_plans_add_to_each_other(tmp_path: Path) -> None:
    assert read_planned(tmp_path) == {}
    cold, warm = tiny_cell(), tiny_cell(temperature=1.0)
    add_planned(tmp_path, {cold: keys(2), warm: keys(1, repeats=2)})
    add_planned(tmp_path, {cold: keys(1)})  # fewer items take nothing back
    add_planned(tmp_path, {warm: keys(3)})
    assert read_planned(tmp_path) == {
        cold.cell_key: PlannedCell(cell=cold, keys=frozenset(keys(2))),
        warm.cell_key: PlannedCell(cell=warm, keys=frozenset([*keys(3), Key("item-0", 1)])),
    }


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": {"repeats": {}, "cell": {"x": 1}}}', "\x00", '{"a']
)
def test_a_damaged_file_is_named_with_its_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(
        InputError, match=r"planned\.json is damaged .*; delete it and give dlmgrid plan --record"
    ):
        read_planned(tmp_path)


def test_a_planned_cell_without_any_recording_is_named(
    record_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    recording = record_tiny()
    out = tmp_path / "out"
    for folder in ("trajectories", "generations"):
        (out / folder).mkdir(parents=True)
    (out / "trajectories" / "unit.parquet").write_bytes(recording.path.read_bytes())
    pq.write_table(pq.read_table(recording.path, columns=["method"]), out / "generations" / "unit.parquet")
    cell, held = recording.cell(), [Key(f"item-{number}", 0) for number in (1, 8, 21)]
    add_planned(out, {cell: held})
    assert unrecorded_text(out) == ""
    other = tiny_cell(temperature=1.0, decoder="threshold", threshold=0.9)
    add_planned(out, {cell: [Key("item-9", 0), Key("item-9", 1)], other: keys(4)})
    text = unrecorded_text(out)
    assert "6 of 9 planned generations are not recorded" in text
    assert "at T = 1, threshold 0.9: none of 4" in text
    assert "2 of 5 missing, item-9, item-9/1" in text
