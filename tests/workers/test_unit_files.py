"""Work units on disk: what is written reads back equal; anything else is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.unit_files import read_units, write_units
from dlmgrid.workers.units import Key, WorkUnit


def test_units_read_back_equal(tmp_path: Path) -> None:
    cell = Cell(model="m", benchmark="b", prompt_version="1", method="ssd", budget=6, temperature=0.7, threshold=0.9,
                decoder="threshold", block_length=32, gen_length=64)  # fmt: skip
    unit = WorkUnit(cell=cell, keys=(Key("a", 0), Key("b", 1)), checkpoint="/m", inputs="/i", output="/o",
                    reference_shards=("/r",))  # fmt: skip
    write_units(tmp_path / "units.json", [unit, unit])
    assert read_units(tmp_path / "units.json") == [unit, unit]
    assert read_units(tmp_path / "units.json")[0].unit_key == unit.unit_key


@pytest.mark.parametrize(
    "text", ["{", "{}1", '[{"cell": {}}]', '[{"cell": {"model": "m"}, "keys": [], "x": 1}]']
)
def test_other_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "units.json").write_text(text)
    with pytest.raises(InputError, match=r"units.json: not a list of work units"):
        read_units(tmp_path / "units.json")
    with pytest.raises(InputError, match="no such file; write it with `dlmgrid plan"):
        read_units(tmp_path / "none.json")
