"""Predictions of several levels at once are those of one level after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dlmgrid.kernels.logits import summarize
from dlmgrid.workers.decoding.commit_rules import CommitRule, static
from dlmgrid.workers.decoding.noise import NoiseTable, Stream
from dlmgrid.workers.decoding.sampling import Sampling
from dlmgrid.workers.decoding.snapshot import Snapshots
from dlmgrid.workers.decoding.state import MASKED
from dlmgrid.workers.drafting.drafter import DraftInputs, is_predicted_once, level_predictor, predict

RANDOM = replace(static(1), sampling=Sampling(confidence="random"))


def draft_inputs(rule: CommitRule, temperature: float, noise: str, stream: Stream | None) -> DraftInputs:
    generator = torch.Generator().manual_seed(1)
    roots = torch.full((3, 8), MASKED, dtype=torch.int32)
    roots[1, :3] = 5
    masked = roots == MASKED
    sample, position = masked.nonzero(as_tuple=True)
    snapshots = Snapshots(3, 8, torch.device("cpu"))
    logits = torch.randn(sample.numel(), 64, generator=generator)
    snapshots.store(torch.arange(3), masked, sample, position, summarize(logits, temperature))
    return DraftInputs(
        roots=roots, commit_counts=torch.tensor([0, 3, 0]), block_starts=torch.tensor([8, 16, 64]),
        keys=torch.randint(0, 2**32, (3, 2), generator=generator), snapshots=snapshots, rule=rule,
        temperature=temperature, noise=NoiseTable(0, noise), stream=stream,
    )  # fmt: skip


@pytest.mark.parametrize("rule", [static(1), static(2), RANDOM], ids=["one", "two", "random"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("noise", "stream"),
    [("commit_count", Stream.TOKEN), ("per_position", Stream.TOKEN), ("commit_count", None)],
)
def test_levels_ahead_are_levels_apart(
    rule: CommitRule, temperature: float, noise: str, stream: Stream | None
) -> None:
    inputs = draft_inputs(rule, temperature, noise, stream)
    predictor = level_predictor(inputs)
    different = 0
    first = predict(inputs, inputs.commit_counts[:, None])
    for level in range(7):
        counts = inputs.commit_counts[:, None] + level
        found, expected = predictor(inputs, counts), predict(inputs, counts)
        assert found.position_scores is None and expected.position_scores is None
        for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
            assert torch.equal(*torch.broadcast_tensors(ours, theirs))
        different += not torch.equal(expected.first, first.first)
        different += not torch.equal(*torch.broadcast_tensors(expected.confidence, first.confidence))
    assert is_predicted_once(inputs) == (different == 0)
