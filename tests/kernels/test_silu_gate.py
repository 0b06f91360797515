from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dlmgrid.kernels.silu_gate import silu_gate


def test_equals_fp64_over_the_whole_range() -> None:
    gate = torch.linspace(-120, 120, 1001)[None]
    up = torch.linspace(-3, 3, 1001)[None]
    expected = functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_gate(torch.cat([gate, up], 1)).double(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_place_pack_or_threads(threads: int) -> None:
    rows = torch.randn(32 * 40, 2 * 1001, generator=torch.Generator().manual_seed(0)) * 4
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    whole = silu_gate(rows)
    parts = torch.cat([silu_gate(rows[i : i + 32]) for i in range(0, len(rows), 32)])
    torch.set_num_threads(before)
    assert torch.equal(whole, parts)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="2 \\* I"):
        silu_gate(torch.zeros(2, 3))
