"""The output folder: commits, crashes between their steps, readers, speed."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from dlmgrid.cluster.cells import CellWork
from dlmgrid.cluster.plan import UnitSettings, plan_chains
from dlmgrid.cluster.store import Store, load
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.shard import RejectedShardError, read_shard
from dlmgrid.workers.tables import GENERATIONS, SCHEMA_VERSION, write_table
from dlmgrid.workers.testing.fake_catalog import write_fake_checkpoint

SETTINGS = UnitSettings(run_id="r", device="cpu", items_per_unit=4)


@pytest.fixture
def works(tmp_path: Path, write_grid: Callable[..., Path], make_works: Any) -> list[CellWork]:
    made: list[CellWork] = make_works(write_grid(temperatures=[0, 0.7]), tmp_path / "out")
    return made


@pytest.fixture
def store(tmp_path: Path, works: list[CellWork]) -> Store:
    return Store(tmp_path / "out")


def reopened(store: Store) -> Store:
    again = Store(store.out)
    again.load(repair=True, say=lambda _: None)
    again.recover(say=lambda _: None)
    return again


def num_missing(store: Store, works: list[CellWork]) -> int:
    return sum(len(store.missing(work.cell.cell_key, work.keys)) for work in works)


def test_a_reopened_store_knows_what_was_committed(
    store: Store, works: list[CellWork], run_units: Any
) -> None:
    run_units(store, plan_chains(works, store, SETTINGS), limit=5)
    again = reopened(store)
    assert {shard.unit_key: shard for shard in again.shards} == {
        shard.unit_key: shard for shard in store.shards
    }
    assert num_missing(again, works) == 48 - 5 * 4


def test_a_file_that_is_not_what_the_actor_reported_is_refused(
    store: Store, works: list[CellWork], run_units: Any
) -> None:
    (unit, result), (other, other_result), (third, third_result) = run_units(
        store,
        plan_chains(works, store, SETTINGS)[:1] + plan_chains(works, store, SETTINGS)[3:4],
        commit=False,
        limit=3,
    )
    rejected = store.commit([(unit, replace(result, sha256="0" * 64)), (other, other_result)])
    assert "not the one the actor wrote" in str(rejected.pop(unit.unit_key))
    assert not rejected
    Path(third.output).write_bytes(Path(third.output).read_bytes()[:-10])
    assert "not a whole Parquet file" in str(store.commit([(third, third_result)])[third.unit_key])
    Path(third.output).unlink()
    assert "is not there" in str(store.commit([(third, third_result)])[third.unit_key])
    assert len(list(store.shards)) == 1


def test_a_crash_after_the_rename_is_mended_by_adopting_the_file(
    store: Store, works: list[CellWork], run_units: Any, stored_rows: Any
) -> None:
    run_units(store, plan_chains(works, store, SETTINGS), limit=4)
    rows = stored_rows(store.out)
    manifest = store.out / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    again = reopened(store)
    assert manifest.read_bytes().startswith(b"".join(lines[:-1]))
    assert len(list(again.shards)) == 4
    assert stored_rows(store.out) == rows
    assert len(list(reopened(store).shards)) == 4


def test_a_finished_file_in_staging_is_adopted_and_everything_else_there_is_removed(
    store: Store, works: list[CellWork], run_units: Any
) -> None:
    chains = plan_chains(works, store, SETTINGS)
    (unit, _), (torn, _) = run_units(store, [chains[0], chains[3]], commit=False, limit=2)
    Path(torn.output).write_bytes(Path(torn.output).read_bytes()[:100])
    (store.staging / "half.parquet.part").write_bytes(b"PAR1")
    again = reopened(store)
    assert [shard.unit_key for shard in again.shards] == [unit.unit_key]
    assert list(store.staging.iterdir()) == []
    run_units(store, [chains[0]], commit=False, limit=1)
    assert [shard.unit_key for shard in reopened(store).shards] == [unit.unit_key]
    assert list(store.staging.iterdir()) == []


def test_a_lost_or_cut_file_is_planned_again_and_the_others_stay(
    store: Store, works: list[CellWork], run_units: Any, stored_rows: Any
) -> None:
    run_units(store, plan_chains(works, store, SETTINGS))
    rows = stored_rows(store.out)
    lost, cut = [store.path_of(shard.unit_key) for shard in store.shards][:2]
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    again = reopened(store)
    assert num_missing(again, works) == 8
    run_units(again, plan_chains(works, again, SETTINGS))
    assert stored_rows(store.out) == rows
    assert num_missing(reopened(store), works) == 0


def test_a_changed_file_of_the_same_size_is_put_aside_and_never_adopted(
    store: Store, works: list[CellWork], run_units: Any, stored_rows: Any
) -> None:
    run_units(store, plan_chains(works, store, SETTINGS), limit=3)
    path = store.path_of(next(iter(store.shards)).unit_key)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(InputError, match=rf"{path.name} has sha256"):
        stored_rows(store.out)
    planned, said = Store(store.out), list[str]()
    planned.load(repair=False, say=said.append)
    assert num_missing(planned, works) == 48 - 2 * 4
    assert f"generations/{path.name} has sha256" in said[0]
    assert num_missing(reopened(store), works) == 48 - 2 * 4
    assert [kept.name for kept in (store.out / "damaged").iterdir()] == [path.name]


def test_files_that_the_manifest_does_not_name_are_mentioned_by_a_plan(
    store: Store, works: list[CellWork], run_units: Any
) -> None:
    run_units(store, plan_chains(works, store, SETTINGS), limit=2)
    (store.out / "manifest.jsonl").unlink()
    said: list[str] = []
    Store(store.out).load(repair=False, say=said.append)
    assert said == ["2 files in generations/ are not in manifest.jsonl; run adopts those that are whole"]


def test_inputs_that_are_gone_are_written_again_and_changed_ones_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create()
    items = [Item(item_id="a", prompt="1"), Item(item_id="b", prompt="2")]
    store.write_inputs("x.jsonl", items)
    path = store.inputs / "x.jsonl"
    written = path.read_bytes()
    path.unlink()
    said: list[str] = []
    again = Store(tmp_path)
    again.load(repair=True, say=said.append)
    assert "inputs/x.jsonl is missing" in said[0]
    with pytest.raises(InputError, match="the data source does not give it again"):
        again.write_inputs("x.jsonl", items[:1])
    again.write_inputs("x.jsonl", items)
    assert path.read_bytes() == written
    path.write_bytes(written + b"torn")
    again.write_inputs("x.jsonl", items)
    assert path.read_bytes() == written


def test_without_its_manifest_a_folder_is_read_again_from_its_files(
    store: Store, works: list[CellWork], run_units: Any, stored_rows: Any
) -> None:
    run_units(store, plan_chains(works, store, SETTINGS))
    rows = stored_rows(store.out)
    (store.out / "manifest.jsonl").unlink()
    again = reopened(store)
    assert num_missing(again, works) == 0
    assert stored_rows(store.out) == rows


def test_failed_rows_can_be_dropped_to_run_again_and_good_ones_stay(
    tmp_path: Path,
    write_grid: Callable[..., Path],
    write_data: Any,
    make_works: Any,
    run_units: Any,
    stored_rows: Any,
) -> None:
    store = Store(tmp_path / "failing")
    data = write_data(8, {number: {"prompt_fits": False} for number in (1, 4, 5, 6, 7)})
    works = make_works(write_grid(temperatures=[0], methods=["none"]), store.out, data)
    run_units(store, plan_chains(works, store, SETTINGS))
    rows = stored_rows(store.out)
    assert store.drop_failed({"of another cell"}) == 0
    assert store.drop_failed({works[0].cell.cell_key}) == 5
    assert [row["item_id"] for row in stored_rows(store.out)] == ["letters-0", "letters-2", "letters-3"]
    again = reopened(store)
    assert {path.stem for path in store.generations.iterdir()} == {shard.unit_key for shard in again.shards}
    assert num_missing(again, works) == 5
    run_units(again, plan_chains(works, again, SETTINGS))
    assert stored_rows(store.out) == rows


def test_damage_in_the_middle_of_the_manifest_and_another_version_are_named(
    store: Store, works: list[CellWork], run_units: Any
) -> None:
    run_units(store, plan_chains(works, store, SETTINGS), limit=2)
    manifest = store.out / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("{broken\n" + lines[1])
    with pytest.raises(InputError, match=r"manifest.jsonl:1: damaged .* they are adopted"):
        Store(store.out).load(repair=True)
    manifest.write_text(json.dumps({**json.loads(lines[0]), "schema_version": 0}) + "\n")
    with pytest.raises(InputError, match=rf"schema version 0, this is {SCHEMA_VERSION}; use a new --out"):
        Store(store.out).load(repair=True)


def test_a_file_of_two_cells_or_with_a_key_twice_is_refused(
    store: Store, works: list[CellWork], run_units: Any
) -> None:
    chains = plan_chains(works, store, SETTINGS)
    finished = run_units(store, [chains[0], chains[3]], limit=3)
    paths = [str(store.path_of(unit.unit_key)) for unit, _ in finished]
    tables = [pa.parquet.read_table(path, schema=GENERATIONS) for path in paths]
    mixed = store.staging / "mixed.parquet"
    for pair in ([tables[0], tables[1]], [tables[0], tables[0]]):
        write_table(str(mixed), pa.concat_tables(pair))
        with pytest.raises(RejectedShardError, match="distinct keys of one cell"):
            read_shard(mixed)
    write_table(str(mixed), tables[0].drop_columns(["text"]))
    with pytest.raises(RejectedShardError, match="another schema"):
        read_shard(mixed)


def test_items_are_added_to_their_file_and_never_changed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create()
    first = [Item(item_id="a", prompt="1"), Item(item_id="b", prompt="2")]
    store.write_inputs("x.jsonl", first[:1])
    store.write_inputs("x.jsonl", first)
    written = (store.inputs / "x.jsonl").read_text()
    store.write_inputs("x.jsonl", first[:1])
    assert (store.inputs / "x.jsonl").read_text() == written
    assert len(written.splitlines()) == 2
    with pytest.raises(InputError, match=r"item 'b' of x\.jsonl is not the one"):
        store.write_inputs("x.jsonl", [Item(item_id="b", prompt="3")])


def test_every_reader_sees_the_same_values_and_types(
    tmp_path: Path,
    run_units: Any,
    write_grid: Callable[..., Path],
    make_works: Any,
    write_data: Any,
) -> None:
    """One shard is all errors (null columns throughout), another all rows; model names look like numbers."""
    data = write_data(8, {number: {"prompt_fits": False} for number in range(4)})
    model = write_fake_checkpoint(tmp_path / "0123")
    store = Store(tmp_path / "readers")
    works = make_works(write_grid(temperatures=[0.7], models=[str(model)]), store.out, data)
    run_units(store, plan_chains(works, store, SETTINGS))
    pattern = str(store.generations / "*.parquet")
    columns = ["item_id", "method", "temperature", "temperature_text", "seed", "token_ids", "text", "exact_bits",
               "budget", "threshold", "error"]  # fmt: skip
    order = ["method", "item_id"]

    arrow = ds.dataset(store.generations).to_table(columns=columns)
    assert arrow.schema.remove_metadata() == pa.schema(
        [GENERATIONS.field(name).remove_metadata() for name in columns]
    )
    expected = sorted(arrow.to_pylist(), key=lambda row: [row[name] for name in order])
    assert {row["token_ids"] is None for row in expected} == {True, False}
    assert {row["temperature_text"] for row in expected} == {"0.7"}

    polars = pl.read_parquet(pattern).select(columns).sort(order)
    assert polars.to_dicts() == expected
    relation = duckdb.sql(f"select {', '.join(columns)} from '{pattern}' order by {', '.join(order)}")
    assert [dict(zip(columns, row, strict=True)) for row in relation.fetchall()] == expected
    types = dict(zip(columns, map(str, relation.types), strict=True))
    assert (types["seed"], types["token_ids"], types["exact_bits"]) == ("VARCHAR", "INTEGER[]", "BOOLEAN")
    assert types["threshold"] == "DOUBLE"
    frame = pd.read_parquet(store.generations, columns=columns, dtype_backend="pyarrow").sort_values(order)
    assert frame["text"].tolist()[-1] == expected[-1]["text"]
    assert [None if value is pd.NA else value for value in frame["exact_bits"]] == [
        row["exact_bits"] for row in expected
    ]
    assert load(store.out).table.num_rows == len(expected)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the output folder of a run"):
        load(tmp_path)


def test_commits_keep_up_with_200_units_a_second_in_flat_memory(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any, run_units: Any, monkeypatch: Any
) -> None:
    """Units of no work, planned and committed in batches of four, as a driver of two actors would. Processor time
    is counted, so that a busy machine does not matter, and syncs apart from it."""
    grid = write_grid(benchmarks=[{"name": "many", "limit": 200}], temperatures=[0], methods=["none"])
    works = make_works(grid, tmp_path / "out")
    store = Store(tmp_path / "out")
    start = time.process_time()
    chains = plan_chains(works, store, UnitSettings(run_id="r", device="cpu", items_per_unit=1))
    seconds = time.process_time() - start
    finished = run_units(store, chains, commit=False)
    syncs: list[int] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor, sync=os.fsync: (syncs.append(descriptor), sync(descriptor))
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    for index in range(0, len(finished), 4):
        assert store.commit(finished[index : index + 4]) == {}
    seconds += time.process_time() - start
    growth_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(finished) == 200
    assert len(finished) / seconds > 200, f"{len(finished) / seconds:.0f} units/s"
    assert len(syncs) <= 2 * 50 + 1
    assert growth_kilobytes < 20_000
