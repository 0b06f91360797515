"""Planning: stable chunks, references first, only what is missing, fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlmgrid.cluster.cells import CellWork
from dlmgrid.cluster.plan import MAX_ITEMS_PER_UNIT, UnitSettings, plan_chains, split_unit, unit_size
from dlmgrid.cluster.store import Store
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.units import Key

SETTINGS = UnitSettings(run_id="r", device="cpu", items_per_unit=4)


def works(num_items: int, seeds: int = 1) -> list[CellWork]:
    keys = tuple(Key(f"item-{number}", 0) for number in range(num_items))
    cells = [
        Cell(
            model="m", benchmark="b", prompt_version="1", method=method, budget=budget, temperature=1.0,
            seed=seed, block_length=32, gen_length=64,
        )
        for seed in range(seeds)
        for method, budget in (("none", 0), ("ssd", 6), ("confidence_tree", 6), ("ssd", 12))
    ]  # fmt: skip
    return [CellWork(cell=cell, checkpoint="/m", inputs="/i", keys=keys) for cell in cells]


def test_a_chain_holds_one_chunk_of_every_cell_reference_first() -> None:
    chains = plan_chains(works(10), None, SETTINGS)
    assert [len(chain.units) for chain in chains] == [4, 4, 4]
    for chain in chains:
        assert chain.reference is not None
        assert chain.units[0].cell.is_reference
        assert {unit.keys for unit in chain.units} == {chain.reference.keys}
    planned = [(unit.cell.cell_key, key) for chain in chains for unit in chain.units for key in unit.keys]
    assert len(planned) == len(set(planned)) == 40


def test_the_same_units_are_planned_again_for_what_is_missing(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any, run_units: Any
) -> None:
    store = Store(tmp_path)
    cells = make_works(write_grid(), tmp_path)
    first = [unit.unit_key for chain in plan_chains(cells, store, SETTINGS) for unit in chain.units]
    run_units(store, plan_chains(cells, store, SETTINGS), limit=3)
    rest = plan_chains(cells, store, SETTINGS)
    assert [unit.unit_key for chain in rest for unit in chain.units] == first[3:]
    assert rest[0].reference is None
    assert len(rest[0].dependents) == 1
    run_units(store, rest)
    assert plan_chains(cells, store, SETTINGS) == []


def test_every_unit_says_where_trees_grow() -> None:
    for settings in (SETTINGS, replace(SETTINGS, drafts="device")):
        found = [unit.drafts for chain in plan_chains(works(3), None, settings) for unit in chain.units]
        assert found == [settings.drafts] * 4


def test_units_hold_tens_of_items_but_every_actor_has_work() -> None:
    assert unit_size(10_000, 8) == MAX_ITEMS_PER_UNIT
    assert unit_size(64, 2) == 16
    assert unit_size(3, 8) == 1


def test_splitting_keeps_every_key_and_counts_the_attempt() -> None:
    unit = plan_chains(works(3), None, SETTINGS)[0].units[0]
    parts = split_unit(replace(unit, attempt=2))
    assert [part.keys for part in parts] == [(key,) for key in unit.keys]
    assert {part.attempt for part in parts} == {3}


def test_ten_thousand_units_are_planned_in_five_seconds() -> None:
    cells = works(2_500 * 4, seeds=1)
    start = time.perf_counter()
    chains = plan_chains(cells, None, SETTINGS)
    unit_keys = {unit.unit_key for chain in chains for unit in chain.units}
    seconds = time.perf_counter() - start
    assert len(unit_keys) == 10_000
    assert seconds < 5
