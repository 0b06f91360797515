"""Families through a grid: published rules, caches, refusals before a model loads, and rows that hold together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from dlmgrid.cluster.cells import find_models, load_questions, make_cells
from dlmgrid.cluster.cost import forwards_per_row
from dlmgrid.cluster.grid import parse_grid
from dlmgrid.cluster.grid_remarks import grid_remarks
from dlmgrid.cluster.row_faults import own_faults
from dlmgrid.cluster.sources import installed_sources
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, write_items
from dlmgrid.workers.models.families import FAMILIES
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import Key, WorkUnit

AUTOREGRESSIVE = {"name": "published", "variant": "causal"}
NAMES = ("sdar", "llada2", "fast_dllm_v2", "nemotron")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in NAMES:
        made[family] = tmp_path_factory.mktemp(family)
        write_random_checkpoint(made[family], tiny_family_config(family, block_length=8), scale=0.3)
    return made


def cells_of(folder: Path, **settings: Any) -> list[Cell]:
    model = {"path": str(folder), **settings.pop("model", {})}
    values = {
        "name": "families", "models": [model], "benchmarks": [{"name": "words", "limit": 1, "gen_length": 8}],
        "temperatures": [0.7], "methods": ["none"], "budgets": [4],
    }  # fmt: skip
    grid = parse_grid(yaml.safe_dump(values | settings), "grid")
    sources = installed_sources()
    models = find_models(grid, sources)
    questions = load_questions(grid, sources, None, None)
    works = make_cells(grid, models, questions, {str(folder): "f" * 24}, Path("inputs"))
    return [work.cell for work in works]


@pytest.mark.parametrize("family", NAMES)
def test_a_grid_that_names_no_decoder_takes_the_reference_implementations(
    family: str, folders: dict[str, Path]
) -> None:
    (cell,) = cells_of(folders[family])
    rule = FAMILIES[family].decoder
    assert {name: getattr(cell, name) for name in rule.settings} == rule.settings
    assert (cell.family, cell.cache, cell.claim) == (family, FAMILIES[family].caches[0], "exact")


@pytest.mark.parametrize("family", NAMES)
def test_other_published_decoders_are_chosen_by_name(family: str, folders: dict[str, Path]) -> None:
    for name, rule in FAMILIES[family].variants.items():
        (cell,) = cells_of(folders[family], decoder={"name": "published", "variant": name})
        assert {key: getattr(cell, key) for key in rule.settings} == rule.settings


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "sdar",
            {"decoder": {"name": "published", "variant": "sgland"}},
            "variant 'sgland' is not a published decoder of the family sdar; known: generate, sequential",
        ),
        ("sdar", {"model": {"cache": "dual"}}, "cache 'dual' is not one of block, which its family has"),
        (
            "fast_dllm_v2",
            {"decoder": {"name": "static", "fused_commit": True}},
            "its commit pass gives the first token of the next block.*remove fused_commit",
        ),
        (
            "nemotron",
            {"decoder": {"name": "published", "fused_commit": True}},
            "its commit pass gives the first token of the next block.*remove fused_commit",
        ),
        (
            "fast_dllm_v2",
            {"model": {"cache": "sub_block"}, "methods": ["ssd"]},
            "with cache sub_block a state's next step depends on the path.*remove method 'ssd' or the cache",
        ),
        (
            "nemotron",
            {"methods": ["linear_spec"]},
            "'linear_spec' does not draft for the decoder threshold; it does for c",
        ),
        (
            "nemotron",
            {"decoder": AUTOREGRESSIVE, "methods": ["linear_spec"], "budgets": [8]},
            "'linear_spec' drafts at most 7 tokens of a block of model .*; lower budget 8",
        ),
        (
            "nemotron",
            {"decoder": AUTOREGRESSIVE, "methods": [{"name": "linear_spec", "fold": {"tau": 0.1}}]},
            "'linear_spec' drafts no tree that could fold; remove fold",
        ),
        (
            "nemotron",
            {"decoder": AUTOREGRESSIVE, "methods": ["linear_spec"], "verification": "greedy_match"},
            "'linear_spec' has no verification greedy_match",
        ),
        (
            "llada2",
            {"decoder": {"name": "static", "sub_block_length": 3}},
            "sub_block_length 3 does not divide its block of 8 tokens",
        ),
    ],
)
def test_what_a_family_cannot_do_is_refused_before_a_model_loads(
    family: str, settings: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        cells_of(folders[family], **settings)
    assert "\n" not in str(caught.value)


def test_the_sub_block_cache_is_a_cell_of_its_own_with_its_own_claim(folders: dict[str, Path]) -> None:
    (plain,) = cells_of(folders["fast_dllm_v2"])
    (cached,) = cells_of(folders["fast_dllm_v2"], model={"cache": "sub_block"})
    assert (cached.cache, cached.claim) == ("sub_block", "approximate")
    assert cached.cell_key != plain.cell_key
    assert cached.is_reference


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("stops", [False, True], ids=["to-the-end", "stopped"])
def test_rows_of_every_family_hold_together(
    family: str, stops: bool, folders: dict[str, Path], tmp_path: Path, make_unit: Callable[..., WorkUnit]
) -> None:
    folder = folders[family]
    runner = UnitRunner(actor="test")
    (cell,) = cells_of(folder)
    cell = replace(
        cell, temperature=0.0, threshold=cell.threshold and 0.4, weight_fingerprint="", gen_length=20
    )
    free = make_unit(cell, folder)
    runner.run(free)
    rows = pq.read_table(free.output).to_pylist()
    if stops:  # a stop id that the first answer meets
        token = rows[0]["token_ids"][9]
        folder = tmp_path / "stopping"
        folder.mkdir()
        for path in folders[family].iterdir():
            (folder / path.name).symlink_to(path)
        values = json.loads((folder / "config.json").read_text()) | {"eos_token_id": token}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(values))
        free = make_unit(cell, folder)
        runner.run(free)
        rows = pq.read_table(free.output).to_pylist()
        assert rows[0]["stop_reason"] == "eos"
    drafted = replace(
        make_unit(replace(cell, method="ssd", budget=4), folder), reference_shards=(free.output,)
    )
    runner.run(drafted)
    for row in rows + pq.read_table(drafted.output).to_pylist():
        assert row["error"] is None
        assert (row["exact_tokens"], row["exact_path"], row["exact_bits"]) == (True, True, True)
        assert list(own_faults(row)) == []
        assert row["family"] == family
        assert bool(row["seed_positions"]) == (family in ("fast_dllm_v2", "nemotron"))


def test_a_draft_adapter_that_is_not_read_is_said(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in folders["nemotron"].iterdir():
        (folder / path.name).symlink_to(path)
    values = {
        "name": "g", "models": [str(folder)], "benchmarks": [{"name": "words", "limit": 1}], "temperatures": [0],
        "decoder": AUTOREGRESSIVE, "methods": ["linear_spec"], "budgets": [4],
    }  # fmt: skip
    grid, sources = parse_grid(yaml.safe_dump(values), "grid"), installed_sources()
    questions = load_questions(grid, sources, None, None)
    assert grid_remarks(grid, find_models(grid, sources), questions, None) == []
    (folder / "linear_spec_lora").mkdir()
    (line,) = grid_remarks(grid, find_models(grid, sources), questions, None)
    assert line.endswith(
        "its draft adapter linear_spec_lora is not read; linear_spec drafts with the model itself"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_linear_speculation_hold_together(
    temperature: float, folders: dict[str, Path], make_unit: Callable[..., WorkUnit]
) -> None:
    folder = folders["nemotron"]
    settings = {"decoder": AUTOREGRESSIVE, "methods": ["linear_spec"], "budgets": [5]}
    free, drafted = (
        replace(cell, temperature=temperature, weight_fingerprint="", gen_length=20)
        for cell in cells_of(folder, **settings)
    )
    assert (free.method, drafted.method, drafted.claim) == ("none", "linear_spec", "exact")
    runner = UnitRunner(actor="test")
    reference = make_unit(free, folder)
    runner.run(reference)
    result = runner.run(replace(make_unit(drafted, folder), reference_shards=(reference.output,)))
    assert (result.num_errors, result.num_inexact, result.num_unchecked) == (0, 0, 0)
    for row in pq.read_table(result.output).to_pylist():
        assert (row["exact_tokens"], row["exact_path"], row["exact_bits"]) == (True, True, True)
        assert list(own_faults(row)) == []
        assert row["nfe_total"] == 1 + 2 * row["rounds"] <= forwards_per_row(drafted)
        for name, value, fault in (
            ("nfe_draft", 0, "nfe_draft is 0"),
            ("nfe_commit", 1, "nfe_commit 1"),
            ("rows_computed", row["rows_computed"] * 2, "rows_computed"),
            ("accepted", [9, *row["accepted"][1:]], "rounds that accept"),
        ):
            assert any(fault in found for found in own_faults({**row, name: value}))


@pytest.mark.parametrize("recheck", ["", "serial", "pipelined"])
def test_counts_of_folded_rows_hold_together(
    recheck: str, folders: dict[str, Path], make_unit: Callable[..., WorkUnit]
) -> None:
    folder = folders["sdar"]
    (cell,) = cells_of(folder)
    free = make_unit(replace(cell, temperature=0.0, weight_fingerprint="", gen_length=16), folder)
    runner = UnitRunner(actor="test")
    runner.run(free)
    cell = replace(free.cell, method="ssd", budget=4, fold_tau=100.0, fold_recheck=recheck != "")
    cell = replace(cell, fold_pipelined=recheck == "pipelined")
    folded = replace(make_unit(cell, folder), reference_shards=(free.output,))
    assert runner.run(folded).num_inexact == 0  # without a recheck nothing is promised
    for row in pq.read_table(folded.output).to_pylist():
        assert row["error"] is None
        assert list(own_faults(row)) == []
        assert row["recompute_ratio"] == 0.0
        passes = row["nfe_denoise"] - row["rounds"]
        num_blocks = row["nfe_commit"]
        assert {"": passes == 0, "serial": passes > 0, "pipelined": passes <= num_blocks}[recheck]
        if recheck:
            assert (row["exact_tokens"], row["exact_path"], row["exact_bits"]) == (True, True, True)
            few = row["rows_computed"] - cell.block_length * row["drafted_nodes"]
            assert any("rows_computed" in fault for fault in own_faults({**row, "rows_computed": few}))
            unchecked = {**row, "fold_recheck": False, "fold_pipelined": False}
            assert list(own_faults(unchecked)) != []


@pytest.fixture
def make_unit(tmp_path: Path) -> Callable[..., WorkUnit]:
    items = [Item(item_id=f"item-{count}", prompt="abcdefghijklmnopq"[:count]) for count in (8, 13)]
    write_items(tmp_path / "items.jsonl", items)
    made: list[WorkUnit] = []

    def make(cell: Cell, folder: Path) -> WorkUnit:
        made.append(
            WorkUnit(
                cell=cell,
                keys=tuple(Key(item.item_id, 0) for item in items),
                checkpoint=str(folder),
                inputs=str(tmp_path / "items.jsonl"),
                output=str(tmp_path / f"{len(made)}.parquet"),
            )
        )
        return made[-1]

    return make
