"""The logits pass: choices, probabilities, stale summaries and digests."""

import pytest
import torch

from dlmgrid.kernels.logits import NUM_CANDIDATES, choose, row_digests, summarize


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def test_argmax_takes_the_lowest_of_tied_tokens() -> None:
    logits = torch.zeros(3, 64)
    logits[0, [9, 40]] = 5.0
    logits[1, 63] = 1.0
    choice = choose(logits, 0.0, None)
    assert choice.tokens.tolist() == [9, 63, 0]
    assert choice.margins.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.5])
def test_probability_is_the_tempered_softmax_of_the_chosen_token(temperature: float) -> None:
    logits = random_logits(7, 128)
    gumbel = random_logits(7, 128, seed=1) if temperature else None
    choice = choose(logits, temperature, gumbel)
    expected = torch.softmax(logits.double() / (temperature or 1.0), dim=1)
    scores = logits / (temperature or 1.0) + (0 if gumbel is None else gumbel)
    assert torch.equal(choice.tokens, scores.argmax(dim=1))
    assert choice.probabilities.double() == pytest.approx(
        expected.gather(1, choice.tokens[:, None]).squeeze(1).numpy(), rel=1e-5
    )


def test_a_forbidden_token_is_never_chosen_whatever_the_noise() -> None:
    logits = torch.zeros(2, 64)
    logits[:, 5] = -torch.inf
    gumbel = torch.zeros(2, 64)
    gumbel[:, 5] = 22.9
    choice = choose(logits, 1.0, gumbel)
    assert 5 not in choice.tokens.tolist()
    assert bool(torch.isfinite(choice.probabilities).all())


def test_noise_must_fit_the_temperature() -> None:
    logits = random_logits(2, 64)
    with pytest.raises(ValueError, match="needs noise"):
        choose(logits, 1.0, None)
    with pytest.raises(ValueError, match="takes no noise"):
        choose(logits, 0.0, logits)


def test_candidates_are_ordered_by_value_then_id_also_across_the_boundary() -> None:
    logits = torch.zeros(2, 96)
    logits[0, 90] = 3.0
    logits[0, [2, 50]] = 2.0
    summary = summarize(logits, 1.0)
    assert summary.token_ids[0].tolist() == [90, 2, 50, *[i for i in range(96) if i not in (2, 50, 90)][:29]]
    assert summary.token_ids[1].tolist() == list(range(NUM_CANDIDATES))
    ids = random_logits(5, 640).sort(dim=1, descending=True).indices[:, :NUM_CANDIDATES]
    assert torch.equal(summarize(random_logits(5, 640), 1.0).token_ids, ids)


def test_statistics_against_double_precision() -> None:
    logits = random_logits(6, 256)
    summary = summarize(logits, 1.5)
    p = torch.softmax(logits.double(), dim=1)
    top = p.gather(1, summary.token_ids)
    torch.testing.assert_close(summary.probabilities.double(), top, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(summary.entropy.double(), torch.special.entr(p).sum(1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(summary.tail_mass.double(), 1 - top.sum(1), rtol=1e-3, atol=1e-6)
    expected = (p ** (1 / 1.5)).sum(1).log()
    torch.testing.assert_close(summary.log_tempered_mass.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [2, 3, 5, 8, 33])
def test_a_row_has_the_same_bits_alone_and_packed(packed: int) -> None:
    logits = random_logits(packed, 1088)
    gumbel = random_logits(packed, 1088, seed=3)
    together = (*choose(logits, 1.5, gumbel), *summarize(logits, 1.5), row_digests(logits))
    for row in range(packed):
        one = slice(row, row + 1)
        alone = (
            *choose(logits[one].clone(), 1.5, gumbel[one].clone()),
            *summarize(logits[one].clone(), 1.5),
            row_digests(logits[one].clone()),
        )
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_a_digest_sees_every_bit_and_every_place() -> None:
    logits = random_logits(1, 64)
    base = int(row_digests(logits))
    flipped = logits.clone()
    flipped.view(torch.int32)[0, 40] ^= 1
    swapped = logits[:, [1, 0, *range(2, 64)]].contiguous()
    assert int(row_digests(flipped)) != base
    assert int(row_digests(swapped)) != base
