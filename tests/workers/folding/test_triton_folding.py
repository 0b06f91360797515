"""Folded passes of the Triton kernels: τ = 0 is the unfolded pass bit for bit, as a graph and launch by launch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import confidence_tree, none
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.folding.fold import STAGES, FoldSettings
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint

LENGTH = 4
SLOTS = [0, 0, 0, 0, 0, 1, 1]
STARTS = [0, 4, 4, 4, 4, 0, 0]
PARENTS = [-1, -1, 1, 2, 1, -1, 5]
STORE = [True, False, False, False, False, False, False]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdar")
    config = tiny_family_config(
        "sdar", block_length=LENGTH, head_dim=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )  # fmt: skip
    write_random_checkpoint(folder, config, scale=0.3)
    return folder


def open_engine(folder: Path, kernels: str, device: str, dtype: str = "float32") -> Engine:
    return load_engine(
        folder, num_slots=2, max_length=32, kernels=kernels, device=device, dtype=dtype, self_test=False
    )


def run(
    engine: Engine, tau: tuple[float, ...] | None, gate: str = "parent", *, timed: bool = False
) -> Tensor:
    """A stored block, a root and three nodes behind it; a root and a node of another sample."""
    tokens = torch.full((7, LENGTH), -1, dtype=torch.int32)
    tokens[0] = torch.arange(LENGTH)
    tokens[1:5, 0] = 5
    tokens[2:4, 1] = 9
    tokens[3, 2] = 11
    tokens[4, 3] = 3
    tokens[6, 0] = 2
    engine.reset(0)
    engine.reset(1)
    fold = None if tau is None else (FoldSettings(tau=tau, gate=gate), PARENTS)
    ints = [torch.tensor(values, dtype=torch.int32) for values in (SLOTS, STARTS)]
    return engine.forward(tokens.to(engine.device), *ints, torch.tensor(STORE), fold=fold, timed=timed)


def test_at_tau_0_it_is_the_unfolded_pass_bit_for_bit(checkpoint: Path, triton_device: torch.device) -> None:
    is_gpu = triton_device.type == "cuda"
    engine = open_engine(checkpoint, "triton", triton_device.type, "bfloat16" if is_gpu else "float32")
    plain = run(engine, None)
    for gate in ("parent", "source"):
        for _ in range(3 if is_gpu else 1):  # launch by launch, captured, replayed
            assert torch.equal(run(engine, (0.0,), gate), plain)
            assert engine.fold_report is not None
            assert engine.fold_report.ratios == [1.0, 1.0]
            assert engine.fold_report.seconds is None
    assert torch.equal(run(engine, (0.0,), timed=True), plain)
    assert engine.fold_report is not None
    seconds = engine.fold_report.seconds
    assert seconds is not None
    assert set(seconds) == set(STAGES)
    assert all(seconds[stage] > 0 for stage in ("select", "move", "compute"))


@pytest.mark.parametrize("gate", ["parent", "source"])
def test_it_folds_as_the_twins_do(checkpoint: Path, triton_device: torch.device, gate: str) -> None:
    twins = open_engine(checkpoint, "torch", "cpu")
    engine = open_engine(checkpoint, "triton", triton_device.type)
    for tau in ((0.7, 0.3), (math.inf,)):
        expected = run(twins, tau, gate)
        for timed in (False, True):
            found = run(engine, tau, gate, timed=timed)
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
            assert engine.fold_report is not None
            assert twins.fold_report is not None
            assert engine.fold_report.own_rows == twins.fold_report.own_rows
        ratio = sum(twins.fold_report.ratios)
        assert ratio == 0 if tau == (math.inf,) else 0 < ratio < 2


@pytest.mark.gpu  # the interpreter takes minutes
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=lambda t: f"T{t:g}")
def test_folded_decoding_is_the_serialized_run(
    checkpoint: Path, cuda_device: torch.device, temperature: float
) -> None:
    engine = open_engine(checkpoint, "triton", cuda_device.type, "bfloat16")
    serialized = decode(engine, None, temperature)
    for fold in (
        FoldSettings(tau=(0.0,)),
        FoldSettings(tau=(0.3,), recheck=True),
        FoldSettings(tau=(0.3,), recheck=True, pipelined=True),
    ):
        for _ in range(2):  # the second time from graphs
            found = decode(engine, fold, temperature)
            for one, other in zip(found, serialized, strict=True):
                assert (one.token_ids, one.steps, one.digests) == (
                    other.token_ids,
                    other.steps,
                    other.digests,
                )
            made = sum(sum(one.fold_recomputed) for one in found)
            rows = 2 * sum(one.fold_rows for one in found)
            assert made == rows if fold.tau == (0.0,) else made < rows


def decode(
    engine: Engine, fold: FoldSettings | None, temperature: float, gen_length: int = 10
) -> list[Generation]:
    """Two prompts; without a fold the serialized run."""
    settings = DecodeSettings(
        block_length=LENGTH, gen_length=gen_length, budget=3 if fold else 0, temperature=temperature, rule=static(1),
        noise=NoiseTable(3), stop_token_ids=(), fold=fold,
    )  # fmt: skip
    drafter = confidence_tree.build() if fold else none.build()
    prompts = [
        Prompt(item_id=f"{n}", repeat=0, token_ids=tuple(5 * i % 251 for i in range(n))) for n in (3, 6)
    ]
    return Decoder(engine, drafter, settings, logits_pass=engine.logits_pass).decode(
        prompts, 2 if fold else 1
    )
