"""Checkpoints of every family: what is checked before weights load, and how weights come in."""

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
from dlmgrid.workers.models.checkpoint import check_checkpoint, read_config
from dlmgrid.workers.models.families import FAMILIES, get_family
from dlmgrid.workers.models.synthetic import tiny_family_config, write_random_checkpoint
from dlmgrid.workers.models.weights import load_weights

FAMILY_NAMES = ("sdar", "llada2", "fast_dllm_v2", "nemotron")


@pytest.fixture(params=FAMILY_NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "model", tiny_family_config(request.param), num_shards=2)
    return tmp_path / "model"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def fault(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        check_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names_of(folder: Path) -> dict[str, str]:
    return dict(get_family(read_config(folder).family).tensor_names)


def test_a_whole_folder_passes(folder: Path) -> None:
    config = check_checkpoint(folder)
    assert config == tiny_family_config(config.family)


def test_another_mask_id_than_the_tokenizers(folder: Path) -> None:
    edit_json(folder / "config.json", lambda values: values.update(mask_token_id=5))
    assert "mask_token_id is 5, the tokenizer's mask is <|mask|> 259" in fault(folder)


def test_a_missing_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    assert fault(folder).startswith(f"{shard}: shard is missing")


def test_a_shape_that_is_off_by_one(folder: Path) -> None:
    name = names_of(folder)["output"].format(layer=1)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = tensors[name][:, 1:].contiguous()
            save_file(tensors, path)
    assert f"tensor {name} has shape [64, 63], expected [64, 64]" in fault(folder)


def test_a_head_where_the_embedding_is_tied_to_it(folder: Path) -> None:
    head = names_of(folder)["head"]
    edit_json(folder / "config.json", lambda values: values.update(tie_word_embeddings=True))
    assert f"found tensor {head}, expected none since" in fault(folder)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_no_head_where_one_is_expected(family: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, tiny_family_config(family, tie_word_embeddings=True))
    check_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", lambda values: values.update(tie_word_embeddings=False))
    assert f"tensor {names_of(tmp_path)['head']} is missing, expected [261, 64] since" in fault(tmp_path)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, tiny_family_config("llada2"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.15.up_proj.weight"
    del tensors[name]
    save_file(tensors, path)
    assert f"tensor {name} is missing, expected shape [32, 64]" in fault(tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [
        ("llada2", "use_qkv_bias", True, "use_qkv_bias is True, expected false for the family llada2_moe"),
        ("llada2", "score_function", "softmax", "score_function is 'softmax', expected 'sigmoid'"),
        ("llada2", "n_group", 5, "16 experts cannot be split into n_group 5"),
        ("llada2", "num_experts_per_tok", 9, "num_experts_per_tok 9 is more than the kept groups hold"),
        ("llada2", "rotary_dim", 17, "rotary_dim is 17, expected an even number"),
        ("fast_dllm_v2", "bd_size", 24, "block length 24 cannot be run"),
        ("fast_dllm_v2", "use_sliding_window", True, "use_sliding_window is True"),
        ("nemotron", "dlm_paradigm", "autoregressive", "dlm_paradigm is 'autoregressive', expected 'bidi"),
        ("nemotron", "sliding_window", 4096, "sliding_window is 4096, expected null"),
        ("nemotron", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e6}, "'longrope' is not"),
    ],
)
def test_settings_that_a_family_does_not_run(
    family: str, name: str, value: object, message: str, tmp_path: Path
) -> None:
    write_random_checkpoint(tmp_path, tiny_family_config(family))
    edit_json(tmp_path / "config.json", lambda values: values.update({name: value}))
    assert message in fault(tmp_path)


def test_published_rotary_settings_without_a_factor_for_the_cosines(tmp_path: Path) -> None:
    """The 8B file gives mscale and mscale_all_dim of 1, whose quotient is 1, and no scaling of the queries."""
    write_random_checkpoint(tmp_path, tiny_family_config("nemotron"))

    def publish(values: dict[str, Any]) -> None:
        nested = values["rope_parameters"]
        del nested["attention_factor"], nested["llama_4_scaling_beta"]
        nested.update(mscale=1.0, mscale_all_dim=1.0)

    edit_json(tmp_path / "config.json", publish)
    assert read_config(tmp_path) == tiny_family_config("nemotron")
    edit_json(tmp_path / "config.json", lambda values: values["rope_parameters"].update(mscale_all_dim=0))
    yarn = read_config(tmp_path).yarn
    assert yarn is not None
    assert yarn.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_the_mask_id_that_fast_dllm_v2_keeps_out_of_its_config(tmp_path: Path) -> None:
    config = replace(tiny_family_config("fast_dllm_v2"), vocab_size=151936, mask_token_id=151665)
    values = FAMILIES["fast_dllm_v2"].config_json(config)
    assert "mask_token_id" not in values
    write_random_checkpoint(tmp_path, tiny_family_config("fast_dllm_v2"))
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path).mask_token_id == 151665


def test_weights_come_in_shard_by_shard(tmp_path: Path) -> None:
    """Loading adds to the host what the weights take there and at most a shard and a half: never the files twice."""
    config = replace(
        tiny_family_config("sdar", num_hidden_layers=4),
        hidden_size=512,
        intermediate_size=2048,
        torch_dtype="bfloat16",
    )
    write_random_checkpoint(tmp_path / "model", config, num_shards=6)
    shard = max(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    code = f"""
import resource, torch
from dlmgrid.workers.models.checkpoint import check_checkpoint
from dlmgrid.workers.models.weights import load_weights

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

config = check_checkpoint({str(tmp_path / "model")!r})
torch.zeros(1).bfloat16().isfinite().all()
before = peak()
weights = load_weights({str(tmp_path / "model")!r}, config, "cpu", torch.bfloat16)
print(peak() - before - weights.num_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert 6 * shard > 30_000_000
    assert int(done.stdout) < 1.5 * shard + 8_000_000


def test_a_number_that_is_none_is_found_while_loading(tmp_path: Path) -> None:
    config = tiny_family_config("llada2")
    write_random_checkpoint(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"experts\.3\.down_proj\.weight: holds NaN or infinity"):
        load_weights(tmp_path, config, "cpu", torch.float32)
