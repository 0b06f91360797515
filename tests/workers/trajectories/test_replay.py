"""Replay equals live decoding: forwards, accepted steps, drafted nodes and rows, for every lossless method."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import DraftInputs
from dlmgrid.workers.drafting.ssd import grow_chain
from dlmgrid.workers.trajectories.diagnostic_drafters import DIAGNOSTIC_DRAFTERS
from dlmgrid.workers.trajectories.replay import DraftWithFuture, Future, ReplayBatch, Replayed, without_future
from dlmgrid.workers.trajectories.trajectory import load_trajectories
from dlmgrid.workers.unit_runner import build_drafter

RULES: dict[str, dict[str, Any]] = {
    "static-1": {"decoder": "static"},
    "static-2": {"decoder": "static", "commits_per_step": 2},
    "threshold": {"decoder": "threshold", "threshold": 0.8},
}
COUNTS = (
    "nfe_prefill",
    "nfe_denoise",
    "nfe_commit",
    "nfe_total",
    "accepted",
    "drafted_nodes",
    "rows_computed",
)


def drafting(cell: Cell) -> DraftWithFuture:
    return without_future(build_drafter(cell))


def compare(recording: Any, cases: list[tuple[str, int]], **changes: Any) -> None:
    batch = ReplayBatch(list(load_trajectories(recording.path)))
    for method, budget in cases:
        cell = recording.cell(method=method, budget=budget, **changes)
        live = recording.decode(cell)
        for row, replayed in zip(live, batch.replay(cell, drafting(cell)), strict=True):
            assert (row["item_id"], row["prompt_tokens"]) == (replayed.item_id, replayed.prompt_tokens)
            assert {name: row[name] for name in COUNTS} == {name: getattr(replayed, name) for name in COUNTS}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_replayed_counts_are_the_live_ones(
    record_tiny: Callable[..., Any], rule: dict[str, Any], temperature: float
) -> None:
    cases = [("none", 0), ("ssd", 0), *itertools.product(("ssd", "confidence_tree"), (1, 6, 12))]
    compare(record_tiny(**rule, temperature=temperature), cases)


def test_an_uncoupled_drafter_is_replayed_under_its_own_noise(record_tiny: Callable[..., Any]) -> None:
    cases = [("ssd", 6), ("confidence_tree", 6)]
    compare(record_tiny(temperature=1.0), cases, verification="uncoupled")


@pytest.mark.parametrize(
    ("rule", "temperature", "noise", "cases"),
    [
        ("static-1", 0.0, "commit_count", [("none", 0), ("ssd", 6), ("confidence_tree", 12)]),
        ("static-1", 1.0, "commit_count", [("confidence_tree", 6)]),
        ("static-1", 1.5, "per_position", [("ssd", 1), ("confidence_tree", 6)]),
        ("static-2", 1.0, "commit_count", [("ssd", 12), ("confidence_tree", 6)]),
        ("threshold", 0.0, "commit_count", [("ssd", 6), ("confidence_tree", 1)]),
        ("threshold", 1.5, "commit_count", [("confidence_tree", 6)]),
    ],
)
def test_replayed_counts_are_the_live_ones_of_the_shipped_model(
    record: Callable[..., Any], rule: str, temperature: float, noise: str, cases: list[tuple[str, int]]
) -> None:
    compare(record(**RULES[rule], temperature=temperature, noise=noise), cases)


def totals(replayed: list[Replayed]) -> int:
    return sum(result.nfe_total for result in replayed)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_oracles_need_no_more_forwards_than_what_they_bound(
    record_tiny: Callable[..., Any], rule: dict[str, Any], temperature: float
) -> None:
    recording = record_tiny(**rule, temperature=temperature)
    batch = ReplayBatch(list(load_trajectories(recording.path)))
    nfe = {
        method: totals(batch.replay(recording.cell(method=method, budget=8), draft))
        for method, draft in DIAGNOSTIC_DRAFTERS.items()
    }
    chain_cell, tree_cell = (recording.cell(method=name, budget=8) for name in ("ssd", "confidence_tree"))
    chain = totals(batch.replay(chain_cell, drafting(chain_cell)))
    tree = totals(batch.replay(tree_cell, drafting(tree_cell)))
    serialized = totals(batch.replay(recording.cell(), drafting(recording.cell())))
    assert nfe["oracle_position"] <= chain
    assert nfe["stale_order"] <= chain
    assert nfe["oracle_token"] <= tree
    assert max(nfe.values()) < serialized


def test_a_drafter_that_knows_positions_and_tokens_needs_two_rounds_a_block(
    record_tiny: Callable[..., Any],
) -> None:
    recording = record_tiny()
    batch = ReplayBatch(list(load_trajectories(recording.path)))

    def know_all(inputs: DraftInputs, tree: DraftTree, future: Future) -> None:
        grow_chain(
            inputs, tree, lambda states, stale, depth: (future.steps_ahead == depth - 1, future.tokens)
        )

    for replayed in batch.replay(recording.cell(method="ssd", budget=8), know_all):
        assert replayed.nfe_denoise == 2 * replayed.nfe_commit
        assert replayed.accepted[::2] == [0] * replayed.nfe_commit


def test_another_serialized_run_is_refused(record_tiny: Callable[..., Any]) -> None:
    recording = record_tiny()
    batch = ReplayBatch(list(load_trajectories(recording.path)))
    with pytest.raises(ValueError, match="another serialized run"):
        batch.replay(recording.cell(temperature=1.0), DIAGNOSTIC_DRAFTERS["oracle_token"])
    sampled = record_tiny(temperature=1.0)
    biased = sampled.cell(method="ssd", budget=2, verification="greedy_match")
    with pytest.raises(ValueError, match="'greedy_match' cannot be replayed"):
        ReplayBatch(list(load_trajectories(sampled.path))).replay(biased, DIAGNOSTIC_DRAFTERS["stale_order"])
    with pytest.raises(ValueError, match="one recorded cell"):
        ReplayBatch([])


def test_the_reference_has_its_commit_passes_apart(record_tiny: Callable[..., Any]) -> None:
    batch = ReplayBatch(list(load_trajectories(record_tiny(decoder="static").path)))
    plain = batch.replay(batch.cell, drafting(batch.cell))
    fused_cell = replace(batch.cell, fused_commit=True)
    fused = batch.replay(fused_cell, drafting(fused_cell))
    assert sum(one.nfe_total for one in fused) < sum(one.nfe_total for one in plain)
    for one, other in zip(plain, fused, strict=True):
        assert one.nfe_total == one.nfe_reference == other.nfe_reference
