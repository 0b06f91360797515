"""Every fault of a checkpoint folder is one line that names the file, the found and the expected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.checkpoint import (
    KEY_TILE,
    ModelConfig,
    check_checkpoint,
    expected_tensors,
    read_config,
    stream_tensors,
)
from dlmgrid.workers.models.families import FAMILIES
from dlmgrid.workers.models.shards import read_entries
from dlmgrid.workers.models.synthetic import tiny_config, write_random_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "model", tiny_config())
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "sharded", tiny_config(), num_shards=3)
    return tmp_path / "sharded"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def fault(folder: Path, block_length: int | None = None) -> str:
    """The one line that a faulty folder is refused with."""
    with pytest.raises(InputError) as caught:
        check_checkpoint(folder, block_length)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "config",
    [tiny_config(), tiny_config(qk_norm=False, tie_word_embeddings=True), tiny_config(num_key_value_heads=1)],
    ids=["untied-qk-norm", "tied-plain", "one-kv-head"],
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_whole_checkpoint_passes_and_tells_its_settings(
    config: ModelConfig, num_shards: int, tmp_path: Path
) -> None:
    write_random_checkpoint(tmp_path / "model", config, num_shards=num_shards)
    assert check_checkpoint(tmp_path / "model") == config
    entries = {entry.name: entry.shape for entry in read_entries(tmp_path / "model")}
    assert entries == expected_tensors(config)
    streamed = {name: tuple(tensor.shape) for name, tensor in stream_tensors(tmp_path / "model")}
    assert streamed == entries
    assert config.num_parameters == sum(torch.Size(shape).numel() for shape in entries.values())


def test_checking_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from dlmgrid.workers.models.checkpoint import check_checkpoint; "
        f"check_checkpoint({str(folder)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


def test_the_published_8b_geometry_adds_up_to_its_published_size() -> None:
    config = replace(
        tiny_config(),
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
    )
    assert 2 * config.num_parameters == 16_381_470_720


def test_silent_settings_take_the_published_defaults(folder: Path) -> None:
    def silence(values: dict[str, Any]) -> None:
        for name in ("block_size", "mask_token_id", "rms_norm_eps", "head_dim", "torch_dtype"):
            del values[name]
        values["vocab_size"] = 151936

    edit_json(folder / "config.json", silence)
    config = read_config(folder)
    assert (config.block_length, config.mask_token_id, config.rms_norm_eps) == (4, 151669, 1e-6)
    assert (config.head_dim, config.torch_dtype) == (16, "bfloat16")


def test_a_variant_that_tells_its_block_length_by_its_name_only(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--JetLM--SDAR-8B-Chat-b32" / "snapshots" / "abc"
    write_random_checkpoint(snapshot, tiny_config())
    edit_json(snapshot / "config.json", lambda values: values.pop("block_size"))
    assert read_config(snapshot).block_length == 32


def test_stop_ids_come_from_the_generation_config_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256, 258]}')
    assert read_config(folder).stop_token_ids == (258, 256)
    (folder / "generation_config.json").write_text("{}")
    assert read_config(folder).stop_token_ids == (258,)


def test_rotary_base_may_be_nested(folder: Path) -> None:
    def nest(values: dict[str, Any]) -> None:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta") * 10}

    edit_json(folder / "config.json", nest)
    assert read_config(folder).rope_theta == 100_000.0


def test_block_length_of_a_grid_overrides_the_checkpoints(folder: Path) -> None:
    assert check_checkpoint(folder, 16).block_length == 16
    for length in (1, 2, 3, 12, 24, 128):
        text = fault(folder, length)
        assert f"block length {length} cannot be run; use one of 4, 8, 16, 32, 64" in text


def test_the_key_tile_is_the_kernels() -> None:
    from dlmgrid.kernels.attention import TILE_KEYS

    assert KEY_TILE == TILE_KEYS


def test_missing_folder(tmp_path: Path) -> None:
    assert fault(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such checkpoint folder"


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert fault(folder).startswith(f"{folder / 'config.json'}: file is missing")


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "\xff", "[" * 100_000, '{"rope_theta": Infinity}', '{"rms_norm_eps": NaN}'],
    ids=["cut", "no-object", "no-utf8", "nested", "infinite", "no-number"],
)
def test_bad_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert fault(folder).startswith(f"{folder / 'config.json'}: ")


def test_unknown_family_lists_the_known(folder: Path) -> None:
    edit_json(folder / "config.json", lambda values: values.update(model_type="mamba"))
    assert fault(folder).endswith(
        "model_type is 'mamba'; known families: "
        + ", ".join(name for family in FAMILIES.values() for name in family.model_types)
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", "64", "hidden_size is '64', expected an integer of at least 1"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("num_hidden_layers", 10**7, "num_hidden_layers is 10000000, expected an integer of at most 1024"),
        ("vocab_size", None, "vocab_size is None"),
        ("vocab_size", 10**20, "vocab_size is 100000000000000000000, expected an integer of at most"),
        ("num_key_value_heads", 3, "4 attention heads are not a multiple of 3"),
        ("head_dim", 15, "head_dim is 15; rotary embedding needs an even width"),
        ("rope_theta", None, "rope_theta is None"),
        ("rms_norm_eps", -1.0, "rms_norm_eps is -1.0"),
        ("block_size", 24, "block length 24 cannot be run"),
        ("mask_token_id", 261, "mask_token_id 261 is outside the model's vocabulary of 261"),
        ("mask_token_id", 258, "mask_token_id 258 is also a stop token id"),
        ("eos_token_id", None, "no eos_token_id here or in generation_config.json"),
        ("eos_token_id", [2, 999], "stop token id 999 is outside"),
        ("eos_token_id", ["</s>"], "expected a token id or a list of them"),
        ("pad_token_id", 5000, "pad_token_id 5000 is outside"),
        ("bos_token_id", "x", "bos_token_id is 'x'"),
        ("hidden_act", "gelu", "hidden_act is 'gelu', expected 'silu'"),
        ("attention_bias", True, "attention_bias is True, expected false"),
        ("use_sliding_window", True, "use_sliding_window is True"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "rotary scaling 'yarn' is not implemented"),
        ("quantization_config", {"bits": 4}, "quantised weights are not read"),
    ],
)
def test_impossible_settings(folder: Path, name: str, value: object, message: str) -> None:
    edit_json(folder / "config.json", lambda values: values.update({name: value}))
    text = fault(folder)
    assert message in text
    assert text.startswith(str(folder / "config.json"))


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json is here" in fault(folder)


def test_missing_shard(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert fault(sharded).startswith(f"{shard}: shard is missing")


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_truncated_shard(sharded: Path, num_bytes: int) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:num_bytes])
    text = fault(sharded)
    assert text.startswith(str(shard))
    assert "download it again" in text
    if num_bytes == -1:
        assert f"file has {len(whole) - 1} bytes, its header expected {len(whole)}" in text


def test_broken_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + b"?" + whole[9:])
    assert fault(folder).startswith(f"{path}: its safetensors header is broken")


def test_index_that_disagrees_with_its_shards(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit_json(index, lambda values: values["weight_map"].pop("model.norm.weight"))
    assert "tensor model.norm.weight is not listed in model.safetensors.index.json" in fault(sharded)
    edit_json(
        index, lambda values: values.update(weight_map=names | {"model.extra": names["model.norm.weight"]})
    )
    assert "tensor model.extra is missing, model.safetensors.index.json expected it here" in fault(sharded)
    edit_json(index, lambda values: values.pop("weight_map"))
    assert "weight_map is missing" in fault(sharded)


def test_missing_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    expected = "tensor model.layers.1.mlp.up_proj.weight is missing, expected shape [96, 64]"
    assert fault(folder) == f"{folder / 'model.safetensors'}: {expected}"


def test_a_norm_that_only_some_layers_have(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    assert "model.layers.1.self_attn.k_norm.weight is missing, expected shape [16]" in fault(folder)


def test_extra_tensor(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert f"tensor {name} is not part of a sdar model with 2 layers" in fault(folder)


def test_wrong_shape(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    text = fault(folder)
    assert text == f"{folder / 'model.safetensors'}: tensor {name} has shape [64, 64], expected [32, 64]"


def test_wrong_type(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    )
    assert "tensor model.norm.weight has type I8, expected F32, BF16 or F16" in fault(folder)


def test_tied_head_where_an_untied_one_is_expected_and_the_reverse(folder: Path) -> None:
    edit_json(folder / "config.json", lambda values: values.update(tie_word_embeddings=True))
    assert "found tensor lm_head.weight, expected none since" in fault(folder)
    edit_json(folder / "config.json", lambda values: values.update(tie_word_embeddings=False))
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    text = fault(folder)
    assert "tensor lm_head.weight is missing, expected [261, 64] since" in text
    assert "says tie_word_embeddings false" in text


def test_tokenizer_without_the_mask_id(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", lambda values: values["added_tokens"].pop())
    text = fault(folder)
    assert text.startswith(str(folder / "tokenizer.json"))
    assert "mask_token_id 259" in text
    (folder / "added_tokens.json").write_text('{"<|mask|>": 259}')  # where SDAR has it
    check_checkpoint(folder)


def test_another_mask_id_than_the_tokenizers_mask_token(folder: Path) -> None:
    edit_json(folder / "config.json", lambda values: values.update(mask_token_id=5))
    assert "mask_token_id is 5, the tokenizer's mask is <|mask|> 259" in fault(folder)


def test_a_tokenizer_that_names_no_mask_takes_the_configured_id(folder: Path) -> None:
    def rename(values: dict[str, Any]) -> None:
        for token in values["added_tokens"]:
            token["content"] = token["content"].replace("mask", "repo")

    edit_json(folder / "tokenizer.json", rename)
    check_checkpoint(folder)


def test_tokenizer_of_a_larger_model(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", lambda values: values["model"]["vocab"].update(zebra=5000))
    assert "the tokenizer has ids up to 5000, the model's vocabulary is 261" in fault(folder)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json (nor vocab.json with merges.txt)" in fault(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": {}}}'])
def test_unreadable_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert fault(folder).startswith(str(folder / "tokenizer.json"))
