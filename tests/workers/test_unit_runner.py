"""Work units on the shipped model: rows, verdicts, and items that cannot be decoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dlmgrid.workers.benchmarks.words import PROMPT_VERSION, held_out_items
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.decoder import Decoder
from dlmgrid.workers.errors import InputError, OutOfMemoryError, TransientError
from dlmgrid.workers.items import Item, write_items
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.recompute import recompute_rows
from dlmgrid.workers.tables import GENERATIONS, deterministic_columns
from dlmgrid.workers.unit_runner import UnitRunner
from dlmgrid.workers.units import Key, WorkUnit


@pytest.fixture(scope="module")
def runner() -> UnitRunner:
    return UnitRunner(actor="test")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    path = tmp_path / "words.jsonl"
    items = held_out_items(3)
    broken = Item(item_id="too-long", messages=[{"role": "user", "content": "word " * 20000}])
    write_items(path, [*items, broken])
    return path


def item_ids(inputs: Path) -> list[str]:
    return [item.item_id for item in held_out_items(3)]


def make_unit(inputs: Path, output: Path, item_ids: list[str], **settings: Any) -> WorkUnit:
    values: dict[str, Any] = {
        "model": "reference", "benchmark": "words", "prompt_version": PROMPT_VERSION, "method": "none",
        "budget": 0, "temperature": 0.0, "block_length": 32, "gen_length": 48,
    }  # fmt: skip
    cell = Cell(**(values | settings))
    return WorkUnit(
        cell=cell,
        keys=tuple(Key(item_id, 0) for item_id in item_ids),
        checkpoint=str(resolve_checkpoint("reference")),
        inputs=str(inputs),
        output=str(output),
    )


def read(path: Path) -> list[dict[str, Any]]:
    table = pq.read_table(path)
    assert table.schema.equals(GENERATIONS)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_all_methods_are_exact_and_decode_again(
    runner: UnitRunner, inputs: Path, tmp_path: Path, temperature: float
) -> None:
    ids = item_ids(inputs)
    reference = make_unit(inputs, tmp_path / "none.parquet", ids, temperature=temperature)
    result = runner.run(reference)
    assert (result.num_rows, result.num_errors, result.num_inexact, result.num_unchecked) == (3, 0, 0, 0)
    for method in ("ssd", "confidence_tree"):
        unit = make_unit(
            inputs, tmp_path / f"{method}.parquet", ids, temperature=temperature, method=method, budget=6
        )
        runner.run(replace(unit, reference_shards=(reference.output,)))
        rows = read(Path(unit.output))
        assert [row["item_id"] for row in rows] == ids
        for row, serialized in zip(rows, read(Path(reference.output)), strict=True):
            assert row["exact_tokens"] and row["exact_path"] and row["exact_bits"]
            assert row["claim"] == "exact" and row["error"] is None
            assert row["reference_key"] == serialized["reference_key"]
            assert row["token_ids"] == serialized["token_ids"]
            assert row["nfe_total"] < serialized["nfe_total"]
            assert row["nfe_total"] == row["nfe_prefill"] + row["nfe_denoise"] + row["nfe_commit"]
            assert row["seconds_wall"] > 0 and row["seconds_verify"] is None
        again = recompute_rows(rows, Path(unit.checkpoint), inputs)
        varying = {
            "exact_tokens", "exact_path", "exact_bits", "first_divergence_step", "first_divergence_position",
            "top2_margin",
        }  # fmt: skip
        columns = set(deterministic_columns(GENERATIONS)) - varying
        for row, once_more in zip(rows, again, strict=True):
            assert {name: row[name] for name in columns} == {name: once_more[name] for name in columns}


def test_every_decoder_setting_reaches_the_decoder(runner: UnitRunner, inputs: Path, tmp_path: Path) -> None:
    ids = item_ids(inputs)[:2]
    decoder: dict[str, Any] = {"decoder": "factor", "factor": 1.0, "temperature": 1.5}
    reference = make_unit(inputs, tmp_path / "none.parquet", ids, **decoder)
    assert runner.run(reference).num_inexact == 0
    serialized = read(Path(reference.output))
    assert all(row["nfe_denoise"] < len(row["commit_steps"]) for row in serialized)
    accelerated = {"method": "ssd", "budget": 6, **decoder}
    found = {}
    for name, settings in {
        "plain": {},
        "fused": {"fused_commit": True},
        "greedy": {"verification": "greedy_match"},
    }.items():
        unit = make_unit(inputs, tmp_path / f"{name}.parquet", ids, **accelerated, **settings)
        result = runner.run(replace(unit, reference_shards=(reference.output,)))
        assert (result.num_errors, result.num_inexact, result.num_unchecked) == (0, 0, 0)
        found[name] = read(Path(unit.output))
    for plain, fused in zip(found["plain"], found["fused"], strict=True):
        assert plain["exact_bits"] and fused["exact_bits"]
        assert fused["fused_commit"] and fused["nfe_commit"] == 1
        assert fused["nfe_total"] == plain["nfe_total"] - (plain["nfe_commit"] - 1)
    assert {row["claim"] for row in found["greedy"]} == {"approximate"}
    assert not all(row["exact_path"] for row in found["greedy"])
    for row in found["greedy"]:
        assert row["exact_path"] or row["first_divergence_step"] is not None


def test_a_prompt_that_does_not_fit_is_a_row_with_its_error(
    runner: UnitRunner, inputs: Path, tmp_path: Path
) -> None:
    unit = make_unit(inputs, tmp_path / "unit.parquet", ["too-long", *item_ids(inputs)])
    result = runner.run(unit)
    rows = read(Path(unit.output))
    assert result.num_errors == 1
    assert "lower gen_length" in rows[0]["error"]
    assert rows[0]["token_ids"] is None
    assert all(row["exact_bits"] for row in rows[1:])


def test_an_item_that_breaks_the_model_fails_alone(
    runner: UnitRunner, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = item_ids(inputs)
    decode = Decoder.decode

    def breaking(self: Decoder, prompts: Any, max_in_flight: int | None = None) -> Any:
        if any(prompt.item_id == ids[1] for prompt in prompts):
            raise RuntimeError("index out of range in self")
        return decode(self, prompts, max_in_flight)

    monkeypatch.setattr(Decoder, "decode", breaking)
    unit = make_unit(inputs, tmp_path / "unit.parquet", ids)
    assert runner.run(unit).num_errors == 1
    rows = read(Path(unit.output))
    assert [row["error"] for row in rows] == [None, "RuntimeError: index out of range in self", None]
    assert rows[0]["exact_bits"] and rows[2]["exact_bits"]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), TransientError),
        (RuntimeError("every item"), TransientError),
    ],
)
def test_failures_of_a_whole_unit_reach_the_driver(
    runner: UnitRunner,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    expected: type[Exception],
) -> None:
    def failing(*_: Any) -> Any:
        raise raised

    monkeypatch.setattr(Decoder, "decode", failing)
    unit = make_unit(inputs, tmp_path / "unit.parquet", item_ids(inputs))
    with pytest.raises(expected):
        runner.run(unit)
    assert not Path(unit.output).exists()


def test_without_its_reference_a_row_has_no_verdict_and_says_so(
    runner: UnitRunner, inputs: Path, tmp_path: Path
) -> None:
    unit = make_unit(inputs, tmp_path / "unit.parquet", item_ids(inputs)[:1], method="ssd", budget=4)
    assert runner.run(unit).num_unchecked == 1
    (row,) = read(Path(unit.output))
    assert row["exact_tokens"] is None and row["token_ids"]
    assert row["error"] == "the serialized run of this item is missing"


def test_a_reference_of_another_prompt_is_not_compared(
    runner: UnitRunner, inputs: Path, tmp_path: Path
) -> None:
    ids = item_ids(inputs)
    reference = make_unit(inputs, tmp_path / "none.parquet", ids[:1])
    runner.run(reference)
    other = tmp_path / "other.jsonl"
    write_items(other, [Item(item_id=ids[0], messages=[{"role": "user", "content": "What is 1 + 2?"}])])
    unit = make_unit(other, tmp_path / "ssd.parquet", ids[:1], method="ssd", budget=4)
    runner.run(replace(unit, reference_shards=(reference.output,)))
    (row,) = read(Path(unit.output))
    assert row["exact_tokens"] is None and "another prompt" in row["error"]


def test_changed_weights_are_refused(inputs: Path, tmp_path: Path) -> None:
    unit = make_unit(inputs, tmp_path / "unit.parquet", item_ids(inputs)[:1], weight_fingerprint="0" * 24)
    with pytest.raises(InputError, match="the weights changed since the run was planned"):
        UnitRunner().run(unit)


def test_a_profiled_unit_times_the_parts_and_not_the_whole(
    runner: UnitRunner, inputs: Path, tmp_path: Path
) -> None:
    unit = make_unit(inputs, tmp_path / "unit.parquet", item_ids(inputs)[:1])
    runner.run(replace(unit, profiled=True))
    (row,) = read(Path(unit.output))
    assert row["profiled"] and row["seconds_wall"] is None and row["tokens_per_second"] is None
    assert row["seconds_verify"] > 0 and row["seconds_sample"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_decodes_and_judges_every_row(inputs: Path, tmp_path: Path, dtype: str) -> None:
    runner = UnitRunner("cuda")
    ids = item_ids(inputs)
    settings: dict[str, Any] = {"numerics": "fast", "dtype": dtype}
    reference = make_unit(inputs, tmp_path / "none.parquet", ids, **settings)
    runner.run(reference)
    unit = make_unit(inputs, tmp_path / "ssd.parquet", ids, method="ssd", budget=6, **settings)
    result = runner.run(replace(unit, reference_shards=(reference.output,)))
    assert (result.num_errors, result.num_unchecked) == (0, 0)
    rows = read(Path(unit.output))
    assert {row["claim"] for row in rows} == {"approximate"}
    if dtype == "float32":
        assert all(row["exact_tokens"] for row in rows)
