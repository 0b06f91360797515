"""The growth kernels against their twins, level by level, over buffers that hold what no one may read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels.draft_growth import (
    ENTROPY,
    FIRST_MARGIN,
    Answer,
    Given,
    GrowthPlan,
    GrowthState,
    kernel,
    reference,
)


def given_words(plan: GrowthPlan, num_samples: int, seed: int, sharpness: float = 3.0) -> torch.Tensor:
    """Blocks that are filled otherwise each; the last of several has no valid snapshot."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.zeros((num_samples, plan.words), dtype=torch.int32)
    given = Given(words, plan.length)
    rows = (torch.randn(num_samples, plan.length, 40, generator=generator) * sharpness).softmax(dim=-1)
    best = rows.topk(32, dim=-1)
    given.is_valid[:] = 1
    if num_samples > 1:
        given.is_valid[-1] = 0
    given.token_ids[:], given.probabilities[:] = best.indices, best.values
    given.tail_mass[:] = 1 - best.values.sum(dim=-1)
    given.entropy[:] = -(rows * rows.log()).sum(dim=-1)
    temperature = plan.temperature or 1.0
    given.log_tempered_mass[:] = (rows.double().log() / temperature).logsumexp(dim=-1)
    given.roots[:], given.masked[:] = -1, 1
    for sample in range(num_samples):
        filled = torch.randperm(plan.length, generator=generator)[: sample * 3 % plan.length]
        given.roots[sample, filled] = given.token_ids[sample, filled, 0]
        given.masked[sample, filled[1:]] = 0
    given.commit_counts[:] = (given.roots >= 0).sum(dim=1)
    given.block_starts[:] = 100
    given.keys[:] = torch.randint(0, 2**32, (num_samples, 2), generator=generator)
    given.allows_complete[:] = torch.arange(num_samples) % 2
    return words


def poison(state: GrowthState) -> None:
    for name in ("log_probability", "confidence", "children", "merged"):
        getattr(state, name).fill_(torch.nan)
    for name in ("choices", "places", "live", "answer"):
        getattr(state, name).fill_(-(2**30))


def assert_same_answers(found: torch.Tensor, expected: torch.Tensor, plan: GrowthPlan) -> None:
    ours, theirs = (Answer(words.cpu(), plan.budget, plan.length) for words in (found, expected))
    assert ours.num_states.tolist() == theirs.num_states.tolist()
    assert ours.is_open.tolist() == theirs.is_open.tolist()
    is_state = torch.arange(plan.budget) < theirs.num_states[:, None]
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(ours, name)[is_state], getattr(theirs, name)[is_state]), name
    torch.testing.assert_close(ours.log_mass[is_state], theirs.log_mass[is_state], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("budget", "length", "num_samples", "more"),
    [
        (1, 1, 1, {}),
        (3, 5, 3, {}),
        (11, 12, 2, {"sub_block_length": 4}),
        (9, 7, 2, {"temperature": 0.7, "stream": 0}),
        (6, 6, 2, {"temperature": 1.0, "stream": 2, "counts_draws": False, "plain": True}),
        (5, 6, 1, {"temperature": 1.5}),
        (8, 9, 2, {"confidence": FIRST_MARGIN, "min_log_mass": math.log(0.02)}),
        (4, 6, 1, {"confidence": ENTROPY}),
        pytest.param(20, 32, 8, {"temperature": 1.0, "stream": 0}, marks=pytest.mark.gpu),
        pytest.param(41, 32, 3, {}, marks=pytest.mark.gpu),
        pytest.param(41, 64, 2, {"min_log_mass": math.log(0.001)}, marks=pytest.mark.gpu),
    ],
)
def test_lists_are_those_of_the_twin(
    triton_device: torch.device, budget: int, length: int, num_samples: int, more: dict[str, Any]
) -> None:
    plan = GrowthPlan(budget=budget, length=length, **more)
    words = given_words(plan, num_samples, seed=budget)
    twin, ours = (GrowthState(plan, num_samples, torch.device(name)) for name in ("cpu", triton_device.type))
    poison(ours)
    for state, steps in ((twin, reference), (ours, kernel)):
        state.words.copy_(words)
        steps.begin(state)
        for level in range(8):
            steps.expand(state, level % 2, by_scores=False)
            steps.merge(state, level % 2)
            steps.cut(state, level % 2)
        steps.answer(state, 0)
    assert_same_answers(ours.answer, twin.answer, plan)


@pytest.mark.parametrize("shape", [(2, 4, 5), pytest.param((8, 20, 32), marks=pytest.mark.gpu)], ids=str)
def test_a_level_by_scores_is_the_twins(triton_device: torch.device, shape: tuple[int, int, int]) -> None:
    num_samples, budget, length = shape
    plan = GrowthPlan(budget=budget, length=length)
    words = given_words(plan, num_samples, seed=4)
    scores = torch.randn(num_samples, 1 + budget, length, generator=torch.Generator().manual_seed(0)).double()
    twin, ours = (GrowthState(plan, num_samples, torch.device(name)) for name in ("cpu", triton_device.type))
    poison(ours)
    for state, steps in ((twin, reference), (ours, kernel)):
        state.words.copy_(words)
        state.scores.copy_(scores)
        steps.begin(state)
        for level in range(2):
            steps.expand(state, level, by_scores=True)
            steps.merge(state, level)
            steps.cut(state, level)
        steps.answer(state, 0)
    assert_same_answers(ours.answer, twin.answer, plan)
