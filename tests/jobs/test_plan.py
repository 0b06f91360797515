"""``plan``: cells, what is missing, and units for a machine without Ray, whose rows a run then adopts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dlmgrid.cluster.fingerprints import FingerprintCache
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.run import ExitCode, RunRequest, run_grid
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.store import load
from dlmgrid.jobs.plan import show_plan
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing import fake_catalog
from dlmgrid.workers.testing.fake_runner import FakeUnitRunner
from dlmgrid.workers.unit_file import read_units

SOURCES = Sources(
    methods=fake_catalog.METHODS,
    benchmark_names=fake_catalog.benchmark_names,
    get_benchmark=fake_catalog.get_benchmark,
    resolve_checkpoint=fake_catalog.resolve_checkpoint,
    check_checkpoint=fake_catalog.check_checkpoint,
    weight_fingerprint=fake_catalog.weight_fingerprint,
    check_prompts=fake_catalog.check_prompts,
)


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    model = fake_catalog.write_fake_checkpoint(tmp_path / "model")
    values = {
        "name": "test",
        "models": [str(model)],
        "benchmarks": ["letters"],
        "temperatures": [0],
        "methods": ["none", "ssd"],
        "budgets": [6, 12],
        "resources": {"items_per_unit": 6},
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_plan_names_each_decoder_with_its_settings(
    grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(grid.read_text())
    values["decoder"] = [
        {"name": "static", "commits_per_step": 4},
        {"name": "threshold", "threshold": 0.9, "comparison": "fast_dllm"},
        {"name": "threshold", "threshold": 0.8},
        {"name": "factor", "factor": 1.5, "fused_commit": True},
    ]
    grid.write_text(yaml.safe_dump(values))
    show_plan(grid, SOURCES, out=None, limit=None, data=None, units=None)
    printed = capsys.readouterr().out
    for text in (
        " static 4 ",
        " threshold 0.9 fast_dllm ",
        " threshold 0.8 ",
        " factor 1.5 ",
        " factor 1.5 fused ",
    ):
        assert text in printed


def test_cells_of_a_method_that_only_a_setting_tells_apart_are_told_apart(
    grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_plan(grid, SOURCES, out=None, limit=None, data=None, units=None)
    assert "≤\n" in capsys.readouterr().out.replace(" \n", "\n")
    values = yaml.safe_load(grid.read_text())
    values["methods"] = ["none", "ssd", {"name": "ssd", "fold": {"tau": 0.25}}]
    grid.write_text(yaml.safe_dump(values))
    show_plan(grid, SOURCES, out=None, limit=None, data=None, units=None)
    lines = capsys.readouterr().out.splitlines()
    assert sum("fold_tau 0.25" in line for line in lines) == 2
    assert not any("drafter_fingerprint" in line for line in lines)


def test_a_bare_plan_reads_no_weights_and_writes_nothing(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: Path) -> str:
        raise AssertionError("weights were read")

    monkeypatch.setattr(fake_catalog, "weight_fingerprint", forbidden)
    before = sorted(tmp_path.rglob("*"))
    show_plan(grid, SOURCES, out=None, limit=None, data=None, units=None)
    printed = capsys.readouterr().out
    assert "3 cells, 36 rows, 36 missing: 6 units in 2 chains" in printed
    assert sorted(tmp_path.rglob("*")) == before
    show_plan(grid, SOURCES, out=None, limit=2, data=None, units=None)
    assert "3 cells, 6 rows, 6 missing" in capsys.readouterr().out


def test_units_decoded_elsewhere_are_adopted_by_a_run_that_then_starts_no_ray(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, units = tmp_path / "out", tmp_path / "units.json"
    show_plan(grid, SOURCES, out=out, limit=None, data=None, units=units)
    runner = FakeUnitRunner("cpu", "elsewhere")
    for unit in read_units(units):
        runner.run(unit)
    show_plan(grid, SOURCES, out=out, limit=None, data=None, units=None)
    assert "36 rows, 0 missing" in capsys.readouterr().out

    # the fingerprint is known already, so nothing needs a worker: an address where no Ray is does not matter
    model = tmp_path / "model"
    FingerprintCache(out / "fingerprints.json").put(model, SOURCES.weight_fingerprint(model))
    request = RunRequest(grid=read_grid(grid), out=out, sources=SOURCES, address="127.0.0.1:9", style="quiet")
    assert run_grid(request) is ExitCode.DONE
    table = load(out).table
    assert table.num_rows == 36
    assert set(table["actor"].to_pylist()) == {"elsewhere"}
    assert all(table["exact_tokens"].to_pylist())
    show_plan(grid, SOURCES, out=out, limit=None, data=None, units=None)
    assert "36 rows, 0 missing" in capsys.readouterr().out


def test_units_need_an_output_folder(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--units needs --out"):
        show_plan(grid, SOURCES, out=None, limit=None, data=None, units=tmp_path / "units.json")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", "is a file; choose a folder"),
        ("file/below", "lies below .*file, which is no folder"),
        ("x" * 5000, "is no usable path .*File name too long"),
    ],
)
def test_an_output_folder_that_cannot_be_is_refused(
    grid: Path, tmp_path: Path, place: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=message):
        show_plan(grid, SOURCES, out=tmp_path / place, limit=None, data=None, units=None)


def test_duplicates_are_said_and_wrong_names_are_placed_in_the_file(
    grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid.write_text(grid.read_text().replace("- ssd", "- ssd\n- ssd"))
    show_plan(grid, SOURCES, out=None, limit=2, data=None, units=None)
    printed = capsys.readouterr().out
    assert (
        "note: methods: ssd with budget 6, ssd with budget 12 are given more than once; each cell is run once\n"
        in printed
    )
    assert "3 cells, 6 rows" in printed
    grid.write_text(grid.read_text().replace("- ssd", "- sdd"))
    with pytest.raises(InputError, match=r"grid.yaml: methods\[1\]: method 'sdd' does not exist"):
        show_plan(grid, SOURCES, out=None, limit=None, data=None, units=None)
