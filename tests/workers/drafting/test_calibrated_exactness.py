"""Calibrated and learned drafters change the number of forwards and nothing else."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dlmgrid.workers.benchmarks.words import PROMPT_VERSION, calibration_items, held_out_items
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.catalog import get_method
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.drafter_file import find_drafter_file
from dlmgrid.workers.drafting.order_checkpoint import (
    find_order_checkpoint,
    read_order_checkpoint,
    save_order_model,
)
from dlmgrid.workers.drafting.order_model import OrderModel
from dlmgrid.workers.drafting.set_checkpoint import save_set_model
from dlmgrid.workers.drafting.set_model import SetModel, SetShape
from dlmgrid.workers.drafting.spiffy import SpiffyDrafter
from dlmgrid.workers.drafting.spiffy_calibration import calibrate_graph
from dlmgrid.workers.drafting.spiffy_graph import save_graph
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import write_items
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.checkpoint import read_config
from dlmgrid.workers.recompute import recompute_rows
from dlmgrid.workers.tables import GENERATIONS, deterministic_columns
from dlmgrid.workers.testing.tiny_runs import tiny_cell, tiny_decode
from dlmgrid.workers.trajectories.recording import TrajectoryRecorder
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_trajectories
from dlmgrid.workers.unit_runner import UnitRunner, build_drafter
from dlmgrid.workers.units import Key, WorkUnit

NUM_ITEMS = 3


def random_order_model() -> OrderModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OrderModel()


def tiny_drafters(runs: list[Trajectory]) -> dict[str, Drafter]:
    graph = calibrate_graph(runs, budget=12, selection="marginal_gain")
    return {
        "spiffy": SpiffyDrafter(graph),
        "spiffy_pruned": SpiffyDrafter(graph, prunes=True),
        "spot": SpotDrafter(random_order_model()),
        "spot_gamma": SpotDrafter(random_order_model(), min_log_mass=math.log(0.05)),
    }


DECODERS: dict[str, dict[str, Any]] = {
    "static-1": {},
    "static-3": {"commits_per_step": 3},
    "threshold": {"decoder": "threshold", "threshold": 0.5},
    "threshold-2": {"decoder": "threshold", "threshold": 0.5, "commits_per_step": 2},
    "entropy_bounded": {"decoder": "entropy_bounded", "threshold": 5.0, "confidence": "certainty"},
}


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5], ids=lambda t: f"T{t}")
def test_every_drafter_walks_the_serialized_path_and_replays_to_the_same_counts(
    tiny_runs: Callable[..., list[Trajectory]], temperature: float, decoder: dict[str, Any]
) -> None:
    settings = {"temperature": temperature, **decoder}
    runs = tiny_runs(NUM_ITEMS, **settings)
    serialized = tiny_decode(tiny_cell(**settings), None, num_items=NUM_ITEMS, max_in_flight=1)
    batch = ReplayBatch(runs)
    for name, drafter in tiny_drafters(runs).items():
        cell = replace(tiny_cell(**settings), method="ssd", budget=6)  # any method: the drafter is given
        drafted = tiny_decode(cell, drafter, num_items=NUM_ITEMS)
        with torch.inference_mode():
            replayed = batch.replay(cell, without_future(drafter))
        for ours, theirs, counts in zip(drafted, serialized, replayed, strict=True):
            assert ours.steps == theirs.steps, name
            assert ours.digests == theirs.digests, name
            assert ours.accepted == counts.accepted, name
            assert (ours.drafted_nodes, ours.rows_computed) == (counts.drafted_nodes, counts.rows_computed), (
                name
            )
        if name != "spot_gamma" and not decoder:
            saved = sum(g.nfe_denoise for g in drafted) / sum(g.nfe_denoise for g in serialized)
            assert saved < 0.95, name


def test_uncoupled_noise_is_exact_too(tiny_runs: Callable[..., list[Trajectory]]) -> None:
    runs = tiny_runs(NUM_ITEMS, temperature=1.0)
    serialized = tiny_decode(tiny_cell(temperature=1.0), None, num_items=NUM_ITEMS)
    for drafter in tiny_drafters(runs).values():
        cell = replace(tiny_cell(temperature=1.0), method="ssd", budget=6, verification="uncoupled")
        assert [g.steps for g in tiny_decode(cell, drafter, num_items=NUM_ITEMS)] == [
            g.steps for g in serialized
        ]


def reference_cell(**settings: Any) -> Cell:
    values: dict[str, Any] = {
        "model": "reference", "benchmark": "words", "prompt_version": PROMPT_VERSION, "method": "none", "budget": 0,
        "temperature": 0.0, "block_length": 32, "gen_length": 8,
    }  # fmt: skip
    return Cell(**(values | settings))


def reference_unit(cell: Cell, folder: Path, item_ids: list[str], drafter: str = "") -> WorkUnit:
    return WorkUnit(
        cell=cell, keys=tuple(Key(item_id, 0) for item_id in item_ids), drafter_path=drafter,
        checkpoint=str(resolve_checkpoint("reference")), inputs=str(folder / "items.jsonl"),
        output=str(folder / f"{cell.cell_key}.parquet"),
    )  # fmt: skip


def exact_rows(runner: UnitRunner, unit: WorkUnit) -> list[dict[str, Any]]:
    """Run a unit and hold its rows to their claim on all three levels."""
    result = runner.run(unit)
    assert (result.num_errors, result.num_inexact, result.num_unchecked) == (0, 0, 0)
    rows: list[dict[str, Any]] = pq.read_table(unit.output).to_pylist()
    assert {row["claim"] for row in rows} == {"exact"}
    for row in rows:
        assert row["exact_tokens"] and row["exact_path"] and row["exact_bits"], unit.cell
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5], ids=lambda t: f"T{t}")
def test_set_drafts_of_the_reference_model_are_exact(tmp_path: Path, temperature: float) -> None:
    runner, items = UnitRunner(actor="test"), held_out_items(1)
    write_items(tmp_path / "items.jsonl", items)
    ids = [item.item_id for item in items]
    config = read_config(resolve_checkpoint("reference"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = SetShape(hidden_size=config.hidden_size, vocab_size=config.vocab_size, width=16, num_layers=1)
        model = SetModel(shape)
        model.table.normal_()
    file = tmp_path / "sets.safetensors"
    mark = save_set_model(file, model, target="", card={})
    settings = {"temperature": temperature, "decoder": "threshold", "threshold": 0.7}
    reference = reference_unit(reference_cell(**settings), tmp_path, ids)
    runner.run(reference)
    for window in ("", "full"):
        cell = reference_cell(
            method="spot_sets", budget=6, drafter_fingerprint=mark, window=window, **settings
        )
        unit = reference_unit(cell, tmp_path, ids, str(file))
        exact_rows(runner, replace(unit, reference_shards=(reference.output,)))
    cell = reference_cell(
        method="spot_sets_product", budget=6, drafter_fingerprint=mark, product_tau=0.3, **settings
    )
    unit = reference_unit(cell, tmp_path, ids, str(file))
    result = runner.run(replace(unit, reference_shards=(reference.output,)))
    (row,) = pq.read_table(unit.output).to_pylist()
    assert (row["claim"], row["error"], result.num_inexact) == ("approximate", None, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5], ids=lambda t: f"T{t}")
def test_rows_of_the_reference_model_are_exact_and_decode_again(tmp_path: Path, temperature: float) -> None:
    runner = UnitRunner(actor="test")
    train_items, items = calibration_items(1), held_out_items(1)
    write_items(tmp_path / "items.jsonl", [*train_items, *items])
    recorder = TrajectoryRecorder()
    recorded = reference_cell(benchmark="words_train", temperature=temperature).canonical()
    train_ids = [item.item_id for item in train_items]
    runner.decode_rows(reference_unit(recorded, tmp_path, train_ids), max_in_flight=1, recorder=recorder)
    recorder.write(tmp_path / "runs.parquet", recorded, [(item_id, 0) for item_id in train_ids])
    drafters = tmp_path / "drafters"
    drafters.mkdir()
    graph = calibrate_graph(load_trajectories(tmp_path / "runs.parquet"), budget=6, selection="marginal_gain")
    graph_file = drafters / f"{graph.fingerprint}.json"
    save_graph(graph, graph_file)
    shipped = find_order_checkpoint("reference")
    fingerprint = read_order_checkpoint(shipped).fingerprint
    checkpoint = Path(shutil.copy(shipped, drafters / f"{fingerprint}.safetensors"))

    ids = [item.item_id for item in items]
    reference = reference_unit(reference_cell(temperature=temperature), tmp_path, ids)
    runner.run(reference)
    for method, file, mark, changes in (
        ("ssd", "", "", {"fused_commit": True}),
        ("confidence_tree", "", "", {"verification": "uncoupled"}),
        ("spiffy", graph_file, graph.fingerprint, {}),
        ("spiffy_pruned", graph_file, graph.fingerprint, {"window": "cross_block"}),
        ("spot", checkpoint, fingerprint, {}),
        ("spot", checkpoint, fingerprint, {"window": "full", "fused_commit": True}),
        ("spot_gamma", checkpoint, fingerprint, {"gamma": 0.02}),
    ):
        cell = reference_cell(
            temperature=temperature, method=method, budget=6, drafter_fingerprint=mark, **changes
        )
        unit = reference_unit(cell, tmp_path, ids, str(file))
        rows = exact_rows(runner, replace(unit, reference_shards=(reference.output,)))
    again = recompute_rows(rows, Path(unit.checkpoint), tmp_path / "items.jsonl", drafters=drafters)
    names = [name for name in deterministic_columns(GENERATIONS) if not name.startswith(("exact_", "first_"))]
    ignored = {"batch_size", "batch_position", "attempt", "top2_margin"}
    for ours, theirs in zip(again, rows, strict=True):
        assert {n: ours[n] for n in names if n not in ignored} == {
            n: theirs[n] for n in names if n not in ignored
        }


def test_a_folder_and_a_name_that_ships_nothing_are_told_apart_from_a_missing_file(tmp_path: Path) -> None:
    for name in ("spot", "spiffy", "spot_sets"):
        with pytest.raises(InputError, match="is a folder; name the"):
            find_drafter_file(get_method(name), str(tmp_path))
    with pytest.raises(
        InputError, match=r"'spot_sets' has no shipped checkpoint, .*; make one with dlmgrid train-sets"
    ):
        find_drafter_file(get_method("spot_sets"), "reference")
    assert find_drafter_file(get_method("spot"), "reference").fingerprint


def test_a_drafter_that_is_not_the_cells_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.safetensors"
    fingerprint = save_order_model(path, random_order_model(), {})
    cell = reference_cell(method="spot", budget=6, drafter_fingerprint=fingerprint)
    build_drafter(cell, str(path))
    with pytest.raises(InputError, match=f"it is drafter {fingerprint}, the run was planned with 000"):
        build_drafter(replace(cell, drafter_fingerprint="000"), str(path))
    with pytest.raises(InputError, match="does not exist"):
        build_drafter(cell, str(tmp_path / "none.safetensors"))
    with pytest.raises(ValueError, match="gamma is 0"):
        build_drafter(replace(cell, method="spot_gamma", gamma=0.0), str(path))
