"""The benchmark of verification passes: it times the same work on both sides and writes where it was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from dlmgrid.jobs import bench
from dlmgrid.kernels.benchmark import measure
from dlmgrid.workers.engine.engine import load_engine
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.synthetic import tiny_config, write_random_checkpoint


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_a_report_has_every_budget_and_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qk_norm: bool
) -> None:
    write_random_checkpoint(tmp_path / "model", tiny_config(qk_norm=qk_norm))
    out = tmp_path / "bench.json"
    monkeypatch.setattr(
        sys, "argv",
        ["bench", "--checkpoint", str(tmp_path / "model"), "--device", "cpu", "--prefix", "64",
         "--budgets", "0", "2", "--repeats", "2", "--out", str(out),
         "--shapes", "tiny", "--taus", "0", "100", "--items", "1", "--gen-length", "8", "--in-flight", "1"],
    )  # fmt: skip
    assert bench.main() == 0
    report = json.loads(out.read_text())
    assert [(row["numerics"], row["budget"]) for row in report["rows"]] == [
        ("exact", 0), ("exact", 2), ("fast", 0), ("fast", 2),
    ]  # fmt: skip
    for row in report["rows"]:
        assert row["engine"]["fastest_ms"] <= row["engine"]["median_ms"] <= row["engine"]["slowest_ms"]
        assert row["speed_up"] == pytest.approx(row["transformers"]["median_ms"] / row["engine"]["median_ms"])
    tables = report["tables"]
    assert {row["budget"] for row in tables["passes"]} == {0, 2}
    assert all(
        row["over_floor"] == row["pass"]["median_ms"] / row["floor_ms"] > 0 for row in tables["passes"]
    )
    assert sum("over_fast" in row for row in tables["passes"]) == 2
    assert [row["recompute_ratio"] for row in tables["folded"]] == [1.0, 0.0]
    assert [(row["method"], row["budget"]) for row in tables["decoding"]] == [
        ("none", 0), ("ssd", 2), ("confidence_tree", 2),
    ]  # fmt: skip
    assert all(row["same_bits"] == row["items"] == 1 for row in tables["decoding"] + tables["in_flight"])
    assert {row["method"] for row in tables["parts"]} == {"none", "ssd", "confidence_tree"}
    assert report["device"].startswith("cpu") and report["versions"]["torch"] == torch.__version__


def test_the_stock_class_computes_what_the_engine_computes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_random_checkpoint(folder, tiny_config())
    config = check_checkpoint(folder)
    block = bench.random_tokens(config, 1, config.block_length)
    stock = bench.stock_model(folder, config, torch.device("cpu"), torch.float32)
    mask = torch.zeros(1, 1, config.block_length, config.block_length)
    with torch.inference_mode():
        expected = stock(input_ids=block.long(), attention_mask=mask).logits[0]
    engine = load_engine(folder, num_slots=1, max_length=64, self_test=False)
    zero = torch.zeros(1, dtype=torch.int32)
    logits = engine.logits(engine.forward(block, zero, zero, zero.bool())[0])[:, : config.vocab_size]
    keep = torch.arange(config.vocab_size) != config.mask_token_id
    torch.testing.assert_close(logits[:, keep], expected[:, keep], rtol=1e-5, atol=1e-5)


def test_a_slower_call_takes_longer() -> None:
    cpu = torch.device("cpu")
    small, large = torch.randn(16, 16), torch.randn(512, 512)
    fast = measure(lambda: small @ small, cpu, repeats=5)
    slow = measure(lambda: large @ large, cpu, repeats=5)
    assert slow.median_ms > fast.median_ms
    assert fast.repeats == 5
