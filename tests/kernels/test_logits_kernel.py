"""The Triton logits pass gives the twin's tokens, candidates and digests, and its statistics to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from dlmgrid.kernels.logits import logits_pass as twin
from dlmgrid.kernels.logits.kernel import logits_pass

pytestmark = pytest.mark.usefixtures("poisoned")


def rows_of_logits(num_rows: int, vocab: int, device: torch.device) -> Tensor:
    """Rows of several temperaments: spread out, peaked, with ties, with -inf, all equal."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(num_rows, vocab, generator=generator)
    logits[0, vocab // 2] = 60.0
    logits[1] = logits[1].round()
    logits[1, 0], logits[1, -1] = -0.0, 0.0
    logits[2] = 0.0
    logits[3, ::3] = -torch.inf
    logits[:, vocab - 2] = -torch.inf
    return logits.to(device)


def noise_of(num_rows: int, device: torch.device) -> tuple[Tensor, int, Tensor, Tensor]:
    index = torch.arange(num_rows)
    keys = torch.stack([index * 977 + 5, index + 2**31], 1)
    return keys.to(device), 0, (index * 3).to(device), (index + 1).to(device)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("vocab", [33, 100, 4097])
def test_gives_what_the_twin_gives(
    triton_device: torch.device, vocab: int, temperature: float, assert_near: Any
) -> None:
    logits = rows_of_logits(5, vocab, triton_device)
    noise = noise_of(5, triton_device) if temperature else None
    found = logits_pass(logits, temperature, noise=noise)
    expected = twin(logits, temperature, noise=noise)
    assert torch.equal(found.choice.tokens, expected.choice.tokens)
    assert torch.equal(found.summary.token_ids, expected.summary.token_ids)
    assert torch.equal(found.digests, expected.digests)
    for name in ("probabilities", "margins"):
        torch.testing.assert_close(
            getattr(found.choice, name), getattr(expected.choice, name), rtol=2e-6, atol=2e-6
        )
    for name in ("probabilities", "entropy", "tail_mass", "log_tempered_mass"):
        torch.testing.assert_close(
            getattr(found.summary, name), getattr(expected.summary, name), rtol=1e-5, atol=1e-5
        )
    torch.testing.assert_close(found.log_sums, expected.log_sums, rtol=1e-6, atol=1e-6)


def test_a_row_has_the_same_bits_alone(triton_device: torch.device) -> None:
    logits = rows_of_logits(5, 5000, triton_device)
    keys, stream, positions, draws = noise_of(5, triton_device)
    whole = logits_pass(logits, 0.9, noise=(keys, stream, positions, draws))
    for row in (1, 4):
        part = slice(row, row + 1)
        alone = logits_pass(logits[part], 0.9, noise=(keys[part], stream, positions[part], draws[part]))
        for several, one in zip(
            (*whole.choice, *whole.summary), (*alone.choice, *alone.summary), strict=True
        ):
            assert torch.equal(several[part], one)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_candidates_that_crowd_into_few_groups(triton_device: torch.device, temperature: float) -> None:
    """Runs of great values, ties across a group's edge, lone values, and rows whose noise decides the runner-up."""
    logits = torch.full((4, 2500), -8.0)
    logits[0, 100:160] = torch.arange(60.0)  # all candidates in two neighbouring groups
    logits[1, 2040:2060] = 5.0  # ties over the edge of a tile
    logits[1, ::100] = 5.0
    logits[2] = -torch.inf
    logits[2, [7, 2300]] = torch.tensor([3.0, 2.9])  # two tokens to choose from
    logits[3] *= 1e3
    logits[3, -1] = 4e3
    logits = logits.to(triton_device)
    noise = noise_of(4, triton_device) if temperature else None
    found, expected = (one(logits, temperature, noise=noise) for one in (logits_pass, twin))
    assert torch.equal(found.choice.tokens, expected.choice.tokens)
    assert torch.equal(found.summary.token_ids, expected.summary.token_ids)
    torch.testing.assert_close(found.choice.margins, expected.choice.margins, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.summary.tail_mass, expected.summary.tail_mass, rtol=1e-5, atol=1e-12)


def test_noise_chooses_as_the_twin_in_many_rows(triton_device: torch.device) -> None:
    logits = torch.randn(24, 400, generator=torch.Generator().manual_seed(3)).to(triton_device)
    noise = noise_of(24, triton_device)
    found, expected = logits_pass(logits, 1.5, noise=noise), twin(logits, 1.5, noise=noise)
    assert torch.equal(found.choice.tokens, expected.choice.tokens)
    torch.testing.assert_close(found.choice.margins, expected.choice.margins, rtol=1e-6, atol=1e-6)


def test_small_tails_are_not_lost_beside_a_probability_near_one(triton_device: torch.device) -> None:
    """Against fp64: confidences keep their order where the tail is far below the rounding of 1."""
    logits = torch.full((3, 4200), -30.0, device=triton_device)
    logits[:, 4100] = torch.tensor([0.0, -2.0, -4.0], device=triton_device)
    found = logits_pass(logits, 0.0)
    exact = logits.double().softmax(1)
    top = exact.topk(32).values.sum(1)
    torch.testing.assert_close(found.summary.tail_mass.double(), 1 - top, rtol=1e-3, atol=1e-13)
    torch.testing.assert_close(found.choice.probabilities.double(), exact.amax(1), rtol=2e-7, atol=0)


def test_nan_reaches_the_probability(triton_device: torch.device) -> None:
    logits = torch.zeros(2, 64, device=triton_device)
    logits[0, 5] = torch.nan
    probabilities = logits_pass(logits, 0.0).choice.probabilities
    assert bool(probabilities[0].isnan())
    assert bool(probabilities[1].isfinite())


@pytest.mark.gpu
def test_a_vocabulary_of_157k_on_the_device(cuda_device: torch.device) -> None:
    logits = rows_of_logits(672, 157184, cuda_device)
    noise = noise_of(672, cuda_device)
    found, expected = logits_pass(logits, 0.7, noise=noise), twin(logits, 0.7, noise=noise)
    assert torch.equal(found.choice.tokens, expected.choice.tokens)
    assert torch.equal(found.summary.token_ids, expected.summary.token_ids)
    assert torch.equal(found.digests, expected.digests)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits_on_the_device(cuda_device: torch.device) -> None:
    logits = torch.zeros(14000, 157184, device=cuda_device)
    logits[-1, 157000] = 9.0
    assert int(logits_pass(logits, 0.0).choice.tokens[-1]) == 157000


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    logits = torch.zeros(2, 64, device=triton_device)
    with pytest.raises(ValueError, match="vocabulary of 31"):
        logits_pass(logits[:, :31], 0.0)
    with pytest.raises(ValueError, match="float32"):
        logits_pass(logits.double(), 0.0)
    with pytest.raises(ValueError, match="needs noise"):
        logits_pass(logits, 1.0)
    with pytest.raises(ValueError, match="takes no noise"):
        logits_pass(logits, 0.0, noise=noise_of(2, triton_device))
