"""How rows are read: in panels, ahead of the walk or level by level, they say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlmgrid.kernels.logits import LogitsPass, logits_pass
from dlmgrid.workers.decoding.commit_rules import entropy_bounded, static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.reading import RowNoise, TransitionRule, _draw_in_panels
from dlmgrid.workers.decoding.sampling import PositionNoise, Sampling, draw
from dlmgrid.workers.drafting import ssd
from dlmgrid.workers.testing.tiny_target import TinyTarget


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


class PredictingTarget(TinyTarget):
    """A target that answers rows itself, so that a walk reads them ahead."""

    predicts_rows = True

    def predict(self, hidden: Tensor, rows: Tensor, temperature: float, noise: RowNoise | None) -> LogitsPass:
        return logits_pass(self.logits(hidden.flatten(0, 1)[rows]), temperature, noise=noise)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_entropies_read_ahead_make_the_steps_of_those_read_by_level(temperature: float) -> None:
    rule = replace(entropy_bounded(4.0), sampling=Sampling(confidence="certainty"))
    settings = DecodeSettings(
        block_length=8, gen_length=24, budget=5, temperature=temperature, rule=rule, noise=NoiseTable(3),
        stop_token_ids=(),
    )  # fmt: skip
    assert not TransitionRule(rule=rule, temperature=temperature, noise=NoiseTable(3)).reads_logits
    prompts = [Prompt(item_id=str(index), repeat=0, token_ids=(1 + index, 2)) for index in range(3)]
    ahead, by_level = (
        Decoder(kind(block_length=8, vocab_size=40, num_slots=3), ssd.build(), settings).decode(prompts)
        for kind in (PredictingTarget, TinyTarget)
    )
    assert [found.steps for found in ahead] == [found.steps for found in by_level]
    assert [found.accepted for found in ahead] == [found.accepted for found in by_level]
    assert len({len(step) for found in ahead for step in found.steps}) > 1
    assert temperature > 0 or sum(sum(found.accepted) for found in ahead) > 0
