"""Folded decoding: τ = 0 is the unfolded run, recheck is the serialized one, and what it recomputed is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.decoding.commit_rules import CommitRule, static, threshold
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import confidence_tree, none
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.folding.fold import FoldSettings
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint
from dlmgrid.workers.testing.tiny_target import TinyTarget
from dlmgrid.workers.unit_runner import fold_settings

PROMPTS = [Prompt(item_id=f"{n}", repeat=0, token_ids=tuple(5 * i % 251 for i in range(n))) for n in (3, 13)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    write_random_checkpoint(folder, tiny_family_config("sdar", block_length=8), scale=0.3)
    return load_engine(folder, num_slots=2, max_length=64, self_test=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decode(
    target: Engine | TinyTarget,
    fold: FoldSettings | None,
    *,
    budget: int = 5,
    temperature: float = 0.0,
    rule: CommitRule | None = None,
    lengths: tuple[int, int] = (8, 8),
) -> list[Generation]:
    block_length, gen_length = lengths
    settings = DecodeSettings(
        block_length=block_length, gen_length=gen_length, budget=budget, temperature=temperature,
        rule=rule or static(1), noise=NoiseTable(3), stop_token_ids=(), fold=fold, profiled=True,
    )  # fmt: skip
    drafter = confidence_tree.build() if budget else none.build()
    return Decoder(target, drafter, settings).decode(PROMPTS)


def same(ours: list[Generation], theirs: list[Generation]) -> bool:
    return all(
        (one.token_ids, one.steps, one.digests) == (other.token_ids, other.steps, other.digests)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t:g}")
def test_at_tau_0_it_is_the_unfolded_run(engine: Engine, temperature: float) -> None:
    unfolded = decode(engine, None, temperature=temperature)
    folded = decode(engine, FoldSettings(tau=(0.0,)), temperature=temperature)
    assert same(folded, unfolded)
    for one, other in zip(folded, unfolded, strict=True):
        assert one.accepted == other.accepted
        assert one.nfe_denoise == other.nfe_denoise
        assert one.fold_recomputed == [one.fold_rows] * engine.config.num_hidden_layers
        assert one.fold_rows == 8 * one.drafted_nodes > 0
        assert min(one.seconds.select, one.seconds.move, one.seconds.compute) > 0


def test_recheck_is_the_serialized_run_however_much_folds(engine: Engine) -> None:
    serialized = decode(engine, None, budget=0)
    rechecked = decode(engine, FoldSettings(tau=(100.0,), recheck=True))
    assert same(rechecked, serialized)
    assert sum(sum(one.accepted) for one in rechecked) > 0
    for one in rechecked:
        assert one.fold_recomputed == [0] * engine.config.num_hidden_layers
        assert one.nfe_denoise > len(one.accepted)
        assert one.seconds.correct > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t:g}")
@pytest.mark.parametrize("tau", [0.0, 0.3, 100.0])
@pytest.mark.parametrize("rule", [static(1), threshold(0.3)], ids=["static", "threshold"])
def test_pipelined_is_the_serialized_run_and_folds(
    engine: Engine, tau: float, temperature: float, rule: CommitRule
) -> None:
    serialized = decode(engine, None, budget=0, temperature=temperature, rule=rule)
    fold = FoldSettings(tau=(tau,), recheck=True, pipelined=True)
    found = decode(engine, fold, temperature=temperature, rule=rule)
    assert same(found, serialized)
    assert [one.argmax_commits for one in found] == [one.argmax_commits for one in serialized]
    for one in found:
        assert (
            len(one.accepted) <= one.nfe_denoise <= len(one.accepted) + 2
        )  # a pass of its own at a block's end
        assert sum(one.accepted) + len(one.accepted) == len(one.steps)
        assert one.fold_rows == 8 * one.drafted_nodes
        all_rows = one.fold_rows * engine.config.num_hidden_layers
        assert (sum(one.fold_recomputed) < all_rows) == (tau > 0)
    assert sum(sum(one.accepted) for one in found) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t:g}")
def test_pipelined_rounds_of_the_reference_model(temperature: float) -> None:
    engine = load_engine(resolve_checkpoint("reference"), num_slots=2, max_length=128, self_test=False)
    serialized = decode(engine, None, budget=0, temperature=temperature, lengths=(32, 24))
    runs = [
        decode(
            engine,
            FoldSettings(tau=(0.1,), recheck=True, pipelined=flag),
            temperature=temperature,
            lengths=(32, 24),
        )
        for flag in (True, False)
    ]
    for run in runs:
        assert same(run, serialized)
        for one in run:
            assert 0 < sum(one.fold_recomputed) < one.fold_rows * engine.config.num_hidden_layers
    pipelined, rechecked = (sum(one.nfe_denoise for one in run) for run in runs)
    drawn = sum(one.nfe_denoise for one in serialized)
    assert pipelined < min(rechecked, drawn)


def test_a_target_that_cannot_fold_is_refused() -> None:
    target = TinyTarget(block_length=8, vocab_size=40)
    with pytest.raises(ValueError, match="pipelined is a way to recheck"):
        FoldSettings(tau=(0.1,), pipelined=True)
    with pytest.raises(ValueError, match="computes no folded pass"):
        decode(target, FoldSettings(tau=(0.1,)))


def test_cells_say_how_they_fold() -> None:
    cell = Cell(
        model="m", benchmark="words", prompt_version="1", method="ssd", budget=4, temperature=0.0, block_length=8,
        gen_length=8, fold_tau=0.2, fold_tau_by_layer="0.1,0.2", fold_gate="source",
    )  # fmt: skip
    assert fold_settings(cell) == FoldSettings(tau=(0.1, 0.2), gate="source")
    assert cell.claim == "approximate"
    assert not cell.keeps_to_reference
    assert cell.reference().fold_tau is None
    assert fold_settings(cell.reference()) is None
    plain = {"fold_tau_by_layer": "", "fold_gate": "parent"}
    rechecked = Cell.from_dict({**cell.to_dict(), **plain, "fold_recheck": True})
    at_zero = Cell.from_dict({**cell.to_dict(), **plain, "fold_tau": 0.0})
    pipelined = Cell.from_dict({**rechecked.to_dict(), "fold_pipelined": True})
    assert fold_settings(pipelined) == FoldSettings(tau=(0.2,), recheck=True, pipelined=True)
    assert pipelined.cell_key != rechecked.cell_key
    assert pipelined.reference() == rechecked.reference()
    for kept in (rechecked, pipelined, at_zero):
        assert kept.claim == "exact"
        assert kept.keeps_to_reference


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": "full"}, "fold: folded passes are not defined with window 'full'"),
        ({"product_tau": 0.5}, "fold: folded passes are not defined with product_tau"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeSettings(
            block_length=8, gen_length=8, budget=4, temperature=0.0, rule=static(1), noise=NoiseTable(3),
            stop_token_ids=(), fold=FoldSettings(tau=(0.1,)), **changes,
        )  # fmt: skip
