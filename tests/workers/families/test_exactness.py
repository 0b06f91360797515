"""Every lossless method keeps to the serialized run on every family: tokens, path and bits, at T = 0 and T = 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.decoder import Decoder, Generation, Prompt
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_model import OrderModel
from dlmgrid.workers.drafting.spiffy import SpiffyDrafter
from dlmgrid.workers.drafting.spiffy_calibration import calibrate_graph
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.models.families import get_family
from dlmgrid.workers.trajectories.recording import TrajectoryRecorder
from dlmgrid.workers.trajectories.trajectory import load_trajectories
from dlmgrid.workers.unit_runner import decode_settings

LENGTH = 8
BUDGET = 6
BY_ENTROPY = {"decoder": "entropy_bounded", "threshold": 3.0, "confidence": "certainty"}
FAMILIES = ("sdar", "llada2", "fast_dllm_v2", "nemotron")
PROMPTS = [
    Prompt(item_id=f"item-{count}", repeat=0, token_ids=tuple((5 * index) % 251 for index in range(count)))
    for count in (6, 16)
]


def family_cell(family: str, **settings: Any) -> Cell:
    """A draft-free cell under the family's own rule, one position a step where that is a threshold too high for
    random weights."""
    rule = get_family(family).decoder
    values: dict[str, Any] = {
        "model": "tiny", "weight_fingerprint": "f" * 24, "benchmark": "words_train", "prompt_version": "1",
        "method": "none", "budget": 0, "block_length": LENGTH, "gen_length": 12, "seed": 3, "decoder": rule.decoder,
        "threshold": 0.4 if rule.threshold else None, "comparison": rule.comparison, "confidence": rule.confidence,
        "sub_block_length": 4 if rule.sub_block_length else 0,
    }  # fmt: skip
    return Cell(**(values | settings))


def decode(
    engine: Engine,
    cell: Cell,
    drafter: Drafter,
    *,
    max_in_flight: int,
    recorder: TrajectoryRecorder | None = None,
) -> list[Generation]:
    settings = decode_settings(cell, engine, profiled=False)
    return Decoder(engine, drafter, settings, recorder).decode(PROMPTS, max_in_flight)


def random_order_model() -> OrderModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OrderModel()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t:g}")
@pytest.mark.parametrize(
    ("family", "rule"), [*((family, {}) for family in FAMILIES), ("sdar", BY_ENTROPY)], ids=str
)
def test_drafted_runs_are_the_serialized_run(
    family: str, rule: dict[str, Any], temperature: float, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    _, folder = make_model(family, 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=2, max_length=64, self_test=False)
    cell = family_cell(family, temperature=temperature, **rule)
    recorder = TrajectoryRecorder()
    serialized = decode(engine, cell, none.build(), max_in_flight=1, recorder=recorder)
    recorder.write(tmp_path / "runs.parquet", cell.canonical(), [(p.item_id, p.repeat) for p in PROMPTS])
    graph = calibrate_graph(
        load_trajectories(tmp_path / "runs.parquet"), budget=BUDGET, selection="marginal_gain"
    )
    drafters: dict[str, Drafter] = {
        "none": none.build(),
        "ssd": ssd.build(),
        "confidence_tree": confidence_tree.build(),
        "spiffy": SpiffyDrafter(graph),
        "spot": SpotDrafter(random_order_model()),
    }
    accepted = 0
    for name, drafter in drafters.items():
        drafted = replace(cell, method="ssd", budget=0 if name == "none" else BUDGET)
        for ours, theirs in zip(decode(engine, drafted, drafter, max_in_flight=2), serialized, strict=True):
            assert ours.token_ids == theirs.token_ids, name
            assert (ours.steps, ours.seeds) == (theirs.steps, theirs.seeds), name
            assert ours.digests == theirs.digests, name
            assert ours.nfe_commit == theirs.nfe_commit, name
            accepted += sum(ours.accepted)
    assert accepted > 0


@pytest.mark.parametrize("family", ["fast_dllm_v2", "nemotron"])
def test_a_drafted_run_ends_inside_a_block_where_the_serialized_one_does(
    family: str, make_model: Callable[..., Any]
) -> None:
    config, folder = make_model(family, 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=2, max_length=64, self_test=False)
    cell = family_cell(family, temperature=0.0)
    free = decode(engine, cell, none.build(), max_in_flight=1)
    stop = free[0].token_ids[9]
    engine.config = replace(config, stop_token_ids=(stop,))
    serialized = decode(engine, cell, none.build(), max_in_flight=1)
    assert serialized[0].stop_reason == "eos"
    assert len(serialized[0].steps) < len(free[0].steps)
    drafted = decode(engine, replace(cell, method="ssd", budget=BUDGET), ssd.build(), max_in_flight=2)
    for ours, theirs in zip(drafted, serialized, strict=True):
        assert (ours.token_ids, ours.steps, ours.digests) == (theirs.token_ids, theirs.steps, theirs.digests)
        assert ours.stop_reason == theirs.stop_reason


def test_the_autoregressive_mode_can_be_drafted_too(make_model: Callable[..., Any]) -> None:
    _, folder = make_model("nemotron", 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=2, max_length=64, self_test=False)
    cell = replace(
        family_cell("nemotron", temperature=1.0),
        decoder="causal", threshold=None, comparison=None, confidence="tempered",
    )  # fmt: skip
    serialized = decode(engine, cell, none.build(), max_in_flight=1)
    drafted = decode(engine, replace(cell, method="ssd", budget=3), ssd.build(), max_in_flight=2)
    for ours, theirs in zip(drafted, serialized, strict=True):
        assert (ours.steps, ours.seeds, ours.digests) == (theirs.steps, theirs.seeds, theirs.digests)
        assert sum(ours.accepted) + ours.nfe_denoise == theirs.nfe_denoise


@pytest.mark.parametrize("family", ["fast_dllm_v2", "nemotron"])
def test_no_pass_joins_a_commit_with_a_block_that_it_seeds(
    family: str, make_model: Callable[..., Any]
) -> None:
    _, folder = make_model(family, 0.3, block_length=LENGTH)
    engine = load_engine(folder, num_slots=1, max_length=64, self_test=False)
    with pytest.raises(ValueError, match="the commit pass gives the next block's first token"):
        decode_settings(family_cell(family, temperature=0.0, fused_commit=True), engine, profiled=False)
