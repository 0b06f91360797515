"""The order model's kernels against their twin, in a smaller width where the interpreter runs them."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels.draft_growth import Given, GrowthPlan, GrowthState
from dlmgrid.kernels.draft_growth import kernel as growth
from dlmgrid.kernels.order_scores import OrderWeights, order_scores, stale_features
from dlmgrid.kernels.order_scores.kernel import OrderScores


def random_weights(width: int, heads: int, layers: int, device: torch.device) -> OrderWeights:
    generator = torch.Generator().manual_seed(width)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        return values.to(device)

    return OrderWeights(
        num_heads=heads, embed=drawn(width, 74), embed_bias=drawn(width),
        project=drawn(layers, 3 * width, width), project_bias=drawn(layers, 3 * width),
        merge=drawn(layers, width, width), merge_bias=drawn(layers, width),
        up=drawn(layers, 4 * width, width), up_bias=drawn(layers, 4 * width),
        down=drawn(layers, width, 4 * width), down_bias=drawn(layers, width),
        norms=drawn(layers, 2, 2, width), head=drawn(width, width), head_bias=drawn(width), score=drawn(width),
        score_bias=drawn(1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "width", "layers"),
    [
        ((1, 1, 5), 64, 2),
        ((2, 2, 17), 64, 1),
        pytest.param((8, 20, 32), 128, 3, marks=pytest.mark.gpu),
        pytest.param((1, 41, 64), 128, 3, marks=pytest.mark.gpu),
        pytest.param((3, 8, 31), 128, 3, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_scores_of_expanded_rows_are_the_twins(
    triton_device: torch.device, shape: tuple[int, int, int], width: int, layers: int
) -> None:
    num_samples, budget, length = shape
    generator = torch.Generator().manual_seed(length)
    plan = GrowthPlan(budget=budget, length=length)
    state = GrowthState(plan, num_samples, triton_device)
    words = torch.zeros((num_samples, plan.words), dtype=torch.int32)
    given = Given(words, length)
    given.is_valid[:] = 1
    best = (torch.randn(num_samples, length, 40, generator=generator) * 30).softmax(dim=-1).topk(32, dim=-1)
    given.probabilities[:], given.tail_mass[:] = best.values, 1 - best.values.sum(dim=-1)  # some are 0
    given.entropy[:] = torch.rand(num_samples, length, generator=generator)
    given.roots[:] = torch.randint(-1, 2, (num_samples, length), generator=generator)
    given.masked[:] = (given.roots < 0) | (torch.rand(num_samples, length, generator=generator) < 0.2)
    given.masked[:, 0], given.roots[:, -1] = 1, -1
    given.masked[:, -1] = 1
    state.words.copy_(words)
    growth.begin(state)
    weights = random_weights(width, width // 16, layers, triton_device)
    scores = OrderScores(weights, state)
    scores.prepare()
    stale = stale_features(given.masked > 0, given.probabilities, given.entropy, given.tail_mass)
    here = random_weights(width, width // 16, layers, torch.device("cpu"))

    # The roots first, then rows of which every other one is of the deepest depth.
    tokens = state.tokens[0].cpu()
    for deepest in (0, 1):
        rows = torch.arange(1 + budget) % 2 == deepest if deepest else torch.arange(1 + budget) == 0
        if deepest:
            tokens[:, 1:] = torch.where(
                (given.roots < 0)[:, None] & (torch.rand(num_samples, budget, length, generator=generator) < 0.5),
                7, given.roots[:, None],
            )  # fmt: skip
            state.tokens[0].copy_(tokens)
            state.log_mass[0].fill_(-1.0)
            state.depths[0].copy_(rows.int())
            state.depth.fill_(1)
        state.scores.fill_(torch.nan)
        scores.compute(0)
        expected = order_scores(here, stale, given.masked > 0, given.roots, tokens)
        found = state.scores.cpu()
        torch.testing.assert_close(found[:, rows], expected[:, rows], rtol=1e-9, atol=1e-10)
        assert bool(found[:, ~rows].isnan().all()), "only rows that are expanded are computed"


def test_weights_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    state = GrowthState(GrowthPlan(budget=2, length=4), 1, triton_device)
    with pytest.raises(ValueError, match="power of two"):
        OrderScores(random_weights(96, 6, 1, triton_device), state)
    with pytest.raises(ValueError, match="heads of 16"):
        OrderScores(random_weights(64, 8, 1, triton_device), state)
