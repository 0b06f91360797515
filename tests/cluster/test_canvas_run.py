"""A grid over tiny LLaDA and Dream checkpoints through Ray: every row exact, and checked again from what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dlmgrid.cluster.check import check_files, check_stored
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.run import ExitCode, RunRequest, look_up, run_grid
from dlmgrid.cluster.sources import installed_sources
from dlmgrid.cluster.store import load
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.recompute import recompute_rows
from dlmgrid.workers.run_folder import open_run
from dlmgrid.workers.testing.tiny_canvas import CANVAS_FAMILIES, write_tiny_canvas


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in CANVAS_FAMILIES:
        write_tiny_canvas(folder / family, family, num_hidden_layers=1, scale=0.25)
    return folder


def write_grid(path: Path, models: list[dict[str, Any]], **changes: Any) -> Path:
    values: dict[str, Any] = {
        "name": "canvas",
        "models": [{"chat_template": "llada", **model} for model in models],
        "benchmarks": [{"name": "words", "limit": 1, "gen_length": 16}],
        "temperatures": [0, 1],
        "methods": ["none", "ssd"],
        "budgets": [4],
        "resources": {"num_actors": 1},
    }
    path.write_text(yaml.safe_dump(values | changes))
    return path


def test_rows_of_every_cache_are_exact_and_check_again(
    checkpoints: Path, tmp_path: Path, local_ray: None
) -> None:
    llada, dream = str(checkpoints / "llada"), str(checkpoints / "dream")
    models = [
        {"path": llada, "block_length": 8},
        {"path": llada, "block_length": 8, "cache": "dual"},
        {"path": dream},
        {"path": dream, "block_length": 8, "cache": "prefix"},
    ]
    out = tmp_path / "out"
    grid = write_grid(tmp_path / "grid.yaml", models)
    request = RunRequest(grid=read_grid(grid), out=out, sources=installed_sources(), style="quiet")
    assert run_grid(request) is ExitCode.DONE
    rows = load(out).table.to_pylist()
    assert len(rows) == 4 * 2 * 2
    for row in rows:
        assert row["exact_tokens"] and row["exact_path"] and row["exact_bits"], row["error"]
        assert row["claim"] == ("approximate" if row["cache"] in ("prefix", "dual") else "exact")
        assert (row["nfe_prefill"], row["nfe_commit"], row["stop"]) == (0, 0, "full")
        assert row["family"] in row["model"]
        assert row["decoder"] == row["family"] and row["steps"] == 16
    assert {row["block_length"] for row in rows if row["family"] == "dream"} == {8, 16}
    assert check_files(out).faults == []
    stored = check_stored(out)
    assert (stored.faulty, stored.missing, stored.num_compared) == ([], [], 8)

    drafted = [row for row in rows if row["method"] == "ssd" and row["temperature"] == 1]
    (inputs,) = open_run(out).inputs.values()
    for row in drafted:
        (again,) = recompute_rows([row], Path(row["model"]), out / "inputs" / inputs.name)
        for name in ("token_ids", "path_digest", "step_digests", "nfe_total", "rows_computed", "accepted"):
            assert again[name] == row[name], name


LLADA = {"path": "llada"}
DREAM = {"path": "dream"}
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "cache": ({**LLADA, "cache": "block"}, {}, "cache 'block' is not one of none, prefix, dual"),
    "block-too-long": (
        {**LLADA, "block_length": 32}, {}, "block_length 32 is more than gen_length 16; lower block_length",
    ),
    "block-does-not-divide": (
        {**LLADA, "block_length": 6}, {}, "gen_length 16 is not a multiple of block_length 6; change one",
    ),
    "steps-do-not-divide": (
        {**LLADA, "block_length": 8}, {"decoder": {"name": "llada", "steps": 9}},
        "steps 9 is not a multiple of the 2 blocks of 8 tokens",
    ),
    "idle-steps": (
        {**LLADA, "block_length": 8}, {"decoder": {"name": "llada", "steps": 32}},
        "steps 32 is more than gen_length 16: steps would open nothing",
    ),
    "first-position-alone": (
        {**DREAM, "block_length": 8, "cache": "dual"}, {"decoder": {"name": "dream", "steps": 2}},
        "steps 2 gives a block 1; with cache dual a block needs 2",
    ),
    "fused": (
        {**LLADA, "block_length": 8}, {"decoder": {"name": "static", "fused_commit": True}},
        "a bidirectional model has no commit passes to join; remove fused_commit",
    ),
    "window": (
        {**LLADA, "block_length": 8}, {"decoder": {"name": "static", "window": "full"}},
        "a bidirectional model sees its next block in every pass; remove window",
    ),
    "recorded-window": (
        {**LLADA, "block_length": 8}, {"record": ["window"]},
        "a bidirectional model sees its next block in every pass; remove window from record",
    ),
    "fold": (
        {**LLADA, "block_length": 8}, {"methods": [{"name": "ssd", "fold": {"tau": 0.1}}]},
        "a bidirectional model's canvases do not fold; remove fold from method 'ssd'",
    ),
    "triton": (
        {**LLADA, "block_length": 8}, {"kernels": "triton"},
        "kernels: triton has no attention over the canvas of a bidirectional model; use kernels: torch",
    ),
    "variant": (
        {**DREAM}, {"decoder": {"name": "published", "variant": "faster"}},
        "variant 'faster' is not a published decoder of the family dream; known: origin, maskgit_plus",
    ),
    "schedule-on-blocks": (
        {"path": "reference", "chat_template": ""}, {"decoder": "dream"},
        "decoder dream is a schedule over blocks that are all masked",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_grid_that_cannot_run_is_refused_in_one_line(fault: str, checkpoints: Path, tmp_path: Path) -> None:
    model, changes, message = FAULTS[fault]
    path = model["path"] if model["path"] == "reference" else str(checkpoints / model["path"])
    grid = read_grid(write_grid(tmp_path / "grid.yaml", [{**model, "path": path}], **changes)).grid
    with pytest.raises(InputError, match=message) as caught:
        look_up(grid, installed_sources(), data=None, limit=None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"name": "static", "steps": 4}, "steps belongs to the decoders llada and dream"),
        ({"name": "llada", "confidence": "origin"}, "origin opens positions by dream's schedule"),
        ({"name": "threshold", "threshold": 0.9, "confidence": "entropy"}, "compares probabilities"),
        ({"name": "factor", "factor": 1.0, "alg_temp": 0.5}, "remove alg_temp"),
        ({"name": "published", "top_p": 0.9}, "the published decoder has its own top_p"),
    ],
)
def test_decoders_that_contradict_themselves_are_refused(
    decoder: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_grid(write_grid(tmp_path / "grid.yaml", [{"path": "llada"}], decoder=decoder))
