"""The noise generator: published known answers, edge values, and the same bits however it is read."""

import math

import pytest
import torch

from dlmgrid.kernels.philox import gumbel_at, gumbel_rows, philox, uniform

F = 0xFFFFFFFF
# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = words(*counter)
    k0, k1 = words(*key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == answer


def test_uniforms_stay_inside_the_open_interval() -> None:
    ends = uniform(torch.tensor([0, F]))
    assert float(ends[0]) > 0 and float(ends[1]) < 1
    gumbel = -torch.log(-torch.log(ends))
    assert bool(torch.isfinite(gumbel.float()).all())


@pytest.mark.parametrize("vocab_size", [1, 5, 63, 64, 1000, 4099])
@pytest.mark.parametrize("num_rows", [1, 3, 33])
def test_single_entries_equal_whole_rows(vocab_size: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    keys = torch.randint(0, 2**32, (num_rows, 2), generator=generator)
    positions = torch.arange(num_rows) + 5
    draws = torch.arange(num_rows) % 7
    rows = gumbel_rows(keys, 0, positions, draws, vocab_size)
    ids = torch.randint(0, vocab_size, (num_rows, 9), generator=generator)
    assert torch.equal(gumbel_at(keys, 0, positions, draws, ids), rows.gather(1, ids))
    alone = gumbel_rows(keys[-1:], 0, positions[-1:], draws[-1:], vocab_size)
    assert torch.equal(alone[0], rows[-1])


def test_every_part_of_the_key_changes_the_row() -> None:
    def row(key: tuple[int, int], stream: int, position: int, draw: int) -> torch.Tensor:
        return gumbel_rows(torch.tensor([key]), stream, torch.tensor([position]), torch.tensor([draw]), 64)

    base = row((1, 2), 0, 3, 4)
    others = [row((9, 2), 0, 3, 4), row((1, 9), 0, 3, 4), row((1, 2), 1, 3, 4), row((1, 2), 0, 9, 4),
              row((1, 2), 0, 3, 9)]  # fmt: skip
    assert torch.equal(base, row((1, 2), 0, 3, 4))
    assert all(not torch.equal(base, other) for other in others)
    assert len({round(float(x[0, 0]), 6) for x in [base, *others]}) == 6


def test_the_values_are_gumbel_distributed() -> None:
    rows = gumbel_rows(
        torch.tensor([[7, 8]] * 64), 0, torch.arange(64), torch.zeros(64, dtype=torch.int64), 4096
    )
    values = rows.flatten().double()
    count = values.numel()
    assert float(values.mean()) == pytest.approx(0.57721566, abs=5 * math.pi / math.sqrt(6 * count))
    for point in (-1.0, 0.0, 1.0, 3.0):
        expected = math.exp(-math.exp(-point))
        tolerance = 5 * math.sqrt(expected * (1 - expected) / count)
        assert float((values <= point).double().mean()) == pytest.approx(expected, abs=tolerance)
