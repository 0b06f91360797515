"""The published schedules, step by step, and rules that follow them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.commit_rules import (
    at_random,
    build_rule,
    first_position_first,
    scheduled,
    static,
)
from dlmgrid.workers.decoding.schedules import even_split, linear_counts, linear_fractions, opened_by_masked


def cell(**settings: Any) -> Cell:
    values: dict[str, Any] = {
        "model": "m", "benchmark": "b", "prompt_version": "1", "method": "none", "budget": 0, "temperature": 0.0,
        "block_length": 8, "gen_length": 32,
    }  # fmt: skip
    return Cell(**(values | settings))


def test_an_even_split_gives_the_remainder_to_the_first_steps() -> None:
    assert even_split(32, 32) == (1,) * 32
    assert even_split(32, 5) == (7, 7, 6, 6, 6)
    with pytest.raises(ValueError, match="40 steps for 32 positions; want 1 to 32"):
        even_split(32, 40)


@pytest.mark.parametrize(("masks", "steps"), [(16, 16), (16, 5), (8, 40), (512, 512), (7, 2), (3, 1)])
def test_linear_counts_follow_the_published_loop(masks: int, steps: int) -> None:
    times = torch.linspace(1, 1e-3, steps + 1)
    left, expected = torch.tensor(float(masks)), []
    for step in range(steps):  # as DreamLM/Dream writes it, on 0-d tensors
        share = left * (1 - times[step + 1] / times[step])
        expected.append(int(share) if step < steps - 1 else int(left))
        left = left - expected[-1]
    assert linear_counts(masks, steps) == tuple(expected)
    assert sum(expected) == masks
    assert linear_fractions(steps)[-1] == 1.0


def test_a_schedule_rule_opens_what_its_step_says_and_what_its_state_suggests() -> None:
    counts = linear_counts(8, 12)
    assert 0 in counts
    rule = scheduled("dream", 8, counts)
    masked = torch.ones(8, dtype=torch.bool)
    confidence = torch.linspace(-3, -1, 8)  # negative confidences, rising
    for step, count in enumerate(counts):
        picked = rule.at_step(masked[None], confidence[None], torch.tensor([step]))[0]
        assert picked.sum() == count
        if count:
            assert torch.equal(rule.select(masked, confidence), picked)
            left = masked.nonzero().flatten()
            assert torch.equal(picked.nonzero().flatten(), left[-count:])
        masked &= ~picked
    assert not masked.any()
    assert rule.may_open_nothing
    assert opened_by_masked(4, (1, 0, 3)).tolist() == [1, 1, 1, 3, 1]


def test_origin_opens_what_lies_below_the_probability() -> None:
    rule = at_random(4, 10, 0)
    masked = torch.tensor([[True, True, False, True]])
    noise = torch.tensor([[0.05, 0.2, 0.01, 0.099]])
    fraction = linear_fractions(10)[0]
    assert fraction == pytest.approx(0.0999)
    picked = rule.at_step(masked, -noise, torch.tensor([0]))
    assert picked.tolist() == [[True, False, False, True]]
    assert torch.equal(rule.at_step(masked, -noise, torch.tensor([9])), masked)
    assert not rule.at_step(masked, torch.full((1, 4), -0.9), torch.tensor([0])).any()


def test_the_first_position_goes_first_and_the_rule_counts_from_there() -> None:
    rule = first_position_first(scheduled("dream", 4, (1, 2)))
    full = torch.ones(1, 4, dtype=torch.bool)
    confidence = torch.tensor([[0.1, 0.9, 0.8, 0.7]])
    assert rule.at_step(full, confidence, torch.tensor([0])).tolist() == [[True, False, False, False]]
    rest = torch.tensor([[False, True, True, True]])
    assert rule.at_step(rest, confidence, torch.tensor([1])).tolist() == [[False, True, False, False]]
    assert first_position_first(static(3)).select(full, confidence).tolist() == [[True, False, False, False]]


def test_cells_name_their_schedules() -> None:
    rule = build_rule(cell(decoder="llada", steps=16, confidence="plain"))
    assert (rule.name, rule.max_commits, rule.may_open_nothing) == ("llada", 2, False)
    assert rule.sampling.confidence == "plain"
    dream = cell(decoder="dream", steps=64, family="dream", cache="none", confidence="entropy", top_p=0.9)
    assert build_rule(dream).sampling.top_p == 0.9
    cached = build_rule(replace(dream, cache="dual"))
    full = torch.ones(1, 8, dtype=torch.bool)
    assert cached.select(full, torch.rand(1, 8)).tolist() == [[True] + [False] * 7]
    assert build_rule(cell(decoder="llada")).max_commits == 1  # as many steps as tokens
    with pytest.raises(ValueError, match="confidence 'loud' is not one of"):
        build_rule(cell(confidence="loud"))
