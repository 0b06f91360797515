"""Replay of a grid on a recorded folder: what is refused before work, what is written, and what live decoding says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from dlmgrid.cluster import replay
from dlmgrid.cluster.cells import CellWork, make_cells
from dlmgrid.cluster.grid import Grid, parse_grid
from dlmgrid.cluster.plan import UnitSettings, plan_chains
from dlmgrid.cluster.replay import plan_replay, read_recorded, replay_grid, summarise
from dlmgrid.cluster.run import look_up, refuse_unrecorded
from dlmgrid.cluster.sources import installed_sources
from dlmgrid.cluster.store import Store
from dlmgrid.jobs import diagnose
from dlmgrid.jobs.plan import show_plan
from dlmgrid.jobs.replay import command
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.order_checkpoint import find_order_checkpoint
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.offline import decode_units, part_of
from dlmgrid.workers.tables import DIAGNOSES, REPLAYS
from dlmgrid.workers.trajectories import replay_process
from dlmgrid.workers.trajectories.files import unrecorded_text
from dlmgrid.workers.trajectories.kept_rows import KeptRows
from dlmgrid.workers.trajectories.plan import ReplayPlan
from dlmgrid.workers.trajectories.planned import add_planned
from dlmgrid.workers.unit_file import read_units
from dlmgrid.workers.unit_runner import UnitRunner

GRID: dict[str, Any] = {
    "name": "recorded",
    "models": ["reference"],
    "benchmarks": [{"name": "words", "gen_length": 8}],
    "temperatures": [0, 1],
    "methods": ["none", "ssd", "oracle_position"],
    "budgets": [4],
    "limit": 2,
}


def make_grid(**changes: Any) -> Grid:
    return parse_grid(yaml.safe_dump(GRID | changes), "grid.yaml")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder recorded without Ray: two items at T = 0 and T = 1."""
    out = tmp_path_factory.mktemp("recorded")
    store, sources = Store(out), installed_sources()
    store.create()
    grid = make_grid(methods=["none"])
    asked = look_up(grid, sources, data=None, limit=None)
    for questions in asked.questions:
        store.write_inputs(questions.file_name, questions.items)
    fingerprints = {str(model.folder): sources.weight_fingerprint(model.folder) for model in asked.models}
    works = make_cells(grid, asked.models, asked.questions, fingerprints, store.inputs)
    settings = UnitSettings(
        run_id="test", device="cpu", trajectories=str(store.trajectories), items_per_unit=1
    )
    runner = UnitRunner(actor="test")
    for chain in plan_chains(works, store, settings):
        assert chain.reference is not None
        unit = replace(chain.reference, output=str(store.staging / f"{chain.reference.unit_key}.parquet"))
        assert store.commit([(unit, runner.run(unit))]) == {}
    refuse_unrecorded(store, works)
    return out


def plan(recorded: Path, out: Path, *, num_verified: int = 0, **changes: Any) -> ReplayPlan:
    works = plan_replay(
        make_grid(**changes),
        installed_sources(),
        recorded,
        read_recorded(recorded),
        num_verified=num_verified,
    )
    return ReplayPlan(
        trajectories=str(recorded), out=str(out / "replays"), works=works, num_verified=num_verified
    )


def test_rows_of_every_cell_are_written_and_agree_with_live_decoding(recorded: Path, tmp_path: Path) -> None:
    asked = plan(recorded, tmp_path, num_verified=1)
    replay_grid(asked)
    files = sorted((tmp_path / "replays").iterdir())
    assert [path.stem for path in files] == sorted(work.cell.cell_key for work in asked.works)
    rows = [row for path in files for row in pq.read_table(path, schema=REPLAYS).to_pylist()]
    assert len(rows) == 2 * 3 * 2
    for row in rows:
        assert row["nfe_total"] == row["nfe_prefill"] + row["nfe_denoise"] + row["nfe_commit"]
        assert row["rounds"] == len(row["accepted"]) == row["nfe_denoise"]
        assert row["nfe_reference"] - row["nfe_total"] == sum(row["accepted"])
        if row["method"] == "none":
            assert row["nfe_total"] == row["nfe_reference"]
    first = min(row["item_id"] for row in rows)
    live = {(row["method"], row["item_id"] == first): row["agrees_with_live"] for row in rows}
    assert {key: live[key] for key in live if key[0] == "oracle_position"} == {
        ("oracle_position", True): None, ("oracle_position", False): None,
    }  # fmt: skip
    assert sum(row["agrees_with_live"] is True for row in rows) == 4
    for summary in summarise(asked):
        assert summary.num_rows == 2
        assert (
            summary.num_agreeing == summary.num_live == (0 if summary.cell.method == "oracle_position" else 1)
        )
        assert (summary.nfe_ratio > 1) == (summary.cell.method != "none")


def test_several_processes_give_the_rows_of_one(recorded: Path, tmp_path: Path) -> None:
    from dlmgrid.workers.trajectories.files import files_by_cell
    from dlmgrid.workers.trajectories.replay_process import replay_cells

    methods = ["ssd", {"name": "spot", "checkpoint": "reference"}]
    works = plan(recorded, tmp_path, temperatures=[0], methods=methods).works
    files = files_by_cell(recorded)[works[0].cell.reference().cell_key]
    alone = replay_cells(files, works)
    assert [len(rows) for rows in alone] == [2, 2, 2]
    assert replay_cells(files, works, num_processes=2) == alone


def test_a_model_that_reads_tokens_replays_to_the_live_counts_and_is_refused_where_it_does_not_fit(
    recorded: Path, tmp_path: Path
) -> None:
    from dlmgrid.workers.drafting.order_checkpoint import save_token_model
    from dlmgrid.workers.drafting.token_model import TokenModel, TokenShape

    def saved(name: str, target: str, hidden_size: int) -> Path:
        shape = TokenShape(vocab_size=1024, hidden_size=hidden_size, width=16, num_layers=1, table_width=8)
        save_token_model(tmp_path / name, TokenModel(shape), target=target, card={})
        return tmp_path / name

    def methods(path: Path) -> dict[str, Any]:
        return {"methods": [{"name": "spot", "checkpoint": str(path)}], "temperatures": [0]}

    asked = plan(recorded, tmp_path, num_verified=1, **methods(saved("any.safetensors", "", 0)))
    replay_grid(asked)
    found = {summary.cell.method: (summary.num_live, summary.num_agreeing) for summary in summarise(asked)}
    assert found == {"none": (1, 1), "spot": (1, 1)}
    with pytest.raises(InputError, match=r"device cuda:9: torch .* sees"):
        replay_grid(replace(asked, device="cuda:9"))
    with pytest.raises(
        InputError, match=r"holds nothing of hidden states; record it with record: \[hidden\]"
    ):
        plan(recorded, tmp_path, **methods(saved("hidden.safetensors", "", 8)))
    with pytest.raises(
        InputError, match=r"it reads tokens of other weights \(a+\) than model 'reference' has"
    ):
        plan(recorded, tmp_path, **methods(saved("other.safetensors", "a" * 24, 0)))


def test_parts_of_a_plan_are_disjoint_whole_and_keep_chains(tmp_path: Path) -> None:
    grid, units = tmp_path / "grid.yaml", tmp_path / "units.json"
    asked_for = {"methods": ["none", "ssd"], "resources": {"items_per_unit": 1}}
    grid.write_text(yaml.safe_dump(GRID | asked_for))
    show_plan(grid, installed_sources(), out=tmp_path / "out", limit=None, data=None, units=units)
    planned = read_units(units)
    parts = [part_of(planned, number, 3) for number in (1, 2, 3)]
    assert sorted(unit.output for part in parts for unit in part) == sorted(unit.output for unit in planned)
    assert [len(part) for part in parts] == [4, 2, 2]
    for part in parts:
        outputs = {unit.output for unit in part}
        assert all(set(unit.reference_shards) <= outputs for unit in part)


def test_offline_recordings_are_replayed_before_a_run_adopts_them(tmp_path: Path, recorded: Path) -> None:
    grid, out, units = tmp_path / "grid.yaml", tmp_path / "out", tmp_path / "units.json"
    grid.write_text(
        yaml.safe_dump(GRID | {"temperatures": [0], "methods": ["none"], "resources": {"items_per_unit": 2}})
    )
    show_plan(grid, installed_sources(), out=out, limit=None, data=None, units=units, records=True)
    assert [unit.cell.method for unit in read_units(units)] == ["none"]
    assert decode_units(units, num_compared=1, say=lambda _: None).exit_code == 0
    (file,) = (out / "staging").iterdir()
    verdicts = pq.read_table(file, columns=["exact_tokens", "exact_bits"]).to_pylist()
    assert verdicts == [
        {"exact_tokens": True, "exact_bits": True},
        {"exact_tokens": None, "exact_bits": None},
    ]
    here, there = (
        plan(out, tmp_path / "a", temperatures=[0]),
        plan(recorded, tmp_path / "b", temperatures=[0]),
    )
    for asked in (here, there):
        replay_grid(asked)
    assert [summary.nfe_mean for summary in summarise(here)] == [
        summary.nfe_mean for summary in summarise(there)
    ]
    assert unrecorded_text(out) == ""
    grid.write_text(yaml.safe_dump(GRID | {"temperatures": [0, 1], "methods": ["none"]}))
    show_plan(grid, installed_sources(), out=out, limit=None, data=None, units=units, records=True)
    assert "2 of 4 planned generations" in unrecorded_text(out)
    assert "at T = 1, static: none of 2" in unrecorded_text(out)


@pytest.mark.parametrize("job", ["replay", "calibrate", "train_order", "study", "diagnose"])
def test_what_reads_recordings_needs_no_ray_and_no_scorer(job: str) -> None:
    blocked = "import sys\nfor name in ('ray', 'datasets', 'lm_eval', 'evalplus'): sys.modules[name] = None\n"
    program = f"{blocked}import dlmgrid.jobs.{job}\n"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=120)


def test_fused_passes_replay_to_the_live_counts(recorded: Path, tmp_path: Path) -> None:
    fused = {"name": "static", "fused_commit": True}
    asked = plan(recorded, tmp_path, num_verified=1, temperatures=[0], methods=["ssd"], decoder=fused)
    replay_grid(asked)
    rows = [row for path in (tmp_path / "replays").iterdir() for row in pq.read_table(path).to_pylist()]
    assert {(row["method"], row["fused_commit"]) for row in rows} == {("none", False), ("ssd", True)}
    assert sum(row["agrees_with_live"] is True for row in rows) == 2
    assert {row["nfe_commit"] for row in rows if row["fused_commit"]} == {1}


def test_a_count_that_differs_from_the_live_one_is_exit_code_4(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(yaml.safe_dump(GRID | {"temperatures": [0], "methods": ["none"]}))

    def replay_with_a_fault(asked: ReplayPlan) -> None:
        replay_cells = replay_process.join_rows

        def faulty(*arguments: Any) -> list[list[dict[str, Any]]]:
            cells = replay_cells(*arguments)
            cells[0][0]["rows_computed"] += 1
            return cells

        monkeypatch.setattr(replay_process, "join_rows", faulty)
        replay_process.run_plan(asked)

    monkeypatch.setattr("dlmgrid.jobs.replay.replay_grid", replay_with_a_fault)
    assert command(recorded, grid, tmp_path / "out", verify=2) == 4
    assert "1 of 2 rows decoded live agree" in capsys.readouterr().out


class StoppedError(Exception):
    """What a kill is in these tests."""


def test_a_replay_that_was_stopped_goes_on_where_it_was(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_process, "part_size", lambda *_: 1)
    asked, undisturbed = plan(recorded, tmp_path / "a"), plan(recorded, tmp_path / "b")
    replay_process.run_plan(undisturbed)
    replayed: list[str] = []
    make_row = replay_process._row
    stops_at = 4

    def row_until_stopped(cell: Cell, *rest: Any) -> dict[str, Any]:
        if len(replayed) == stops_at:
            raise StoppedError
        replayed.append(cell.cell_key)
        return make_row(cell, *rest)

    monkeypatch.setattr(replay_process, "_row", row_until_stopped)
    with pytest.raises(StoppedError):
        replay_process.run_plan(asked)
    out = tmp_path / "a" / "replays"
    kept = sorted((out / "unfinished").iterdir())
    assert len(kept) == 4 and not list(out.glob("*.parquet"))
    kept[0].write_bytes(kept[0].read_bytes()[:100])  # damaged: replayed again
    replayed.clear()
    stops_at = 1000
    replay_process.run_plan(asked)
    num_rows = sum(len(work.keys) for work in asked.works)
    assert len(replayed) == num_rows - 3
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{work.cell.cell_key}.parquet" for work in asked.works
    )
    for path in out.iterdir():
        assert pq.read_table(path).equals(pq.read_table(tmp_path / "b" / "replays" / path.name))


def test_rows_are_not_kept_for_other_recordings(recorded: Path, tmp_path: Path) -> None:
    (file,) = list((recorded / "trajectories").glob("**/*.parquet"))[:1]
    cell = plan(recorded, tmp_path).works[0].cell
    kept = KeptRows(tmp_path / "kept")
    kept.save(cell, [(file, 0)], "cpu", {})
    assert kept.load(cell, [(file, 0)], "cpu") == {}
    assert kept.load(cell, [(file, 1)], "cpu") is None
    assert kept.load(cell, [(file, 0)], "cuda") is None
    other = shutil.copy(file, tmp_path / file.name)
    assert kept.load(cell, [(other, 0)], "cpu") is None
    kept.remove(cell)
    assert not (tmp_path / "kept").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is missing is asked for")
def test_a_device_that_is_not_there_is_refused_before_work(recorded: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(yaml.safe_dump(GRID))
    with pytest.raises(InputError, match="sees 0 CUDA devices here"):
        command(recorded, grid, tmp_path / "out", device="cuda")
    assert not (tmp_path / "out" / "replays").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"models": ["smollm2-135m-bd32"]},
            "no run of model 'smollm2-135m-bd32' revision '' (recorded: reference)",
        ),
        ({"temperatures": [0, 1.5]}, "temperature 1.5 (recorded: "),
        ({"seed": 3}, "seed 3 (recorded: 0)"),
        ({"noise": "per_position", "temperatures": [1]}, "noise 'per_position' (recorded: 'commit_count')"),
        ({"decoder": {"name": "static", "commits_per_step": 2}}, "commits_per_step 2 (recorded: 1)"),
        ({"decoder": {"name": "threshold", "threshold": 0.9}}, "decoder 'threshold' (recorded: 'static')"),
        ({"gen_length": 16, "benchmarks": ["words"]}, "gen_length 16 (recorded: 8)"),
        ({"repeats": 2}, "lacks repeat 1"),
        ({"methods": ["oracle_positon"]}, "did you mean 'oracle_position'?"),
        ({"verification": "greedy_match"}, "greedy_match leaves the serialized path"),
        (
            {"decoder": {"name": "static", "window": "full"}, "methods": ["ssd"]},
            "holds nothing of the next block beside each state; record it with record: [window] in the grid",
        ),
        ({"methods": [{"name": "ssd", "fold": {"tau": 0.1}}]}, "fold changes what a pass computes"),
        (
            {"methods": ["linear_spec"]},
            "'linear_spec' drafts with passes of the model, so it cannot be replayed",
        ),
    ],
)
def test_what_was_not_recorded_is_refused_before_work(
    recorded: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        plan(recorded, tmp_path, **changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_method_that_looks_ahead_cannot_run_live() -> None:
    with pytest.raises(InputError, match="'oracle_token' looks ahead, so it exists in replay only"):
        look_up(make_grid(methods=["oracle_token"]), installed_sources(), data=None, limit=None)


def test_diagnose_prints_and_stores_every_quantity(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(recorded, out)
    diagnose.command(out)
    printed = capsys.readouterr().out
    rows = pq.read_table(out / "diagnoses.parquet", schema=DIAGNOSES).to_pylist()
    of_trees = {
        f"{method}_{ending}"
        for method in (
            "ssd",
            "confidence_tree",
            *(["spot"] if find_order_checkpoint("reference").exists() else []),
        )
        for ending in diagnose.DRAFTED_TITLES
    }
    expected = set(diagnose.TITLES) | of_trees
    assert {row["quantity"] for row in rows if row["temperature"] == 1} == expected
    assert {row["quantity"] for row in rows if row["temperature"] == 0} == expected - {"argmax_share"}
    for title in (*diagnose.TITLES.values(), *diagnose.DRAFTED_TITLES.values()):
        assert title in printed
    for row in rows:
        assert row["count"] > 0
        if row["quantity"] in diagnose.TITLES:
            assert row["value"] >= 1 if row["quantity"].endswith("_cut") else 0 <= row["value"] <= 1
        else:
            assert row["value"] >= 0
    whole = next(row for row in rows if row["quantity"] == "stale_token_hit" and row["block"] is None)
    blocks = [
        row
        for row in rows
        if row["quantity"] == "stale_token_hit"
        and row["block"] is not None
        and row["cell_key"] == whole["cell_key"]
    ]
    assert whole["count"] == sum(row["count"] for row in blocks)


def test_a_folder_that_is_not_whole_is_refused_before_work(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no trajectories"):
        read_recorded(tmp_path)
    out = tmp_path / "copy"
    shutil.copytree(recorded, out)
    first, *_ = sorted((out / "trajectories").iterdir())
    content = first.read_bytes()
    first.write_bytes(content[:-100])
    with pytest.raises(InputError, match="not a whole trajectory file"):
        read_recorded(out)
    first.unlink()
    with pytest.raises(InputError, match="is missing, so its unit has no trajectories"):
        read_recorded(out)


def test_a_limit_takes_the_first_items_in_the_order_of_the_benchmark(recorded: Path, tmp_path: Path) -> None:
    (inputs,) = (recorded / "inputs").iterdir()
    first = inputs.read_text().splitlines()[0]
    for work in plan(recorded, tmp_path, limit=1).works:
        assert len(work.keys) == 1
        assert f'"item_id": "{work.keys[0].item_id}"' in first


def test_what_is_asked_for_and_not_recorded_is_said(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(recorded, tmp_path)
    assert capsys.readouterr().out == ""
    plan(recorded, tmp_path, limit=50, temperatures=[0])
    printed = capsys.readouterr().out
    assert printed == ("note: 48 of 50 generations asked for are not recorded: words at T = 0, static\n")


def test_draft_free_rows_that_were_not_recorded_cannot_be_taken_for_recorded(
    write_grid: Callable[..., Path],
    make_works: Callable[..., Any],
    run_units: Callable[..., Any],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    works = make_works(write_grid(methods=["none"]), out)
    store = Store(out)
    refuse_unrecorded(store, works)
    run_units(store, plan_chains(works, store, UnitSettings(run_id="test", device="cpu")))
    with pytest.raises(InputError, match="they were not recorded, or their file is gone"):
        refuse_unrecorded(store, works)


def test_what_a_grid_leaves_out_is_the_models_own_and_not_what_happens_to_be_recorded(
    recorded: Path, tmp_path: Path
) -> None:
    (known, keys), *_ = read_recorded(recorded).values()
    cells = [replace(known, confidence="random", stop="full", block_length=length) for length in (16, 32)]
    found = {cell.cell_key: (cell, keys) for cell in cells}
    grid = make_grid(models=["reference"])
    with pytest.raises(InputError, match="was recorded with blocks of 16 and 32 tokens; name block_length"):
        replay._recorded_models(grid, found, tmp_path)
    named = make_grid(models=[{"path": "reference", "block_length": 16}])
    assert replay._recorded_models(named, found, tmp_path)[0]
    add_planned(tmp_path, dict.fromkeys(cells, keys), {cell.cell_key: 32 for cell in cells})
    ((model,), _) = replay._recorded_models(grid, found, tmp_path)
    assert model.shape.block_length == 32
    assert (model.shape.confidence, model.shape.stop) == ("tempered", known.stop)
    sixteen = {cell.cell_key: (cell, keys) for cell in cells[:1]}
    work = CellWork(cell=known, checkpoint="", inputs="", keys=keys)
    with pytest.raises(InputError, match=r"holds no run with .*block_length 32 \(recorded: 16\)"):
        replay._recorded_keys(sixteen, work, tmp_path)
