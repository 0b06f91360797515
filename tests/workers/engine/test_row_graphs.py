"""Rows answered in one submission, or in several, are what the logits pass says of each."""

from __future__ import annotations

import pytest
import torch

from dlmgrid.kernels.logits import logits_pass
from dlmgrid.workers.engine.row_graphs import ROW_BUCKETS, RowGraphs


@pytest.mark.parametrize("count", [1, 20, ROW_BUCKETS[-1] + 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_row_has_its_own_answer(count: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(40, 32, 16, generator=generator)
    head = torch.randn(64, 16, generator=generator)
    graphs = RowGraphs(
        lambda rows: rows @ head.t(),
        logits_pass,
        hidden_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    rows = torch.randperm(40 * 32, generator=generator)[:count]
    keys = torch.randint(0, 2**32, (count, 2), generator=generator)
    positions, draws = torch.arange(count), torch.arange(count) % 7
    noise = (keys, 0, positions, draws) if temperature else None
    found = graphs.predict(hidden, rows, temperature, noise)
    expected = logits_pass(hidden.flatten(0, 1)[rows] @ head.t(), temperature, noise=noise)
    assert torch.equal(found.choice.tokens, expected.choice.tokens)
    assert torch.equal(found.summary.token_ids, expected.summary.token_ids)
    for ours, theirs in zip(
        (*found.choice[1:], *found.summary[1:], found.log_sums),
        (*expected.choice[1:], *expected.summary[1:], expected.log_sums),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
