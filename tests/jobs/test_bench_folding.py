"""The tables of folded passes, on a tiny model: what they count, and that a forced ratio is near the one asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlmgrid.jobs.bench_folding import main
from dlmgrid.jobs.bench_shapes import shape_config
from dlmgrid.jobs.folding_tables import folded_floor_ms
from dlmgrid.kernels.benchmark import Ceilings, pass_floor_parts
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    write_random_checkpoint(tmp_path / "model", tiny_family_config("sdar", block_length=8), scale=0.3)
    (tmp_path / "prompts.json").write_text("[[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]")
    before = torch.get_num_threads()
    try:
        main(
            ["--shapes", "tiny", "--prefix", "64", "--checkpoint", str(tmp_path / "model"), "--items", "2", "--prompts",
             str(tmp_path / "prompts.json"), "--gen-length", "16", "--budgets", "3", "--taus", "0", "0.3", "100",
             "--ratios", "0.4", "1", "--repeats", "1", "--device", "cpu", "--dtype", "float32", "--kernels", "torch",
             "--out", str(tmp_path / "out.json")]
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["tables"]
    return found


def test_tables_of_folded_passes(tables: dict[str, Any]) -> None:
    forced, whole = tables["shapes"][1:]
    assert forced["same_bits"]
    assert 0.3 < forced["recompute_ratio"] < 0.5
    assert whole["recompute_ratio"] == 1
    assert 0 < forced["floor_ms"] < whole["floor_ms"]
    assert set(forced["stages_by_launches_ms"]) == {"select", "move", "compute", "correct"}

    rows = [row for row in tables["recompute_ratios"] if row["drafter"] == "ssd"]
    assert [row["prompts"] for row in rows] == [2] * 3
    ratios = [row["recompute_ratio"] for row in rows]
    assert ratios[0] == 1 > ratios[1] > ratios[2] == 0
    assert [row["drafter"] for row in tables["times"]] == ["ssd", "confidence_tree"]

    seen = tables["differences"]["ssd"]
    assert len(seen["by_layer"]) == len(seen["by_position"]) == 2
    assert all(0 < value < 2 for value in seen["by_layer"])
    assert sum(seen["by_position"][0]) / 8 == pytest.approx(seen["by_layer"][0])
    assert seen["by_step"][0][8] is None, "a complete block is never drafted from"


def test_the_floor_of_a_folded_pass_is_that_of_its_rows_and_what_folding_adds() -> None:
    config = shape_config("SDAR-8B")
    ceilings = Ceilings(bytes_per_second=4.2e12, flops_per_second=780e12)

    def plain(rows: int) -> float:
        parts = pass_floor_parts(
            ceilings, hidden=4096, layers=36, heads=32, kv_heads=8, width=128, inner=12288, vocab=151936, rows=rows,
            head_rows=32, prefix=512, bytes_per_value=2,
        )  # fmt: skip
        return parts["products"] + parts["attention"]

    whole = folded_floor_ms(ceilings, config, 20, 1.0, 512, 2)
    quarter = folded_floor_ms(ceilings, config, 20, 0.25, 512, 2)
    assert plain(672) < whole < 1.05 * plain(672)
    assert plain(192) < quarter < whole
