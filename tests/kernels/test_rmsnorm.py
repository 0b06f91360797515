from __future__ import annotations

import pytest
import torch

from dlmgrid.kernels.rmsnorm import head_rms_norm, rms_norm


@pytest.mark.parametrize("width", [16, 63, 576, 4096])
def test_equals_fp64_and_keeps_bits_in_any_pack(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, weight = torch.randn(32 * 33, width, generator=generator), torch.randn(width, generator=generator)
    wide = rows.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    whole = rms_norm(rows, weight, 1e-6)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    for start in range(0, len(rows), 32 * 4):
        assert torch.equal(rms_norm(rows[start : start + 32], weight, 1e-6), whole[start : start + 32])


def test_heads_are_normalised_one_by_one() -> None:
    heads = torch.randn(32, 3, 80, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(3, 80, generator=torch.Generator().manual_seed(1))
    together = head_rms_norm(heads, weight, 1e-6)
    for head in range(3):
        assert torch.equal(together[:, head], rms_norm(heads[:, head].contiguous(), weight[head], 1e-6))


def test_zero_rows_stay_zero() -> None:
    assert not rms_norm(torch.zeros(32, 8), torch.ones(8), 1e-6).any()
