"""Commit rules at their edges: comparisons on the threshold, the factor rule, ties, and what is never opened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.commit_rules import (
    COMPARISONS,
    build_rule,
    entropy_bounded,
    factor,
    static,
    threshold,
)


def select(rule_name: str, masked: list[bool], confidence: list[float], **settings: float | str) -> list[int]:
    """The positions that a threshold or factor rule opens."""
    value = settings.pop("value")
    assert isinstance(value, float)
    rule = (
        factor(value) if rule_name == "factor" else threshold(value, comparison=str(settings["comparison"]))
    )
    picked = rule.select(torch.tensor([masked]), torch.tensor([confidence]))
    return picked[0].nonzero().flatten().tolist()


def allowed_by_factor(confidence: list[float], value: float) -> set[int]:
    """The definition: the largest n with (n + 1)(1 - c(n)) ≤ f, at least one."""
    ranked = sorted(range(len(confidence)), key=lambda position: (-confidence[position], position))
    passing = [n for n in range(1, len(ranked) + 1) if (n + 1) * (1 - confidence[ranked[n - 1]]) <= value]
    return set(ranked[: max(passing, default=1)])


def published_factor_loop(confidence: list[float], value: float) -> int:
    """How many positions the published loop commits, written as it stands there."""
    ranked = sorted(confidence, reverse=True)
    thresholds = [-1.0] + [1 - value / (n + 1) for n in range(2, len(ranked) + 1)]
    failures = [index for index, needed in enumerate(thresholds) if ranked[index] < needed]
    index = failures[0] if failures else len(ranked) - 1
    return index + 1 if index in (0, len(ranked) - 1) else index


def test_factor_commits_the_largest_allowed_count_and_leaves_a_last_failure_masked() -> None:
    generator = torch.Generator().manual_seed(0)
    num_last_failures = 0
    for _ in range(400):
        length = int(torch.randint(1, 9, (), generator=generator))
        confidence = (1 - torch.rand(length, generator=generator) ** 3).double().tolist()
        picked = factor(1.0).select(
            torch.ones(1, length, dtype=torch.bool), torch.tensor([confidence], dtype=torch.float64)
        )
        found = set(picked[0].nonzero().flatten().tolist())
        assert found == allowed_by_factor(confidence, 1.0)
        published = published_factor_loop(confidence, 1.0)
        if published != len(found):
            assert published == length == len(found) + 1  # only the last one failed
            num_last_failures += 1
    assert num_last_failures > 20


def test_factor_opens_one_where_nothing_is_sure_and_ignores_what_is_filled() -> None:
    assert select("factor", [True, True, True], [0.2, 0.4, 0.4], value=1.0) == [1]
    assert select("factor", [True, False, True], [0.1, 0.99, 0.2], value=1.0) == [2]
    assert select("factor", [False, True, True], [1.0, 0.95, 0.9], value=1.0) == [1, 2]
    assert select("factor", [True, True, True], [0.6, 0.6, 0.6], value=100.0) == [0, 1, 2]
    # c(2) on the bound itself: 3 · (1 - 0.5) = 1.5
    assert select("factor", [True, True], [0.9, 0.5], value=1.5) == [0, 1]
    assert select("factor", [True, True], [0.9, 0.5], value=1.4) == [0]


@pytest.mark.parametrize(
    ("entropies", "bound", "opened"),
    [
        ([0.3, 0.1, 0.2], 0.59, [1, 2]),
        ([0.3, 0.1, 0.2], 0.61, [0, 1, 2]),
        ([0.25, 0.5, 0.25], 0.5, [0]),  # the sum must stay below the bound
        ([4.0, 3.0, 5.0], 0.35, [1]),
        ([0.0, 0.0, 9.0], 0.35, [0, 1]),
        ([3.0, 3.0, 3.0], 0.35, [0]),
        ([1.0], 1e9, [0]),
    ],
)
def test_entropies_of_a_step_stay_below_the_bound(
    entropies: list[float], bound: float, opened: list[int]
) -> None:
    certain = torch.tensor([[0.0, *entropies]], dtype=torch.float64).neg().exp()
    masked = torch.tensor([[False] + [True] * len(entropies)])
    picked = entropy_bounded(bound).select(masked, certain)[0]
    assert picked.nonzero().flatten().tolist() == [1 + position for position in opened]
    rows = entropy_bounded(bound).select(masked.expand(5, -1), certain.expand(5, -1))
    assert bool((rows == picked).all())
    assert not entropy_bounded(bound).select(torch.zeros_like(masked), certain).any()


@pytest.mark.parametrize(
    ("comparison", "on_the_threshold", "all_below"),
    [("sdar", [0], [1]), ("fast_dllm", [0, 1], [1]), ("dinfer", [0, 1], [1, 2])],
)
def test_comparisons_differ_on_the_threshold_and_below_it(
    comparison: str, on_the_threshold: list[int], all_below: list[int]
) -> None:
    masked = [True, True, True]
    assert (
        select("threshold", masked, [0.8, 0.75, 0.2], value=0.75, comparison=comparison) == on_the_threshold
    )
    near = 0.5 - 5e-6
    assert select("threshold", masked, [0.1, 0.5, near], value=0.75, comparison=comparison) == all_below
    assert select("threshold", [False, True, True], [0.9, 0.3, 0.2], value=0.75, comparison=comparison) == [1]


def test_a_threshold_step_opens_the_most_confident_where_too_few_pass() -> None:
    """SDAR's low_confidence_dynamic with fewer denoising steps than positions, LLaDA2's minimal_topk."""
    masked = torch.tensor([[False, True, True, True, True]])
    for confidence, opened in (
        ([1.0, 0.95, 0.2, 0.3, 0.1], [1, 3]),
        ([1.0, 0.95, 0.99, 0.3, 0.96], [1, 2, 4]),
        ([1.0, 0.5, 0.5, 0.5, 0.5], [1, 2]),
    ):
        picked = threshold(0.9, min_commits=2).select(masked, torch.tensor([confidence]))
        assert picked[0].nonzero().flatten().tolist() == opened
    alone = torch.tensor([[False, False, True]])
    assert threshold(0.9, min_commits=2).select(alone, torch.full((1, 3), 0.1))[0].tolist() == [
        False,
        False,
        True,
    ]
    rule = build_rule(make_cell(decoder="threshold", threshold=0.9, commits_per_step=2))
    assert int(rule.select(masked, torch.tensor([[1.0, 0.95, 0.2, 0.3, 0.1]])).sum()) == 2


def test_ties_go_to_the_lowest_position() -> None:
    confidence = torch.full((1, 5), 0.5)
    masked = torch.tensor([[False, True, True, True, True]])
    for rule, count in ((static(2), 2), (threshold(0.9), 1), (factor(1.0), 1)):
        assert rule.select(masked, confidence)[0].nonzero().flatten().tolist() == [1, 2][:count]


def make_cell(**settings: Any) -> Cell:
    return Cell(
        model="reference", benchmark="words", prompt_version="1", method="none", budget=0, temperature=0.0,
        block_length=4, gen_length=8, **settings,
    )  # fmt: skip


def test_the_rule_of_a_cell_follows_its_settings() -> None:
    masked, confidence = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[0.86, 0.75, 0.1]])

    def count(**settings: Any) -> int:
        return int(build_rule(make_cell(**settings)).select(masked, confidence).sum())

    assert count(decoder="static", commits_per_step=3) == 3
    assert count(decoder="threshold", threshold=0.75) == 1
    assert count(decoder="threshold", threshold=0.75, comparison="fast_dllm") == 2
    assert count(decoder="factor", factor=1.0) == 2
    assert count(decoder="factor", factor=0.5) == 1
    assert set(COMPARISONS) == {"sdar", "fast_dllm", "dinfer"}


def test_a_threshold_without_a_comparison_is_the_cell_of_the_default_one() -> None:
    cell = make_cell(decoder="threshold", threshold=0.9)
    assert cell.cell_key == replace(cell, comparison="sdar").cell_key
    assert cell.cell_key != replace(cell, comparison="fast_dllm").cell_key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder": "statc"}, "decoder 'statc' is not one of static, threshold, factor"),
        ({"commits_per_step": 0}, "commits_per_step is 0"),
        ({"decoder": "threshold"}, "the threshold decoder needs a threshold"),
        ({"decoder": "threshold", "threshold": 1.0}, "must lie between 0 and 1"),
        (
            {"decoder": "threshold", "threshold": 0.9, "comparison": "jetengine"},
            "'jetengine' is not one of sdar, fast_dllm, dinfer",
        ),
        ({"decoder": "factor"}, "the factor decoder needs a factor"),
        ({"decoder": "factor", "factor": 0.0}, "factor is 0.0, it must be positive"),
        ({"decoder": "factor", "factor": float("nan")}, "must be positive"),
        ({"decoder": "entropy_bounded"}, "needs a threshold, the bound in nats"),
        ({"decoder": "entropy_bounded", "threshold": 0.3}, "compares certainty, not tempered"),
        (
            {"decoder": "entropy_bounded", "threshold": float("inf"), "confidence": "certainty"},
            "threshold is inf, the bound of the entropies",
        ),
    ],
)
def test_a_rule_that_does_not_exist_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_rule(make_cell(**settings))
