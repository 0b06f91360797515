"""LLaDA and Dream checkpoints: settings read back, sizes as published, and one clear error for each fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.models.checkpoint import check_checkpoint, read_config
from dlmgrid.workers.models.families import known_models
from dlmgrid.workers.testing.tiny_canvas import CANVAS_FAMILIES, tiny_canvas_config, write_tiny_canvas
from dlmgrid.workers.tokenization import load_tokenizer


@pytest.fixture(params=CANVAS_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_settings_are_read_back_and_a_grid_chooses_the_block(family: str, tmp_path: Path) -> None:
    write_tiny_canvas(tmp_path, family)
    expected = tiny_canvas_config(family)
    own = {"llada": 32, "dream": 0}[family]  # 0: the whole generation is one block
    assert check_checkpoint(tmp_path) == replace(expected, block_length=own)
    assert check_checkpoint(tmp_path, 24).block_length == 24  # no key tile bounds it
    with pytest.raises(InputError, match="block_length: 0 cannot be run"):
        read_config(tmp_path, 0)


def test_sizes_of_published_checkpoints() -> None:
    sizes = {model.name: model.parameters for model in known_models()}
    assert round(sizes["GSAI-ML/LLaDA-8B-Instruct"] / 1e9, 4) == 8.0156
    assert round(sizes["Dream-org/Dream-v0-Instruct-7B"] / 1e9, 4) == 7.6156


def head_of(family: str) -> str:
    return {"llada": "model.transformer.ff_out.weight", "dream": "lm_head.weight"}[family]


def without_head(folder: Path, family: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[head_of(family)]
    save_file(tensors, folder / "model.safetensors")


def shape_off_by_one(folder: Path, family: str) -> None:
    name = {
        "llada": "model.transformer.blocks.1.ff_out.weight",
        "dream": "model.layers.1.mlp.down_proj.weight",
    }[family]
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")


def no_bias(folder: Path, family: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    if family == "dream":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.bias")}
    else:
        tensors["model.k_proj.bias"] = tensors[head_of(family)].clone()
    save_file(tensors, folder / "model.safetensors")


def tying(folder: Path, family: str) -> None:
    change(folder, **{{"llada": "weight_tying", "dream": "tie_word_embeddings"}[family]: True})


FAULTS: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "mask-of-another-tokenizer": (
        lambda folder, _: change(folder, mask_token_id=5),
        r"mask_token_id is 5, the tokenizer's mask is <\|mask\|> 259",
    ),
    "mask-outside": (
        lambda folder, _: change(folder, mask_token_id=126336),
        "mask_token_id 126336 is outside the model's vocabulary of 261",
    ),
    "mask-is-a-stop": (
        lambda folder, _: change(folder, mask_token_id=258),
        "mask_token_id 258 is also a stop token id",
    ),
    "missing-head": (
        without_head,
        "(ff_out|lm_head).weight is missing.* says (weight_tying|tie_word_embeddings) false",
    ),
    "unexpected-head": (tying, "expected none since .* says (weight_tying|tie_word_embeddings) true"),
    "shape-off-by-one": (shape_off_by_one, r"has shape \[64, 95\], expected \[64, 96\]"),
    "biases": (no_bias, r"k_proj.bias is (missing, expected shape|not part of a llada model)"),
    "scaled-rope": (
        lambda folder, _: change(folder, rope_scaling={"type": "yarn"}, rope=False),
        "rotary scaling 'yarn' is not implemented|rope is False, expected true",
    ),
    "no-width": (
        lambda folder, _: change(folder, mlp_hidden_size=None, intermediate_size=None),
        "(mlp_hidden_size|intermediate_size) is None, expected an integer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_checkpoint_is_one_clear_error(family: str, fault: str, tmp_path: Path) -> None:
    write_tiny_canvas(tmp_path, family)
    spoil, message = FAULTS[fault]
    spoil(tmp_path, family)
    with pytest.raises(InputError, match=message) as caught:
        check_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(family: str, tmp_path: Path) -> None:
    write_tiny_canvas(tmp_path, family, num_shards=3)
    check_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00003\.safetensors: shard is missing"):
        check_checkpoint(tmp_path)


def test_a_prompt_begins_with_exactly_one_bos(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, processors

    write_tiny_canvas(tmp_path, "llada")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|startoftext|>", special=True)])
    bos = tokenizer.token_to_id("<|startoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", bos)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = load_tokenizer(tmp_path, "llada")
    encoder.check_template()
    chat = Item(item_id="a", messages=[{"role": "user", "content": "What is 2 + 3?"}])
    assert encoder.render(chat) == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    for item in (
        chat,
        Item(item_id="b", prompt="2 + 3 ="),
        Item(item_id="c", prompt="<|startoftext|>2 + 3 ="),
    ):
        ids = encoder.encode(item)
        assert ids[0] == bos and ids.count(bos) == 1


def test_dreams_tokenizer_is_read_from_vocabulary_and_merges(tmp_path: Path) -> None:
    write_tiny_canvas(tmp_path, "dream")
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    added = {
        str(token["id"]): {"content": token["content"], "special": True} for token in whole["added_tokens"]
    }
    settings = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    check_checkpoint(tmp_path)
    encoder = load_tokenizer(tmp_path, "chatml")
    ids = encoder.encode(Item(item_id="a", messages=[{"role": "user", "content": "2 + 3"}]))
    assert ids[0] == 257 and ids.count(258) == 1  # <|im_start|>, <|im_end|>
    assert encoder.decode(ids) == "user\n2 + 3\nassistant\n"
