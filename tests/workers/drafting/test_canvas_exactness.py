"""Every lossless method on every bidirectional model and cache: tokens, path and bits of the serialized run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.canvas_decoder import CanvasDecoder
from dlmgrid.workers.decoding.commit_rules import build_rule
from dlmgrid.workers.decoding.decoder import DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import confidence_tree, none, ssd
from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_model import OrderModel
from dlmgrid.workers.drafting.spiffy import SpiffyDrafter
from dlmgrid.workers.drafting.spiffy_graph import DraftGraph, GraphKey, GraphNode
from dlmgrid.workers.drafting.spot import SpotDrafter
from dlmgrid.workers.engine.canvas import CanvasEngine, load_canvas_engine
from dlmgrid.workers.testing.tiny_canvas import CANVAS_FAMILIES, write_tiny_canvas
from dlmgrid.workers.trajectories.recording import TrajectoryRecorder
from dlmgrid.workers.trajectories.replay import ReplayBatch, without_future
from dlmgrid.workers.trajectories.trajectory import load_trajectories

GEN, LENGTH, BUDGET = 16, 8, 5
PROMPTS = [
    Prompt(item_id=f"item-{size}", repeat=0, token_ids=tuple(97 + i % 26 for i in range(size)))
    for size in (1, 21)
]

# From the root: the first position's first and second token, then positions one after another.
NODES = (
    GraphNode(pairs=((0, 0),), parents=(-1,), count=8),
    GraphNode(pairs=((0, 1),), parents=(-1,), count=2),
    GraphNode(pairs=((1, 0),), parents=(-1,), count=2),
    GraphNode(pairs=((0, 0), (1, 0)), parents=(0, 2), count=4),
    GraphNode(pairs=((0, 0), (1, 0), (2, 0)), parents=(3,), count=1),
)


def drafters() -> dict[str, Drafter]:
    key = GraphKey(
        weight_fingerprint="", decoder="static", commits_per_step=1, threshold=None, temperature=0.0,
        noise="commit_count", block_length=LENGTH,
    )  # fmt: skip
    graph = DraftGraph(
        key=key, selection="marginal_gain", budget=BUDGET, num_roots=10, calibration={}, nodes=NODES
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order = OrderModel()
    return {
        "ssd": ssd.build(),
        "confidence_tree": confidence_tree.build(),
        "spiffy": SpiffyDrafter(graph),
        "spot": SpotDrafter(order),
        "spot_gamma": SpotDrafter(order, min_log_mass=math.log(0.01)),
    }


DECODERS: dict[str, list[dict[str, Any]]] = {
    "llada": [
        {"decoder": "llada", "steps": GEN, "confidence": "plain"},
        {"decoder": "threshold", "threshold": 0.3, "comparison": "fast_dllm", "confidence": "plain"},
        {"decoder": "llada", "steps": 6, "confidence": "random", "eos_policy": "confidence_eos_eot_inf"},
    ],
    "dream": [
        {"decoder": "dream", "steps": GEN + 8, "confidence": "entropy", "top_p": 0.9},
        {"decoder": "dream", "steps": GEN, "confidence": "origin"},
        {"decoder": "dream", "steps": GEN, "confidence": "topk_margin", "alg_temp": 0.3},
    ],
}


@pytest.fixture(scope="module", params=CANVAS_FAMILIES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CanvasEngine]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_tiny_canvas(folder, request.param, scale=0.25, num_hidden_layers=1)
    return {
        cache: load_canvas_engine(folder, cache=cache, num_slots=2, max_length=21 + GEN, self_test=False)
        for cache in ("none", "prefix", "dual")
    }


def decode(
    engine: CanvasEngine,
    cell: Cell,
    drafter: Drafter | None,
    in_flight: int,
    recorder: TrajectoryRecorder | None = None,
) -> list[Generation]:
    settings = DecodeSettings(
        block_length=cell.block_length, gen_length=GEN, budget=BUDGET if drafter else 0,
        temperature=cell.temperature, rule=build_rule(cell), noise=NoiseTable(5), stop_token_ids=(),
        verification=cell.verification, stop="full", grid="prompt", end_token_ids=engine.config.end_token_ids,
    )  # fmt: skip
    return CanvasDecoder(engine, drafter or none.build(), settings, recorder).decode(PROMPTS, in_flight)


def make_cell(engine: CanvasEngine, temperature: float, settings: dict[str, Any], **more: Any) -> Cell:
    return Cell(
        model="tiny", family=engine.config.family, benchmark="b", prompt_version="1", method="none", budget=0,
        temperature=temperature, gen_length=GEN, block_length=LENGTH, cache=engine.cache, **settings, **more,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_every_method_walks_the_serialized_path_of_its_cache(
    engines: dict[str, CanvasEngine], cache: str, temperature: float
) -> None:
    engine = engines[cache]
    cell = make_cell(engine, temperature, DECODERS[engine.config.family][0])
    serialized = decode(engine, cell, None, 1)
    for name, drafter in drafters().items():
        drafted = decode(engine, cell, drafter, 2)
        check(drafted, serialized, name)
        if name in ("ssd", "confidence_tree"):
            assert sum(g.nfe_denoise for g in drafted) < sum(g.nfe_denoise for g in serialized)


@pytest.mark.parametrize(("cache", "temperature"), [("none", 0.0), ("dual", 1.0)])
@pytest.mark.parametrize("rule", [1, 2])
def test_every_published_rule_is_exact_when_drafted(
    engines: dict[str, CanvasEngine], cache: str, temperature: float, rule: int
) -> None:
    engine = engines[cache]
    cell = make_cell(engine, temperature, DECODERS[engine.config.family][rule])
    check(decode(engine, cell, confidence_tree.build(), 2), decode(engine, cell, None, 1), "confidence_tree")


def check(drafted: list[Generation], serialized: list[Generation], name: str) -> None:
    for ours, theirs in zip(drafted, serialized, strict=True):
        assert ours.token_ids == theirs.token_ids, name
        assert ours.steps == theirs.steps, name
        assert ours.digests == theirs.digests, name
        assert sum(ours.accepted) + ours.nfe_denoise == len(ours.steps), name


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_rows_are_whole_canvases_or_blocks(engines: dict[str, CanvasEngine], cache: str) -> None:
    engine = engines[cache]
    cell = make_cell(engine, 0.0, DECODERS[engine.config.family][0])
    for generation in decode(engine, cell, ssd.build(), 2):
        assert generation.drafted_nodes > 0
        assert generation.rows_computed == rows_of(generation, cache)


def rows_of(generation: Generation, cache: str) -> int:
    """Rows that rounds and drafted nodes take."""
    canvas = len(generation.prompt.token_ids) + GEN
    branches = generation.nfe_denoise + generation.drafted_nodes
    if cache == "none":
        return branches * canvas
    num_blocks = GEN // LENGTH
    return num_blocks * canvas + (branches - num_blocks) * LENGTH


def test_uncoupled_noise_keeps_to_the_path_too(engines: dict[str, CanvasEngine]) -> None:
    engine = engines["dual"]
    cell = make_cell(engine, 1.0, DECODERS[engine.config.family][0], verification="uncoupled")
    check(decode(engine, cell, ssd.build(), 2), decode(engine, cell, None, 1), "ssd")


def test_a_row_says_how_its_cache_relates_to_the_model() -> None:
    base: dict[str, Any] = {
        "model": "m", "benchmark": "b", "prompt_version": "1", "method": "ssd", "budget": 4, "temperature": 0.0,
        "block_length": 8, "gen_length": 16,
    }  # fmt: skip
    claims = {cache: Cell(**base, cache=cache).claim for cache in ("block", "none", "prefix", "dual")}
    assert claims == {"block": "exact", "none": "exact", "prefix": "approximate", "dual": "approximate"}
    assert Cell(**base, cache="dual").keeps_to_reference
    assert not Cell(**base, cache="dual", numerics="fast").keeps_to_reference
    assert Cell(**base, cache="dual").reference().cache == "dual"


def test_recorded_runs_replay_to_the_same_counts(engines: dict[str, CanvasEngine], tmp_path: Path) -> None:
    for cache, engine in engines.items():
        cell = make_cell(engine, 0.0, {"decoder": "static", "confidence": "plain"}).canonical()
        recorder = TrajectoryRecorder()
        decode(engine, cell, None, 2, recorder)
        path = tmp_path / f"{cache}.parquet"
        recorder.write(path, cell, [(prompt.item_id, 0) for prompt in PROMPTS])
        batch = ReplayBatch(list(load_trajectories(path)))
        drafter = confidence_tree.build()
        drafted = decode(engine, cell, drafter, 2)
        with torch.inference_mode():
            replayed = batch.replay(
                replace(cell, method="confidence_tree", budget=BUDGET),
                without_future(drafter),
            )
        for live, counts in zip(drafted, replayed, strict=True):
            assert live.accepted == counts.accepted
            assert (live.nfe_denoise, live.rows_computed) == (counts.nfe_total, counts.rows_computed)
