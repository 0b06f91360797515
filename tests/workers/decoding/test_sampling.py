"""Draws: filters, the published confidences against their plain definitions, and what is done about end tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlmgrid.kernels.logits import LogitsPass, logits_pass
from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.decoding.sampling import (
    LEAST_CONFIDENCE,
    PositionNoise,
    Sampling,
    draw,
    filter_logits,
    forbid_tokens,
)
from dlmgrid.workers.drafting import ssd
from dlmgrid.workers.testing.tiny_target import TinyTarget

ROWS, VOCABULARY = 6, 128
NO_NOISE = PositionNoise(lambda: torch.full((ROWS,), 0.5).double(), lambda: torch.zeros(ROWS))


def logits(seed: int = 0) -> Tensor:
    return 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def gumbel() -> Tensor:
    uniform = torch.rand(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return -torch.log(-torch.log(uniform))


def plain_nucleus(row: Tensor, top_p: float, top_k: int | None) -> Tensor:
    """Probabilities of one tempered row under nucleus, then top-k, by counting."""
    order = sorted(range(len(row)), key=lambda token: (-row[token].item(), token))
    shares, kept, mass = row.softmax(0), [], 0.0
    for token in order:
        if mass > top_p:
            break
        kept.append(token)
        mass += shares[token].item()
    kept = kept[:top_k]
    out = torch.zeros_like(row)
    out[kept] = row[kept].softmax(0)
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.95, None), (0.5, 3), (None, 4), (None, None)])
def test_confidences_are_those_of_their_sources(
    temperature: float, top_p: float | None, top_k: int | None
) -> None:
    rows = logits()
    noise = gumbel() if temperature else None
    tempered = rows / temperature if temperature else rows
    kept = torch.stack([plain_nucleus(row, 2.0 if top_p is None else top_p, top_k) for row in tempered])
    scores = kept.log() if noise is None else kept.log() + noise
    tokens = scores.argmax(1)
    at = torch.arange(ROWS)
    ranked = kept.sort(1, descending=True).values
    expected = {
        "tempered": tempered.softmax(1)[at, tokens],
        "plain": rows.softmax(1)[at, tokens],
        "maskgit_plus": kept[at, tokens],
        "topk_margin": ranked[:, 0] - ranked[:, 1],
        "entropy": (kept * torch.log(kept + 1e-10)).sum(1),
        "certainty": torch.distributions.Categorical(probs=kept).entropy().neg().exp(),
    }
    for name, values in expected.items():
        sampling = Sampling(confidence=name, top_p=top_p, top_k=top_k)
        drawn = draw(rows, sampling, temperature, noise, NO_NOISE)
        assert torch.equal(drawn.choice.tokens, tokens), name
        torch.testing.assert_close(drawn.confidence, values, rtol=1e-5, atol=1e-6)
        for row in range(ROWS):  # a row's bits are its own
            alone = draw(
                rows[row : row + 1], sampling, temperature, None if noise is None else noise[row : row + 1],
                NO_NOISE,
            )  # fmt: skip
            assert torch.equal(alone.confidence, drawn.confidence[row : row + 1])


@pytest.mark.parametrize("top_k", [None, 5])
def test_a_pass_over_the_logits_takes_the_place_of_the_twins(top_k: int | None) -> None:
    prompts = [Prompt(item_id="a", repeat=0, token_ids=(1, 2, 3))]
    target = TinyTarget(block_length=4, vocab_size=40)
    rule = replace(static(1), sampling=Sampling(top_k=top_k))

    def decode(one_pass: Callable[..., LogitsPass] | None) -> Generation:
        settings = DecodeSettings(
            block_length=4, gen_length=8, budget=3, temperature=1.0, rule=rule, noise=NoiseTable(3),
            stop_token_ids=(),
        )  # fmt: skip
        return Decoder(target, ssd.build(), settings, logits_pass=one_pass).decode(prompts)[0]

    calls: list[float] = []

    def counted(logits: Tensor, temperature: float, *, noise: Any) -> LogitsPass:
        calls.append(temperature)
        return logits_pass(logits, temperature, noise=noise)

    apart, together = decode(None), decode(counted)
    assert (together.steps, together.digests, together.margins) == (apart.steps, apart.digests, apart.margins)
    assert together.accepted == apart.accepted
    assert len(calls) == len(apart.steps) * (1 if top_k is None else 2)


def test_filters_break_ties_by_id_and_keep_the_likeliest() -> None:
    rows = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.5]])
    assert filter_logits(rows, 1.0, None, 2).isfinite().tolist() == [[False, True, True, False, False]]
    assert filter_logits(rows, 1.0, 1e-6, None).isfinite().tolist() == [[False, True, False, False, False]]
    assert filter_logits(rows, 0.0, 1.0, 5) is rows


def test_position_noise_is_keyed_by_position_and_draw_and_lies_inside_0_and_1() -> None:
    table = NoiseTable(3)
    keys = torch.tensor([table.key("a", 0)] * 4)
    positions, draws = torch.tensor([7, 8, 7, 7]), torch.tensor([0, 0, 1, 0])
    uniform = table.position_uniforms(keys, positions, draws)
    assert uniform[0] == uniform[3]
    assert len(set(uniform.tolist())) == 3
    assert ((uniform > 0) & (uniform < 1)).all()
    expected = (-torch.log(-torch.log(uniform))).float()
    torch.testing.assert_close(table.position_gumbels(keys, positions, draws), expected)
    random = draw(
        logits()[:4],
        Sampling(confidence="random"),
        0.0,
        None,
        PositionNoise(lambda: uniform, lambda: expected),
    )
    assert torch.equal(random.confidence, uniform.float())


def test_alg_temp_perturbs_the_confidence() -> None:
    noise = PositionNoise(NO_NOISE.uniform, lambda: torch.arange(ROWS).float())
    plain = draw(logits(), Sampling(confidence="maskgit_plus"), 0.0, None, NO_NOISE)
    drawn = draw(logits(), Sampling(confidence="maskgit_plus", alg_temp=0.1), 0.0, None, noise)
    torch.testing.assert_close(drawn.confidence, plain.confidence / 0.1 + torch.arange(ROWS))


def test_end_tokens_can_be_forbidden_or_held_back() -> None:
    rows = logits()
    best = rows.argmax(1)
    ends = (int(best[0]), int(best[2]))
    forbidden = forbid_tokens(rows.clone(), Sampling(eos_policy="logits_eos_inf"), ends)
    assert forbidden[:, ends[0]].isneginf().all()
    assert torch.equal(forbidden[:, ends[1]], rows[:, ends[1]])
    assert torch.equal(forbid_tokens(rows.clone(), Sampling(), ends), rows)
    held = draw(rows, Sampling(eos_policy="confidence_eos_eot_inf"), 0.0, None, NO_NOISE, ends)
    assert torch.equal(held.choice.tokens, best)
    is_end = torch.isin(best, torch.tensor(ends))
    assert (held.confidence[is_end] == LEAST_CONFIDENCE).all()
    assert (held.confidence[~is_end] > 0).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"confidence": "loud"}, "confidence 'loud'"), ({"eos_policy": "x"}, "eos_policy 'x'"),
        ({"alg_temp": -1.0}, "alg_temp is -1"), ({"top_p": 0.0}, "top_p is 0"), ({"top_k": 0}, "top_k is 0"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**setting)
