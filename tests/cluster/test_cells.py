"""From a grid to its cells: references added, duplicates folded, names and lengths checked before any model loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.cost import forwards_per_row
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


def test_fused_cells_are_compared_with_the_draft_free_cell_whose_passes_are_not_fused(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    fused = {"name": "factor", "factor": 1.0, "fused_commit": True}
    grid = write_grid(temperatures=[0], decoder=[fused, {"name": "factor", "factor": 1.0}])
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    assert [(cell.method, cell.fused_commit, cell.is_reference) for cell in cells] == [
        ("none", False, True), ("none", True, False), ("ssd", True, False), ("ssd", False, False),
    ]  # fmt: skip
    assert {cell.reference().cell_key for cell in cells} == {cells[0].cell_key}
    assert {cell.claim for cell in cells} == {"exact"}
    assert {(cell.decoder, cell.factor, cell.comparison) for cell in cells} == {("factor", 1.0, None)}
    assert forwards_per_row(cells[1]) < forwards_per_row(cells[3])


def test_the_comparison_of_a_threshold_is_part_of_its_cells(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    decoders = [
        {"name": "threshold", "threshold": 0.9, **comparison}
        for comparison in ({}, {"comparison": "sdar"}, {"comparison": "fast_dllm"})
    ]
    grid = write_grid(temperatures=[0], methods=["none"], decoder=decoders)
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    assert [cell.comparison for cell in cells] == ["sdar", "fast_dllm"]
    assert len({cell.cell_key for cell in cells}) == 2


def test_greedy_match_promises_nothing_above_temperature_0(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    grid = write_grid(temperatures=[0, 1.5], methods=["ssd"], verification="greedy_match")
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    assert [(c.temperature, c.method, c.verification, c.claim) for c in cells] == [
        (0.0, "none", "coupled", "exact"),
        (0.0, "ssd", "coupled", "exact"),
        (1.5, "none", "coupled", "exact"),
        (1.5, "ssd", "greedy_match", "approximate"),
    ]


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
        ({"methods": ["sdd"]}, "method 'sdd' does not exist; did you mean 'ssd'?"),
        ({"benchmarks": ["leters"]}, "benchmark 'leters' does not exist; did you mean 'letters'?"),
        ({"models": ["nowhere"]}, "model 'nowhere' has no checkpoint"),
        (
            {"gen_length": 513},
            "gen_length 513 of benchmark 'letters' is more than the 512 positions of model",
        ),
        (
            {"benchmarks": [{"name": "letters", "num_fewshot": 1}]},
            "num_fewshot 1 is more than the 0 examples",
        ),
        ({"decoder": {"name": "static", "commits_per_step": 33}}, "33 is more than its block of 32 tokens"),
    ],
)
def test_what_does_not_exist_or_fit_is_named(
    write_grid: Callable[..., Path], sources: Sources, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        look_up(read_grid(write_grid(**changes)).grid, sources, data=None, limit=None)


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
