"""How rows are read: torch's panels on a GPU draw what one pass over all rows draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.reading import TransitionRule, _draw_in_panels
from dlmgrid.workers.decoding.sampling import PositionNoise, Sampling, draw


@pytest.mark.parametrize("rows", [1, 32, 33, 70])
@pytest.mark.parametrize("confidence", ["tempered", "entropy", "random"])
def test_panels_draw_what_all_rows_draw(rows: int, confidence: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits, gumbel = (torch.randn(rows, 64, generator=generator) for _ in range(2))
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    calls: list[int] = []

    def read_uniform() -> torch.Tensor:
        calls.append(1)
        return uniform

    noise = PositionNoise(read_uniform, lambda: gumbel[:, 0])
    sampling = Sampling(confidence=confidence, alg_temp=0.5 if confidence == "entropy" else 0.0)
    rule = replace(static(1), sampling=sampling)
    transition = TransitionRule(rule=rule, temperature=0.7, noise=NoiseTable(0))
    found = _draw_in_panels(logits, transition, gumbel, noise)
    assert len(calls) == (1 if confidence == "random" else 0)
    expected = draw(logits, sampling, 0.7, gumbel, noise)
    assert torch.equal(found.choice.tokens, expected.choice.tokens)
    for ours, theirs in zip(
        (*found.choice, found.confidence), (*expected.choice, expected.confidence), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
