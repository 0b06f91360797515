"""The noise table at its edges: extreme uniforms, the precision of its values, and rows that never repeat."""

from __future__ import annotations

import pytest
import torch

from dlmgrid.kernels.logits import choose
from dlmgrid.kernels.philox import gumbel_rows, philox, uniform
from dlmgrid.kernels.philox import reference as philox_reference
from dlmgrid.workers.decoding.noise import NoiseTable, Stream

LARGEST_WORD = 2**32 - 1


def rows(table: NoiseTable, positions: torch.Tensor, counts: torch.Tensor, vocab: int) -> torch.Tensor:
    keys = torch.tensor([table.key("item", 0)]).expand(len(positions), 2)
    return table.rows(keys, Stream.TOKEN, positions, counts, vocab)


@pytest.mark.parametrize("word", [0, LARGEST_WORD], ids=["U=0", "U=1-eps"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_extreme_uniforms_stay_finite_and_never_choose_a_forbidden_token(
    monkeypatch: pytest.MonkeyPatch, word: int, temperature: float
) -> None:
    def forced(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        quads = torch.broadcast_tensors(*counter)[0]
        forbidden = quads >= 1  # tokens from 4 on get the largest noise, whatever is forced on the others
        return tuple(torch.where(forbidden, LARGEST_WORD, word) for _ in range(4))

    monkeypatch.setattr(philox_reference, "philox", forced)
    gumbel = rows(NoiseTable(1), torch.arange(3), torch.zeros(3, dtype=torch.int64), 64)
    assert bool(torch.isfinite(gumbel).all())
    assert bool((gumbel[:, 4:] > 20).all())
    logits = torch.full((3, 64), -torch.inf)
    logits[:, :4] = torch.tensor([[0.0, 5.0, -20.0, 1.0], [-1e4, -1e4, -1e4, -1e4 + 1], [3.0, 3.0, 3.0, 3.0]])
    choice = choose(logits, temperature, gumbel)
    assert choice.tokens.tolist() == [1, 3, 0]
    assert bool(torch.isfinite(choice.margins).all()) and bool((choice.probabilities > 0).all())


def test_fp32_noise_chooses_as_fp64_noise_does_but_for_near_ties() -> None:
    num_draws = 1_000_000
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(num_draws, 4, generator=generator) * -30
    key = torch.tensor([[3, 5]])
    positions = torch.arange(num_draws)
    zeros = torch.zeros(num_draws, dtype=torch.int64)
    single = gumbel_rows(key.expand(num_draws, 2), 0, positions, zeros, 4)
    words = torch.stack(philox((zeros, positions, zeros, zeros), (key[0, 0], key[0, 1])), dim=1)
    double = -(-uniform(words).log()).log()
    assert torch.equal(single, double.float())
    chosen = (logits + single).argmax(dim=1)
    scores = logits.double() + double
    two = scores.topk(2, dim=1)
    differs = chosen != two.indices[:, 0]
    assert int(differs.sum()) < 20
    assert bool(((two.values[:, 0] - two.values[:, 1])[differs] < 1e-5).all())


def test_no_two_entries_of_the_table_share_a_row() -> None:
    table = NoiseTable(0)
    positions, counts, streams = (
        axis.flatten()
        for axis in torch.meshgrid(torch.arange(1024), torch.arange(16), torch.arange(3), indexing="ij")
    )
    keys = torch.tensor([table.key("item", 0)]).expand(len(positions), 2)
    found = torch.cat(
        [
            gumbel_rows(
                keys[streams == stream], stream, positions[streams == stream], counts[streams == stream], 8
            )
            for stream in Stream
        ]
    )
    assert len(found) == 1024 * 16 * 3
    # One value of 32 bits repeats now and then; two side by side do not.
    assert len(torch.unique(found[:, :2], dim=0)) == len(found)
    assert len(torch.unique(found[:, 4:6], dim=0)) == len(found)


def test_seed_item_and_repeat_give_keys_of_their_own() -> None:
    keys = {
        NoiseTable(seed).key(f"item-{item}", repeat)
        for seed in (0, 1, 2**64 - 1)
        for item in range(100)
        for repeat in range(10)
    }
    assert len(keys) == 3000
    # No field runs into its neighbour.
    assert NoiseTable(1).key("1", 1) != NoiseTable(11).key("1", 1) != NoiseTable(1).key("11", 1)


def test_per_position_noise_ignores_how_many_commits_were_made() -> None:
    positions, counts = torch.tensor([4, 4]), torch.tensor([0, 3])
    fixed = rows(NoiseTable(0, "per_position"), positions, counts, 8)
    fresh = rows(NoiseTable(0), positions, counts, 8)
    assert torch.equal(fixed[0], fixed[1])
    assert not torch.equal(fresh[0], fresh[1])
    assert torch.equal(fixed[0], fresh[0])


@pytest.mark.parametrize(
    ("seed", "mode", "message"),
    [(0, "fresh", "noise 'fresh' is not one of"), (2**64, "commit_count", "64 bits")],
)
def test_a_table_that_cannot_be_is_refused(seed: int, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseTable(seed, mode)
