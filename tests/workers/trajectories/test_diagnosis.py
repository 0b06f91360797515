"""Diagnosis, held against a count by hand over the recorded steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlmgrid.workers.trajectories import diagnose_process
from dlmgrid.workers.trajectories.diagnose_process import diagnosis_rows
from dlmgrid.workers.trajectories.diagnosis import MAX_DEPTH, Diagnosis, Quantity
from dlmgrid.workers.trajectories.replay import ReplayBatch
from dlmgrid.workers.trajectories.trajectory import Trajectory, load_trajectories


def diagnosed(trajectories: list[Trajectory]) -> dict[Quantity, tuple[float, int]]:
    found = Diagnosis()
    for trajectory in trajectories:
        found.add_batch(ReplayBatch([trajectory]))
    return {quantity: (value, count) for quantity, value, count in found.values()}


def blocks_of(trajectory: Trajectory) -> list[list[int]]:
    """The steps of each block."""
    starts = trajectory.block_starts.tolist()
    return [[step for step, start in enumerate(starts) if start == block] for block in sorted(set(starts))]


def share(hits: list[bool]) -> tuple[float, int]:
    return pytest.approx(sum(hits) / len(hits)), len(hits)


def test_greedy_quantities_equal_a_count_by_hand(record: Callable[..., Any]) -> None:
    trajectories = list(load_trajectories(record(decoder="static").path))
    tokens: list[bool] = []
    runs: list[bool] = []
    orders: dict[int, list[bool]] = {depth: [] for depth in range(1, MAX_DEPTH + 1)}
    second_block: list[bool] = []
    for trajectory in trajectories:
        for block, steps in enumerate(blocks_of(trajectory)):
            for step in steps[1:]:
                ((position, token),) = trajectory.commits[step]
                tokens.append(int(trajectory.token_ids[step - 1, position, 0]) == token)
                if block == 1:
                    second_block.append(tokens[-1])
                ahead = [
                    commit for later in steps[steps.index(step) :] for commit in trajectory.commits[later]
                ]
                if len(ahead) >= 8:
                    runs.append(
                        all(
                            token in trajectory.token_ids[step - 1, position, :8].tolist()
                            for position, token in ahead[:8]
                        )
                    )
            for depth, hits in orders.items():
                for step in steps[depth:]:
                    confidence = trajectory.probabilities[step - depth, :, 0]
                    masked = [at for at in range(trajectory.block_length) if trajectory.states[step, at] < 0]
                    likeliest = max(masked, key=lambda at: (float(confidence[at]), at))
                    hits.append(likeliest == trajectory.commits[step][0][0])
    found = diagnosed(trajectories)
    assert found[Quantity("stale_token_hit", None)] == share(tokens)
    assert found[Quantity("stale_token_hit", 1)] == share(second_block)
    assert found[Quantity("top8_coverage", None)] == share(runs)
    for depth, hits in orders.items():
        assert found[Quantity("order_hit", None, depth)] == share(hits)
    assert Quantity("argmax_share", None) not in found


def test_the_argmax_share_is_that_of_sampled_commits(record_tiny: Callable[..., Any]) -> None:
    trajectories = list(load_trajectories(record_tiny(temperature=1.0).path))
    hits = [
        int(trajectory.token_ids[step, position, 0]) == token
        for trajectory in trajectories
        for step, commits in enumerate(trajectory.commits)
        for position, token in commits
    ]
    found = diagnosed(trajectories)
    assert found[Quantity("argmax_share", None)] == share(hits)
    assert 0 < sum(hits) < len(hits)


def test_oracle_cuts_are_ratios_of_all_forwards(record_tiny: Callable[..., Any]) -> None:
    recording = record_tiny()
    trajectories = list(load_trajectories(recording.path))
    found = diagnosed(trajectories)
    serialized = sum(row["nfe_total"] for row in recording.decode(recording.cell()))
    value, count = found[Quantity("oracle_position_cut", None, None, 8)]
    assert count == len(trajectories)
    assert 1 < value <= serialized / sum(row["nfe_commit"] * 2 for row in recording.decode(recording.cell()))


def test_trees_are_described_as_a_replay_grows_them(record_tiny: Callable[..., Any]) -> None:
    recording = record_tiny()
    found = diagnosed(list(load_trajectories(recording.path)))
    for method in ("ssd", "confidence_tree"):
        live = recording.decode(recording.cell(method=method, budget=8))
        accepted = [count for row in live for count in row["accepted"]]
        assert found[Quantity(f"{method}_accepted", None, None, 8)] == (
            pytest.approx(sum(accepted) / len(accepted)),
            len(accepted),
        )
    drafted = sum(row["drafted_nodes"] for row in recording.decode(recording.cell(method="ssd", budget=8)))
    depth, rounds = found[Quantity("ssd_tree_depth", None, None, 8)]
    assert depth * rounds == pytest.approx(drafted), "a chain is as deep as it has states"
    assert found[Quantity("ssd_tree_width", None, None, 8)][0] <= 1
    assert found[Quantity("confidence_tree_tree_width", None, None, 8)][0] > 1


def test_parts_merged_are_the_whole(record_tiny: Callable[..., Any]) -> None:
    trajectories = list(load_trajectories(record_tiny(decoder="static").path))
    parts = []
    for some in (trajectories[:1], trajectories[1:]):
        parts.append(Diagnosis())
        parts[-1].add_batch(ReplayBatch(some))
    merged = Diagnosis()
    for part in parts:
        merged.merge(part)
    whole = Diagnosis()
    whole.add_batch(ReplayBatch(trajectories))
    assert list(merged.values()) == list(whole.values())


def test_processes_and_a_limit_keep_the_counts(
    record_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record_tiny(decoder="static").path
    alone = diagnosis_rows(path)
    monkeypatch.setattr(diagnose_process, "GENERATIONS_PER_PROCESS", 1)
    monkeypatch.setattr(diagnose_process, "available_cpus", lambda: 2)
    monkeypatch.setattr(diagnose_process, "part_size", lambda *_: 2)
    assert diagnosis_rows(path) == alone
    first = list(load_trajectories(path))[:2]
    found = diagnosed(first)
    for row in diagnosis_rows(path, limit=2):
        quantity = Quantity(row["quantity"], row["block"], row["depth"], row["draft_budget"])
        assert found[quantity] == (pytest.approx(row["value"]), row["count"])


def test_tokens_of_older_passes_are_committed_less_often(record_tiny: Callable[..., Any]) -> None:
    found = diagnosed(list(load_trajectories(record_tiny(decoder="static").path)))
    assert found[Quantity("aged_token_hit", None, 1)] == found[Quantity("stale_token_hit", None)]
    assert found[Quantity("aged_token_hit", None, 6)][0] < found[Quantity("aged_token_hit", None, 1)][0]
