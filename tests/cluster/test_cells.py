"""From a grid to its cells: references added, duplicates folded, names and lengths checked before any model loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.run import look_up
from dlmgrid.cluster.sources import Sources
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing.fake_catalog import write_fake_checkpoint


def test_every_accelerated_cell_has_its_reference_before_it_and_nothing_is_there_twice(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    grid = write_grid(temperatures=[0, 0, 1], methods=["ssd", "confidence_tree"], budgets=[0, 6, 6])
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    described = [(cell.temperature, cell.method, cell.budget) for cell in cells]
    assert described == [
        (temperature, method, budget)
        for temperature in (0.0, 1.0)
        for method, budget in (("none", 0), ("ssd", 6), ("confidence_tree", 6))
    ]
    keys = [cell.cell_key for cell in cells]
    for cell in cells:
        assert keys.index(cell.reference().cell_key) <= keys.index(cell.cell_key)
        assert cell == cell.canonical()


def test_repeats_and_limits_choose_keys_not_cells(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    small = make_works(write_grid(limit=2), tmp_path / "a")
    large = make_works(write_grid(repeats=3), tmp_path / "b")
    assert [work.cell for work in small] == [work.cell for work in large]
    assert [len(work.keys) for work in small] == [2] * 4
    assert [len(work.keys) for work in large] == [36] * 4


def test_the_longer_of_two_entries_of_one_benchmark_counts(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    grid = write_grid(
        benchmarks=[{"name": "letters", "limit": 2}, "letters", {"name": "letters", "gen_length": 64}]
    )
    assert [len(work.keys) for work in make_works(grid, tmp_path / "out")] == [12] * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["sdd"]}, r"^grid: methods\[0\]: method 'sdd' does not exist; did you mean 'ssd'?"),
        (
            {"benchmarks": ["letters", "leters"]},
            r"^grid: benchmarks\[1\]: benchmark 'leters' does not exist; did you mean 'letters'?",
        ),
        ({"models": ["nowhere"]}, r"^grid: models\[0\]: model 'nowhere' has no checkpoint"),
        (
            {"gen_length": 513},
            "gen_length 513 of benchmark 'letters' is more than the 512 positions of model",
        ),
        (
            {"benchmarks": [{"name": "letters", "num_fewshot": 1}]},
            "num_fewshot 1 is more than the 0 examples",
        ),
        ({"decoder": {"name": "static", "commits_per_step": 33}}, "33 is more than its block of 32 tokens"),
        (
            {"repeats": 10**14},
            r"the grid has at least 400,000,000,000,000 rows .*; one run takes 2,000,000, lower repeats",
        ),
        (
            {"repeats": 50_000},
            r"the grid has 2,400,000 rows \(4 cells, 50,000 repeats\); one run takes 2,000,000",
        ),
        (
            {"temperatures": [n / 1000 for n in range(1000)], "budgets": list(range(1, 1001))},
            "the grid has 1,001,000 cells; one run takes 10,000, split it",
        ),
    ],
)
def test_what_does_not_exist_or_fit_is_named(
    write_grid: Callable[..., Path], sources: Sources, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        look_up(read_grid(write_grid(**changes)).grid, sources, data=None, limit=None)


def test_a_chat_template_is_tried_before_anything_is_run(
    write_grid: Callable[..., Path], sources: Sources, checkpoint: Path
) -> None:
    grid = read_grid(write_grid(models=[str(checkpoint), {"path": str(checkpoint), "chat_template": "nope"}]))
    with pytest.raises(
        InputError, match=r"^g.yaml: models\[1\]: .*chat_template 'nope' is not one of chatml"
    ):
        look_up(grid.grid, sources, data=None, limit=None, origin="g.yaml")


def test_what_is_folded_or_has_no_effect_is_said(
    write_grid: Callable[..., Path], sources: Sources, checkpoint: Path
) -> None:
    def remarks(**changes: Any) -> list[str]:
        return look_up(read_grid(write_grid(**changes)).grid, sources, data=None, limit=None).remarks

    assert remarks() == []
    assert remarks(
        models=[str(checkpoint), str(checkpoint)],
        benchmarks=["letters", {"name": "letters", "limit": 3}],
        temperatures=[1, 1.0],
        methods=["ssd", "ssd"],
        budgets=[4, 4],
    ) == [
        f"models: {checkpoint} is given more than once; each cell is run once",
        "benchmarks: letters is given more than once; each cell is run once",
        "temperatures: 1 is given more than once; each cell is run once",
        "methods: ssd with budget 4 is given more than once; each cell is run once",
    ]
    assert remarks(methods=[{"name": "none", "budgets": [3]}, {"name": "ssd", "budgets": [0]}]) == [
        "methods: none drafts nothing; its budgets [3] are not used",
        "methods: ssd with budget 0 is the draft-free cell, which is run once",
    ]
    assert remarks(limit=13) == ["benchmark letters has 12 items; limit 13 takes them all"]
    (actors, cpus) = remarks(resources={"num_actors": 1000, "cpus_per_actor": 1024})
    assert actors.startswith("resources: num_actors 1000 is more than the 24 samples")
    assert cpus.startswith("resources: cpus_per_actor 1024 is more than the ")


def test_a_block_length_that_does_not_fit_and_missing_data_are_named(
    tmp_path: Path, write_grid: Callable[..., Path], sources: Sources
) -> None:
    model = write_fake_checkpoint(tmp_path / "other", block_length=32)
    grid = read_grid(write_grid(models=[{"path": str(model), "block_length": 7}])).grid
    with pytest.raises(InputError, match="block_length 7 does not fit"):
        look_up(grid, sources, data=None, limit=None)
    with pytest.raises(InputError, match=r"letters.jsonl is missing; put the benchmark's items there"):
        look_up(read_grid(write_grid()).grid, sources, data=str(tmp_path), limit=None)


def test_twice_the_same_item_id_is_bad_data(
    tmp_path: Path, write_grid: Callable[..., Path], sources: Sources, write_data: Any
) -> None:
    data = write_data(2, {})
    path = data / "letters.jsonl"
    path.write_text(path.read_text() * 2)
    with pytest.raises(InputError, match="gives an item id twice"):
        look_up(read_grid(write_grid()).grid, sources, data=str(data), limit=None)
