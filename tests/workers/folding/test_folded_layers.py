"""A folded pass: τ = 0 is the plain pass bit for bit; τ = ∞ computes the root alone; bad settings are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dlmgrid.kernels.specfold import FoldLayout
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.folding.fold import FoldSettings
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint

LENGTH = 8
STARTS = [0, 8, 8, 8, 8, 0, 0]
SLOTS = [0, 0, 0, 0, 0, 1, 1]
PARENTS = [-1, -1, 1, 2, 1, -1, 5]
STORE = torch.tensor([True, False, False, False, False, False, False])


@pytest.fixture(scope="module", params=["sdar", "llada2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    write_random_checkpoint(folder, tiny_family_config(request.param, block_length=LENGTH), scale=0.3)
    return load_engine(folder, num_slots=2, max_length=64, self_test=False)


def states() -> Tensor:
    """A prefill block, a root and three nodes that open one more position each; a root and a node of another sample."""
    tokens = torch.full((7, LENGTH), -1, dtype=torch.int32)
    tokens[0] = torch.arange(LENGTH)
    tokens[1:5, 0] = 5
    tokens[2:4, 1] = 9
    tokens[3, 2] = 11
    tokens[4, 7] = 3
    tokens[6, 0] = 2
    return tokens


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(engine: Engine, tau: tuple[float, ...] | None, gate: str = "parent") -> Tensor:
    engine.reset(0)
    engine.reset(1)
    fold = None if tau is None else (FoldSettings(tau=tau, gate=gate), PARENTS)
    ints = [torch.tensor(values, dtype=torch.int32) for values in (SLOTS, STARTS)]
    return engine.forward(states(), *ints, STORE, fold=fold)


@pytest.mark.parametrize("gate", ["parent", "source"])
def test_at_tau_0_it_is_the_plain_pass_bit_for_bit(engine: Engine, gate: str) -> None:
    plain = run(engine, None)
    assert torch.equal(run(engine, (0.0,), gate), plain)
    assert engine.fold_report is not None
    assert engine.fold_report.ratios == [1.0] * engine.config.num_hidden_layers


def test_at_a_boundless_tau_only_roots_and_stored_blocks_are_computed(engine: Engine) -> None:
    plain = run(engine, None)
    folded = run(engine, (math.inf,))
    assert engine.fold_report is not None
    assert engine.fold_report.ratios == [0.0] * engine.config.num_hidden_layers
    for segment in (0, 1, 5):
        assert torch.equal(folded[segment], plain[segment])
    assert not torch.equal(folded[2], plain[2])
    assert not torch.equal(folded[2], folded[1]), "the difference of a branch is kept"


def test_between_the_recompute_ratio_falls_with_tau(engine: Engine) -> None:
    plain = run(engine, None)
    ratios, errors = [], []
    for tau in (0.0, 0.1, 1.0):
        folded = run(engine, (tau,))
        assert engine.fold_report is not None
        ratios.append(sum(engine.fold_report.ratios))
        errors.append(float((folded[2:5] - plain[2:5]).norm() / plain[2:5].norm()))
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < ratios[0]
    assert errors[0] == 0
    assert 0 < errors[-1] < 1


def test_tau_by_layer(engine: Engine) -> None:
    layers = engine.config.num_hidden_layers
    run(engine, (0.0,) * (layers - 1) + (math.inf,))
    assert engine.fold_report is not None
    assert engine.fold_report.ratios == [1.0] * (layers - 1) + [0.0]
    with pytest.raises(ValueError, match="tau has 7 values"):
        run(engine, (0.0,) * 7)


def layout(parents: list[int], slots: list[int]) -> FoldLayout:
    starts = [0] * len(slots)
    return FoldLayout(parents=parents, slots=slots, starts=starts, block_length=8, taus=(1.0,), gate="parent")


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tau \[-1\]"):
        FoldSettings(tau=(-1,))
    with pytest.raises(ValueError, match="gate 'root'"):
        FoldSettings(tau=(0.1,), gate="root")
    with pytest.raises(ValueError, match="fold parent 2"):
        layout([-1, 2, 0], [0, 0, 0])
    with pytest.raises(ValueError, match="fold parent 0"):
        layout([-1, 0], [0, 1])
