"""The study's table: means over benchmarks, drafters told apart, goals measured from the lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.study import goals_of, read_replays, study_lines
from dlmgrid.workers.errors import InputError

NAMES = {"aaa": "marginal_gain", "bbb": "degree_1"}


def row(method: str, budget: int, nfe: int, *, benchmark: str = "words", **changes: Any) -> dict[str, Any]:
    """A replayed generation of 100 serialized forwards; its rounds accept two states each."""
    return {
        "model": "/data/model", "benchmark": benchmark, "method": method, "drafter_fingerprint": "", "budget": budget,
        "temperature": 0.0, "verification": "coupled", "decoder": "static", "commits_per_step": 1, "threshold": None,
        "window": "", "fused_commit": False, "gamma": None, "item_id": "1", "nfe_total": nfe, "nfe_reference": 100,
        "rounds": 2, "accepted": [1, 3], "drafted_nodes": 30,
    } | changes  # fmt: skip


def test_a_line_is_the_mean_of_its_benchmarks() -> None:
    rows = [row("ssd", 8, 50), row("ssd", 8, 30, item_id="2"), row("ssd", 8, 80, benchmark="functions")]
    (line,) = study_lines(rows, {})
    assert line.nfe_by_benchmark == {"words": 40, "functions": 80}
    assert (line.nfe, line.num_items, line.accepted_per_round) == (60, 3, 2)
    assert line.ratio == (200 / 80 + 100 / 80) / 2


def test_drafters_and_passes_have_lines_of_their_own() -> None:
    rows = [
        row("spiffy", 8, 50, drafter_fingerprint="aaa"),
        row("spiffy", 8, 60, drafter_fingerprint="cccccccc"),
        row("ssd", 8, 40, window="full", fused_commit=True),
        row("none", 0, 100),
    ]
    lines = study_lines(rows, NAMES)
    assert [(line.passes.decoder, line.method) for line in lines] == [
        ("static", "none"),
        ("static", "spiffy cccccc"),
        ("static", "spiffy marginal_gain"),
        ("static fused window full", "ssd"),
    ]


def test_goals_compare_with_the_best_graph_and_name_the_worst_task() -> None:
    rows = []
    for benchmark, spot in (("words", 40), ("functions", 47)):
        rows += [
            row("spot", 8, spot, benchmark=benchmark),
            row("spiffy", 8, 50, benchmark=benchmark, drafter_fingerprint="aaa"),
            row("spiffy", 8, 90, benchmark=benchmark, drafter_fingerprint="bbb"),
            row("ssd", 8, 60, benchmark=benchmark),
        ]
    goals = {goal.text: goal for goal in goals_of(study_lines(rows, NAMES))}
    over = goals["spot D = 8: NFE saved over spiffy marginal_gain"]
    assert over.measured == pytest.approx(0.13) and over.is_met
    worst = goals["spot D = 8: NFE saved over spiffy marginal_gain, functions"]
    assert worst.measured == pytest.approx(0.06) and not worst.is_met
    assert goals["spot D = 8: NFE saved over ssd"].measured == pytest.approx(1 - 43.5 / 60)
    assert not goals["spot D = 8: draft-free / NFE"].is_met


def test_gamma_is_held_against_the_same_order_model() -> None:
    rows = [row("spot", 20, 40), row("spot_gamma", 20, 43, drafted_nodes=15)]
    goals = {goal.text: goal for goal in goals_of(study_lines(rows, {}))}
    assert goals["spot_gamma D = 20: NFE above spot"].is_met
    assert goals["spot_gamma D = 20: drafted nodes saved over spot"].measured == 0.5


def test_a_folder_without_replays_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no replays; make them with dlmgrid replay"):
        read_replays([tmp_path])


def test_a_drafted_boundary_is_held_against_plain_draft_free_runs() -> None:
    passes = {"window": "full", "fused_commit": True, "nfe_reference": 95}
    rows = [row("none", 0, 100), row("spot", 8, 40, **passes)]
    (goal,) = goals_of(study_lines(rows, {}))
    assert (goal.measured, goal.wanted, goal.is_met) == (2.5, 2.7, False)
