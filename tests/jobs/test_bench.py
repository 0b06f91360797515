"""``make bench`` on a CPU: every table is filled and judged, the same work is timed on both sides, a failure of one
table leaves the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlmgrid.jobs import bench
from dlmgrid.jobs.bench_decode import batch_rows, decode_rows, drafting_row, parse_drafters, random_prompts
from dlmgrid.jobs.bench_drafting import growth_rows
from dlmgrid.jobs.bench_folds import fold_rows
from dlmgrid.jobs.bench_passes import (
    add_exact_over_fast,
    group_kernels,
    num_rows,
    own_times,
    random_blocks,
    ratios,
)
from dlmgrid.jobs.bench_print import row_line
from dlmgrid.jobs.bench_shapes import random_engine, shape_config
from dlmgrid.jobs.bench_stock import stock_model
from dlmgrid.kernels.benchmark import Ceilings, measure, measure_queued, pass_floor_parts
from dlmgrid.workers.drafting.order_checkpoint import REFERENCE, find_order_checkpoint
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.synthetic import tiny_config, write_random_checkpoint

CPU = torch.device("cpu")
SLOW = Ceilings(bytes_per_second=1e9, flops_per_second=1e9)


@pytest.fixture(autouse=True)
def one_reading_of_the_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_ceilings", lambda *_: SLOW)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = folder / "bench.json"
    arguments = ["bench", "--checkpoint", str(folder / "model"), "--device", "cpu", "--shapes", "tiny"]
    arguments += ["--prefixes", "64", "--budgets", "0", "2", "--stock-budgets", "0", "2", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(out), *more])
    return bench.main(), json.loads(out.read_text())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_report_has_its_tables_and_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_checkpoint(tmp_path / "model", tiny_config())
    code, report = run(
        monkeypatch, tmp_path, "--tables", "passes", "stock", "folding", "--ratios", "1", "0.5", "--part-budgets", "2"
    )  # fmt: skip
    assert (code, report["errors"]) == (0, [])
    tables = report["tables"]
    assert [(row["numerics"], row["budget"]) for row in tables["passes"]] == [
        ("exact", 0), ("exact", 2), ("fast", 0), ("fast", 2),
    ]  # fmt: skip
    for row in tables["passes"]:
        for head in ("block", "ahead"):
            taken, floor = row["head"][head]["device_ms"], sum(row["floor_ms"][head].values())
            assert row["over_floor"][head] == pytest.approx(taken / floor)
    assert sum("over_fast" in row for row in tables["passes"]) == 2
    assert [(row["model"], row["budget"]) for row in tables["stock"]] == [
        ("tiny", 0), ("tiny", 2), ("model", 0), ("model", 2),
    ]  # fmt: skip
    for row in tables["stock"]:
        expected = row["transformers"]["median_ms"] / row["engine"]["wall_ms"]
        assert row["speed_up"] == pytest.approx(expected)
    assert [row["recompute_ratio"] for row in tables["folding"]] == [1.0, pytest.approx(0.5, abs=0.1)]
    assert all(row["same_bits"] for row in tables["folding"])
    assert report["device"].startswith("cpu") and report["versions"]["torch"] == torch.__version__
    assert report["ceilings"]["flops_per_second"] == 1e9


def test_a_table_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_checkpoint(tmp_path / "model", tiny_config())

    def broken(*_: object) -> None:
        raise RuntimeError("no such class\nmore")

    monkeypatch.setattr(bench, "stock_model", broken)
    code, report = run(
        monkeypatch, tmp_path, "--tables", "stock", "folding", "--ratios", "1", "--part-budgets", "2"
    )
    assert code == 1
    assert [(e["table"], e["of"], e["error"]) for e in report["errors"]] == [
        ("stock", "tiny", "RuntimeError: no such class"), ("stock", "checkpoint", "RuntimeError: no such class"),
    ]  # fmt: skip
    assert len(report["tables"]["folding"]) == 1


def test_the_floor_is_bytes_for_few_rows_and_flops_for_many() -> None:
    def floor(rows: int) -> dict[str, float]:
        return pass_floor_parts(
            Ceilings(bytes_per_second=4.2e12, flops_per_second=7.82e14), hidden=4096, layers=36, heads=32,
            kv_heads=8, width=128, inner=12288, vocab=151936, rows=rows, head_rows=32, prefix=512, bytes_per_value=2,
        )  # fmt: skip

    weights = 36 * 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288)
    assert floor(32)["products"] == pytest.approx(weights / 4.2e9, rel=0.02)
    assert floor(672)["products"] == pytest.approx(weights * 672 / 7.82e11, rel=0.02)
    assert floor(32)["head"] == floor(672)["head"] == pytest.approx(151936 * 4096 * 2 / 4.2e9, rel=0.01)
    assert floor(672)["attention"] > floor(32)["attention"] > 0
    assert floor(32)["logits"] == pytest.approx(8 * 32 * 151936 / 4.2e9)


def pass_row(numerics: str, budget: int, taken: float) -> dict[str, Any]:
    floor = {"products": 2.0, "attention": 0.5, "head": 1.0, "logits": 0.5}
    heads = ("block", "ahead")
    return {
        "shape": "SDAR-8B", "numerics": numerics, "prefix": 512, "budget": budget, "vendor_products_ms": 3.0,
        "head": {head: {"device_ms": taken} for head in heads}, "floor_ms": dict.fromkeys(heads, floor),
    }  # fmt: skip


def test_goals_stand_on_fast_passes_and_exact_is_over_the_fast_pass_of_its_budget() -> None:
    found = ratios(pass_row("fast", 8, 5.0))
    assert found["over_floor"]["block"] == 1.25 and found["over_vendor"]["block"] == 1.0
    assert found["floor_goal"] == 1.45 and ratios(pass_row("fast", 0, 5.0))["floor_goal"] == 1.3
    assert found["of_floor_goal"]["ahead"] == pytest.approx(1.25 / 1.45)
    assert found["of_vendor_goal"]["ahead"] == pytest.approx(1 / 1.05)
    assert "floor_goal" not in ratios(pass_row("exact", 8, 5.0))
    rows = [pass_row("fast", 8, 4.0), pass_row("exact", 8, 5.0), pass_row("exact", 20, 5.0)]
    first, second, third = add_exact_over_fast(rows)
    assert second["over_fast"] == {"block": 1.25, "ahead": 1.25}
    assert "over_fast" not in first and "over_fast" not in third


def test_the_time_of_a_kernel_begins_when_the_one_before_it_has_ended() -> None:
    overlapped = [(2.0, 6.0, "norm"), (0.0, 5.0, "product"), (9.0, 10.0, "norm"), (5.5, 5.8, "copy")]
    assert own_times(overlapped) == {"product": 5.0, "norm": 2.0, "copy": 0.0}


def test_kernels_are_grouped_by_name() -> None:
    times = {"_descriptor_kernel": 1.0, "nvjet_tst_128x64": 2.0, "attention_kernel": 3.0, "merge_kernel": 0.5,
             "_rms_norm_kernel": 0.25, "_tile_kernel": 4.0, "_embed_kernel": 0.125}  # fmt: skip
    assert group_kernels(times) == {
        "products": 3.0, "attention": 3.5, "norms and rotary": 0.25, "logits pass": 4.0, "rest": 0.125,
    }  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return random_engine(
        shape_config("tiny", 8), num_slots=4, max_length=64, device="cpu", dtype=torch.float32, numerics="exact",
        kernels="torch",
    )  # fmt: skip


def test_methods_stand_over_draft_free_with_their_verdict(engine: Engine) -> None:
    prompts = random_prompts(engine.config, 1, 9)
    given = parse_drafters([f"spot={REFERENCE}"])
    rows = {row["method"]: row for row in decode_rows(engine, [2], prompts, 8, given, repeats=1)}
    assert set(rows) == {"none", "ssd", "confidence_tree", "spiffy", "spot", "spot_gamma"}
    assert "calibrate" in rows["spiffy"]["not_run"] and "gamma" in rows["spot_gamma"]["not_run"]
    for method in ("none", "ssd", "confidence_tree", "spot"):
        row = rows[method]
        assert row["same_tokens"] == row["same_path"] == row["same_bits"] == row["items"] == 1
        assert row["host_ms_a_round"]["pass"] > 0
    ssd = rows["ssd"]
    expected = ssd["forward_ratio"] * ssd["pass_ms_draft_free"] / ssd["pass_ms"]
    assert ssd["of_goal"] == pytest.approx(ssd["over_draft_free"] / (0.9 * expected))
    assert rows["ssd"]["forwards"] <= rows["none"]["forwards"]


def test_folded_drafts_stand_over_unfolded_ones_by_tau(engine: Engine) -> None:
    prompts = random_prompts(engine.config, 1, 9)
    given = parse_drafters([f"spot={REFERENCE}"])
    rows = list(fold_rows(engine, [3], [0.0, 1e9], prompts, 8, given))
    assert "calibrate" in rows[0]["not_run"]
    nothing, everything = rows[1:]
    assert nothing["method"] == "spot" and nothing["recompute_ratio"] == 1.0 > everything["recompute_ratio"]
    assert nothing["same_tokens"] == nothing["same_path"] == nothing["same_bits"] == nothing["items"] == 1
    assert all(row["over_unfolded"] > 0 and row["over_draft_free"] > 0 for row in (nothing, everything))
    assert all(f"tau {row['tau']:g}" in row_line("folds", row) for row in (nothing, everything))


def test_samples_in_flight_keep_their_tokens_and_stand_over_the_compute_bound_rate(engine: Engine) -> None:
    one, two = batch_rows(engine, [1, 2], random_prompts(engine.config, 2, 9), 8, SLOW)
    assert one["same_bits"] == two["same_bits"] == 2
    assert two["of_compute_bound"] == pytest.approx(two["tokens_per_second"] / two["compute_bound_rate"])
    assert two["of_saturation_goal"] == pytest.approx(two["of_compute_bound"] / 0.6)


def test_the_share_of_drafting_is_part_of_a_round(engine: Engine) -> None:
    row = drafting_row("tiny", engine, 2, random_prompts(engine.config, 2, 9), 8)
    assert row["in_flight"] == 2 and row["growth"] == "device of the states"
    assert row["share"] > 0 and row["round_ms"]["draft"] > 0 and row["summary_and_noise_ms"] > 0
    assert "goal" not in row


def test_growth_is_timed_beside_whether_its_trees_are_the_hosts() -> None:
    rows = list(
        growth_rows(
            CPU,
            budgets=[3],
            widths=[2],
            temperatures=[0.0],
            length=8,
            kernels="torch",
            repeats=1,
            methods=["confidence_tree"],
        )
    )  # fmt: skip
    assert [row["distributions"] for row in rows] == ["flat", "usual", "sharp"]
    for row in rows:
        assert row["same"] == row["in_flight"] == 2
        assert row["levels"] >= 1 and row["draft_ms"] > 0 and row["device_ms"] > 0 and row["host_ms"] > 0


def test_drafters_are_named_with_their_files() -> None:
    found = parse_drafters(["spiffy=a.json", "spot_gamma=reference,gamma=0.01"])
    assert found["spiffy"] == {"graph": Path("a.json")}
    assert found["spot_gamma"] == {"checkpoint": find_order_checkpoint(REFERENCE), "gamma": 0.01}
    for text in ("ssd=a", "spot", "nothing=a", "spot=a,beta=1"):
        with pytest.raises(InputError, match="--drafters"):
            parse_drafters([text])


def test_rows_ahead_are_half_of_every_node() -> None:
    config = shape_config("SDAR-8B")
    assert [num_rows(config, budget, "ahead") for budget in (0, 8, 41)] == [16, 144, 672]
    assert num_rows(config, 41, "block") == 32


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_the_stock_class_computes_what_the_engine_computes(tmp_path: Path, qk_norm: bool) -> None:
    folder = tmp_path / "model"
    write_random_checkpoint(folder, tiny_config(qk_norm=qk_norm))
    config = check_checkpoint(folder)
    block = random_blocks(config, 1)
    stock = stock_model(config, CPU, torch.float32, folder)
    mask = torch.zeros(1, 1, config.block_length, config.block_length)
    with torch.inference_mode():
        expected = stock(input_ids=block.long(), attention_mask=mask).logits[0]
    engine = load_engine(folder, num_slots=1, max_length=64, self_test=False)
    zero = torch.zeros(1, dtype=torch.int32)
    logits = engine.logits(engine.forward(block, zero, zero, zero.bool())[0])[:, : config.vocab_size]
    keep = torch.arange(config.vocab_size) != config.mask_token_id
    torch.testing.assert_close(logits[:, keep], expected[:, keep], rtol=1e-5, atol=1e-5)


def test_a_slower_call_takes_longer() -> None:
    small, large = torch.randn(16, 16), torch.randn(512, 512)
    fast = measure(lambda: small @ small, CPU, repeats=5)
    slow = measure(lambda: large @ large, CPU, repeats=5)
    assert slow.median_ms > fast.median_ms
    assert fast.repeats == 5
    queued = measure_queued(lambda: large @ large, CPU, repeats=3)
    assert queued.median_ms < 5 * slow.median_ms


def test_only_a_pass_that_is_a_graph_is_queued_again(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="no graphs"):
        engine.queue_again()
    with pytest.raises(RuntimeError, match="no rows"):
        engine.queue_rows_again()
