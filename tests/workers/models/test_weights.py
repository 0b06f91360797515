from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.checkpoint import stream_tensors
from dlmgrid.workers.models.synthetic import tiny_config, write_random_checkpoint
from dlmgrid.workers.models.weights import load_weights, weights_from_tensors


@pytest.mark.parametrize("tied", [False, True])
def test_weights_land_where_they_belong_whatever_the_shards(tied: bool, tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    write_random_checkpoint(tmp_path / "model", config, num_shards=3)
    tensors = dict(stream_tensors(tmp_path / "model"))
    weights = load_weights(tmp_path / "model", config, "cpu", torch.float32)
    layer = weights.layers[1]
    prefix = "model.layers.1."
    heads = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(heads))
    both = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat(both))
    assert torch.equal(layer.down, tensors[prefix + "mlp.down_proj.weight"])
    assert torch.equal(layer.output, tensors[prefix + "self_attn.o_proj.weight"])
    assert layer.head_norm is not None
    assert torch.equal(layer.head_norm[0], tensors[prefix + "self_attn.q_norm.weight"])
    assert torch.equal(layer.head_norm[-1], tensors[prefix + "self_attn.k_norm.weight"])
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert weights.head.shape == (320, config.hidden_size)
    assert torch.equal(weights.head[: config.vocab_size], head)
    assert not weights.head[config.vocab_size :].any()
    again = weights_from_tensors(tensors, config)
    assert all(torch.equal(a, b) for a, b in zip(weights.tensors(), again.tensors(), strict=True))


def test_bytes_are_counted_once_and_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    config = tiny_config()
    write_random_checkpoint(tmp_path / "model", config)
    padding = (320 - config.vocab_size) * config.hidden_size
    spread = config.num_hidden_layers * (4 + 2 - 2) * config.head_dim  # head norms, once a head
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        weights = load_weights(tmp_path / "model", config, "cpu", dtype)
        assert {tensor.dtype for tensor in weights.tensors()} == {dtype}
        assert weights.num_bytes == size * (config.num_parameters + padding + spread)


def test_a_missing_tensor_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"model\.embed_tokens"):
        weights_from_tensors({}, tiny_config())


def test_streamed_tensors_are_those_of_the_files(tmp_path: Path) -> None:
    stored = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "f32": torch.randn(7),
        "i64": torch.arange(4).view(2, 2),
        "bool": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(stored, tmp_path / "model.safetensors")
    found = dict(stream_tensors(tmp_path))
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000), "b": torch.zeros(1000)}, tmp_path / "model.safetensors")
    stream = stream_tensors(tmp_path)
    next(stream)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InputError, match=r"model.safetensors: ends within tensor b"):
        next(stream)
