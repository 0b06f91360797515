"""The bench of published shapes, on shapes that fit a test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dlmgrid.jobs import bench_families
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.family import KnownModel
from dlmgrid.workers.models.synthetic import tiny_family_config, write_full_shape_checkpoint


def small_shape(family: str) -> KnownModel:
    """A family under its published rule on a tiny body, in bf16, with special ids beyond the tokenizer's bytes."""
    config = replace(
        tiny_family_config(family, block_length=8),
        vocab_size=1024,
        hidden_size=32,
        mask_token_id=1000,
        stop_token_ids=(1001, 1002),
        eos_token_id=1001,
        pad_token_id=None,
        torch_dtype="bfloat16",
    )
    return KnownModel(name=f"owner/{family}", config=config)


def test_a_full_shape_is_written_in_shards_and_passes_the_check(tmp_path: Path) -> None:
    config = small_shape("llada2").config
    write_full_shape_checkpoint(tmp_path, config, shard_bytes=60_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 120_000 for path in shards)
    assert check_checkpoint(tmp_path) == config


def test_every_family_is_loaded_decoded_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [small_shape(family) for family in ("sdar", "llada2", "fast_dllm_v2", "nemotron")]
    broken = replace(models[0], name="owner/broken", config=replace(models[0].config, num_attention_heads=3))
    monkeypatch.setattr(bench_families, "known_models", lambda: (*models, broken))
    arguments = ["bench", "--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--gen-length", "8"]
    arguments += ["--budget", "2", "--folder", str(tmp_path), "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    assert bench_families.main() == 0
    rows = {row["model"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    for model in models:
        row = rows[model.name]
        assert row.get("error") is None
        for run in (row["draft_free"], row["drafted"]):
            assert (run["claim"], run["exact_tokens"], run["exact_path"], run["exact_bits"]) == (
                "exact", True, True, True,
            )  # fmt: skip
            assert run["pass_ms"] > 0
    assert "3 attention heads are not a multiple of 2" in rows["owner/broken"]["error"]
    out = capsys.readouterr().out
    assert out.count("TPB") == 2 * len(models)
    assert not list(tmp_path.glob("dlmgrid-shape-*"))


def test_a_model_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--models", "owner/none"])
    with pytest.raises(SystemExit):
        bench_families.main()
