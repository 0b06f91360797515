from __future__ import annotations

import pytest
import torch

from dlmgrid.kernels.rotary import apply_rotary, rotary_tables, yarn_frequencies


def test_pairs_turn_by_position_times_frequency() -> None:
    width, theta = 8, 10000.0
    cosines, sines = rotary_tables(50, width, theta)
    x = torch.randn(50, 2, width, generator=torch.Generator().manual_seed(0))
    turned = apply_rotary(x, cosines, sines)
    for i in range(width // 2):
        angle = torch.arange(50).double() * theta ** (-2 * i / width)
        pair = torch.complex(x[..., i].double(), x[..., i + width // 2].double())
        expected = pair * torch.polar(torch.ones_like(angle), angle)[:, None]
        torch.testing.assert_close(turned[..., i].double(), expected.real, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(turned[..., i + width // 2].double(), expected.imag, rtol=1e-5, atol=1e-5)


def test_the_rest_of_a_partly_rotated_head_passes_through() -> None:
    cosines, sines = rotary_tables(10, 4, 10000.0)
    x = torch.randn(10, 1, 12, generator=torch.Generator().manual_seed(0))
    turned = apply_rotary(x, cosines, sines)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], apply_rotary(x[..., :4].contiguous(), cosines, sines))


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        rotary_tables(4, 3, 10000.0)
    with pytest.raises(ValueError, match="does not fit tables"):
        apply_rotary(torch.zeros(4, 1, 6), *rotary_tables(4, 8, 10000.0))


def test_yarn_keeps_fast_dimensions_and_slows_the_others() -> None:
    plain = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    scaled = yarn_frequencies(64, 10000.0, factor=8.0, original_length=4096, beta_fast=32.0, beta_slow=1.0)
    turns = 4096 * plain / (2 * torch.pi)
    assert torch.allclose(scaled[turns > 40], plain[turns > 40], rtol=1e-6)
    assert torch.allclose(scaled[turns < 0.8], plain[turns < 0.8] / 8, rtol=1e-6)
    ratio = scaled / plain
    assert bool((ratio[1:] <= ratio[:-1] + 1e-6).all())
    cosines, sines = rotary_tables(3, 64, 10000.0, frequencies=scaled, scale=1.5)
    assert torch.allclose(cosines**2 + sines**2, torch.full((3, 32), 2.25))
