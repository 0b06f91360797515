"""Decoding with the Triton kernels, in the interpreter: exact at three levels against its own serialized run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlmgrid.workers.decoding.commit_rules import static
from dlmgrid.workers.decoding.decoder import Decoder, DecodeSettings, Generation, Prompt
from dlmgrid.workers.decoding.noise import NoiseTable
from dlmgrid.workers.drafting import confidence_tree, none
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint

PROMPTS = [Prompt(item_id=f"{n}", repeat=0, token_ids=tuple(5 * i % 251 for i in range(n))) for n in (5, 6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdar")
    config = tiny_family_config(
        "sdar", block_length=4, head_dim=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    write_random_checkpoint(folder, config, scale=0.3)
    return folder


@pytest.fixture
def device(triton_device: torch.device) -> str:
    return triton_device.type


def decode(engine: Engine, budget: int, temperature: float, max_in_flight: int) -> list[Generation]:
    settings = DecodeSettings(
        block_length=4,
        gen_length=1,
        budget=budget,
        temperature=temperature,
        rule=static(1),
        noise=NoiseTable(3),
        stop_token_ids=(),
    )
    drafter = confidence_tree.build() if budget else none.build()
    decoder = Decoder(engine, drafter, settings, logits_pass=engine.logits_pass)
    return decoder.decode(PROMPTS, max_in_flight)


# The interpreter takes a minute a run; T = 1 goes through the same kernels and the noise.
@pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.gpu), 1.0], ids=lambda t: f"T{t:g}"
)
def test_a_drafted_run_is_its_serialized_run(checkpoint: Path, device: str, temperature: float) -> None:
    engine = load_engine(
        checkpoint, num_slots=2, max_length=32, device=device, kernels="triton", self_test=False
    )
    serialized = decode(engine, 0, temperature, max_in_flight=1)
    drafted = decode(engine, 3, temperature, max_in_flight=2)
    for ours, theirs in zip(drafted, serialized, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.steps == theirs.steps
        assert ours.digests == theirs.digests
    assert sum(sum(one.accepted) for one in drafted) > 0


def test_agrees_with_the_twins(checkpoint: Path, device: str) -> None:
    tokens = torch.tensor([[1, -1, 3, 4], [9, 9, -1, 250]], dtype=torch.int32)
    hidden = []
    for kernels in ("torch", "triton"):
        engine = load_engine(
            checkpoint, num_slots=1, max_length=32, device=device, kernels=kernels, self_test=False
        )
        zeros = torch.zeros(2, dtype=torch.int32)
        starts = torch.tensor([0, 4], dtype=torch.int32)
        hidden.append(engine.forward(tokens.to(device), zeros, starts, torch.tensor([True, False])))
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)


def test_passes_may_be_asked_for_within_inference_mode_and_outside_of_it(
    checkpoint: Path, device: str
) -> None:
    engine = load_engine(
        checkpoint, num_slots=1, max_length=32, device=device, kernels="triton", self_test=False
    )
    zero = torch.zeros(1, dtype=torch.int32)

    def run() -> torch.Tensor:
        tokens = torch.tensor([[1, -1, 3, 4]], dtype=torch.int32, device=device)
        return engine.forward(tokens, zero, zero, torch.tensor([False]))

    with torch.inference_mode():
        first = run()
    assert torch.equal(run(), first)


@pytest.mark.gpu  # packs of 33 blocks take the interpreter minutes
def test_the_self_test_passes(checkpoint: Path, cuda_device: torch.device) -> None:
    engine = load_engine(
        checkpoint, num_slots=1, max_length=16, device=cuda_device.type, kernels="triton", self_test=False
    )
    engine.weights = engine.weights.__class__(
        **{name: getattr(engine.weights, name) for name in ("embedding", "final_norm", "head")},
        layers=engine.weights.layers[:1],
    )
    engine.self_test()


def test_what_the_kernels_cannot_take_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="'metal' is not one of torch, triton"):
        load_engine(checkpoint, num_slots=1, max_length=16, kernels="metal")
    write_random_checkpoint(tmp_path, tiny_family_config("sdar", block_length=8, head_dim=32), scale=0.3)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InputError, match=r"head widths 64, .* the model has 32; use kernels: torch"):
        load_engine(tmp_path, num_slots=1, max_length=16, kernels="triton")
    with pytest.raises(InputError, match="bfloat16"):
        load_engine(checkpoint, num_slots=1, max_length=16, kernels="triton", dtype="bfloat16")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(InputError, match="needs a CUDA device; use kernels: torch"):
        load_engine(checkpoint, num_slots=1, max_length=16, kernels="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="triton is not installed"):
        load_engine(checkpoint, num_slots=1, max_length=16, kernels="triton")
