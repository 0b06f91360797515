"""The Triton noise table is the twin's: integers bit for bit, Gumbel values to 1 ulp."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from dlmgrid.kernels.philox import gumbel_rows as twin_rows
from dlmgrid.kernels.philox import philox
from dlmgrid.kernels.philox.kernel import gumbel_rows, word_rows

pytestmark = pytest.mark.usefixtures("poisoned")

KEYS = torch.tensor([[0, 0], [0xFFFFFFFF, 0xFFFFFFFF], [0xA4093822, 0x299F31D0], [1, 2**31]])
POSITIONS = torch.tensor([0, 2**32 - 1, 0x85A308D3, 7])
DRAWS = torch.tensor([0, 2**32 - 1, 0x13198A2E, 31])


@pytest.mark.parametrize("vocab", [1, 5, 1023, 1500])
@pytest.mark.parametrize("stream", [0, 2])
def test_words_are_those_of_the_twin(triton_device: torch.device, vocab: int, stream: int) -> None:
    tokens = torch.arange(vocab)
    words = torch.stack(
        philox(
            (tokens[None] // 4, POSITIONS[:, None], DRAWS[:, None], torch.tensor([[stream]])),
            (KEYS[:, :1], KEYS[:, 1:]),
        ),
        -1,
    )
    expected = words.gather(-1, (tokens % 4).expand(4, -1)[..., None]).squeeze(-1)
    given = [t.to(triton_device) for t in (KEYS, POSITIONS, DRAWS)]
    assert torch.equal(word_rows(given[0], stream, given[1], given[2], vocab).cpu(), expected)


def test_gumbel_values_agree_to_one_ulp(triton_device: torch.device) -> None:
    keys, positions, draws = (t.to(triton_device) for t in (KEYS, POSITIONS, DRAWS))
    noise = gumbel_rows(keys, 0, positions, draws, 1500).cpu()
    expected = twin_rows(KEYS, 0, POSITIONS, DRAWS, 1500)
    assert noise.isfinite().all()
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
    assert bool(((noise - expected).abs() <= ulp).all())


def test_arguments_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    keys, positions, draws = (t.to(triton_device) for t in (KEYS, POSITIONS, DRAWS))
    with pytest.raises(ValueError, match="int64"):
        gumbel_rows(keys.int(), 0, positions, draws, 5)
    with pytest.raises(ValueError, match="positions"):
        gumbel_rows(keys, 0, positions[:2], draws, 5)
