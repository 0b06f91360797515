"""Reading a checkpoint folder: its settings, and whether its files hold what the model needs.

Everything but :func:`stream_tensors` works without torch and reads headers only, so a grid is refused for a
missing or truncated checkpoint in seconds, on a machine without a GPU, before any model loads. Errors name
the file, the tensor, what was found and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.shards import (
    INDEX_FILE,
    SINGLE_FILE,
    existing_folder,
    product,
    read_entries,
    read_json,
    tensor_files,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_LAYERS = 1024
MAX_SIZE = 2**31 - 1
"""Bounds of config.json's integers: a file beyond them is broken, and listing its tensors would not end."""

MIN_BLOCK_LENGTH = 4
MAX_BLOCK_LENGTH = 64
KEY_TILE = 64
"""Width of the attention's key tile (kernels/attention), which a block length must divide."""

DEFAULT_BLOCK_LENGTH = 4
DEFAULT_MASK_TOKEN_ID = 151669
"""What SDAR's published code takes where config.json is silent (JetAstra/SDAR, modeling files)."""

FAMILIES = ("sdar",)
"""Values of ``model_type`` that can be run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What the forward pass and the decoder need to know of a checkpoint. Lengths in tokens."""

    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    block_length: int
    mask_token_id: int
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    max_position_embeddings: int
    torch_dtype: str

    @property
    def num_parameters(self) -> int:
        return sum(product(shape) for shape in expected_tensors(self).values())


def read_config(folder: Path | str, block_length: int | None = None) -> ModelConfig:
    """Read config.json, generation_config.json and the tensor names of a checkpoint folder.

    ``block_length`` overrides the checkpoint's own. Raises InputError for a missing folder or file, broken
    JSON, an unknown family, a missing or impossible value, and settings the forward pass does not implement.
    """
    folder = existing_folder(folder)
    path = folder / "config.json"
    values = read_json(path)
    family = values.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"{path}: model_type is {family!r}; known families: {', '.join(FAMILIES)}")
    _refuse_unsupported(path, values)

    number = _IntReader(path, values)
    hidden_size = number("hidden_size")
    num_heads = number("num_attention_heads")
    num_kv_heads = number("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise InputError(
            f"{path}: {num_heads} attention heads are not a multiple of {num_kv_heads} key/value heads"
        )
    head_dim = number("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise InputError(f"{path}: head_dim is {head_dim}; rotary embedding needs an even width")
    vocab_size = number("vocab_size")
    length = block_length if block_length is not None else number("block_size", _default_block_length(folder))
    check_block_length(length, where=str(path) if block_length is None else "block_length")

    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    stops_from = generation_path if generation.get("eos_token_id") is not None else path
    stops = _id_list(
        stops_from, (generation if stops_from is generation_path else values).get("eos_token_id")
    )
    if not stops:
        raise InputError(
            f"{path}: no eos_token_id here or in generation_config.json; add the ids that end an answer"
        )
    eos = _id_list(path, values.get("eos_token_id"))
    config = ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_hidden_layers=number("num_hidden_layers", at_most=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=number("intermediate_size"),
        vocab_size=vocab_size,
        rope_theta=_rope_theta(path, values),
        rms_norm_eps=_real(path, values, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qk_norm=any(name.endswith(".self_attn.q_norm.weight") for name in tensor_files(folder)),
        block_length=length,
        mask_token_id=number("mask_token_id", DEFAULT_MASK_TOKEN_ID, at_least=0),
        stop_token_ids=stops,
        bos_token_id=_optional_id(path, values, "bos_token_id"),
        eos_token_id=eos[0] if eos else None,
        pad_token_id=_optional_id(path, values, "pad_token_id"),
        max_position_embeddings=number("max_position_embeddings", 32768),
        torch_dtype=str(values.get("torch_dtype") or values.get("dtype") or "bfloat16"),
    )
    _check_ids(path, config)
    return config


def check_checkpoint(folder: Path | str, block_length: int | None = None) -> ModelConfig:
    """Check a checkpoint folder whole, without torch and without reading its weights.

    Every expected tensor is in the header it should be in, with its shape, and no other; every shard is there
    with the size its header says; special ids fit the vocabulary and the tokenizer knows the mask id. Raises
    InputError for the first fault.
    """
    from dlmgrid.workers.models.vocabulary import check_vocabulary

    folder = existing_folder(folder)
    config = read_config(folder, block_length)
    found = {entry.name: entry for entry in read_entries(folder)}
    expected = expected_tensors(config)
    where = folder / (INDEX_FILE if (folder / INDEX_FILE).exists() else SINGLE_FILE)
    tied = config.tie_word_embeddings
    if not tied and "lm_head.weight" not in found and "model.embed_tokens.weight" in found:
        raise InputError(
            f"{where}: tensor lm_head.weight is missing, expected {list(expected['lm_head.weight'])} since "
            f"{folder / 'config.json'} says tie_word_embeddings false; set it to true if the head "
            "is the embedding"
        )
    if tied and "lm_head.weight" in found:
        raise InputError(
            f"{found['lm_head.weight'].file}: found tensor lm_head.weight, expected none since "
            f"{folder / 'config.json'} says tie_word_embeddings true; set it to false to use this head"
        )
    for name, shape in expected.items():
        entry = found.get(name)
        if entry is None:
            raise InputError(f"{where}: tensor {name} is missing, expected shape {list(shape)}")
        if entry.shape != shape:
            raise InputError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}"
            )
        if entry.dtype not in ("F32", "BF16", "F16"):
            raise InputError(f"{entry.file}: tensor {name} has type {entry.dtype}, expected F32, BF16 or F16")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise InputError(
            f"{found[extra[0]].file}: tensor {extra[0]} is not part of a {config.family} model with "
            f"{config.num_hidden_layers} layers ({len(extra)} such); expected the names of config.json's "
            "geometry"
        )
    check_vocabulary(folder, config)
    return config


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of this geometry holds (SDAR shares the layout of Qwen3)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (queries, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (keys, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (keys, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, queries)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_block_length(length: int, where: str = "block_length") -> None:
    """Raise InputError where blocks of ``length`` tokens cannot be run."""
    if not MIN_BLOCK_LENGTH <= length <= MAX_BLOCK_LENGTH or KEY_TILE % length:
        fits = [str(n) for n in range(MIN_BLOCK_LENGTH, MAX_BLOCK_LENGTH + 1) if KEY_TILE % n == 0]
        raise InputError(f"{where}: block length {length} cannot be run; use one of {', '.join(fits)}")


def stream_tensors(folder: Path | str, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder, one shard open at a time, straight to ``device`` in its stored type."""
    from safetensors import safe_open

    folder = existing_folder(folder)
    for file in sorted(set(tensor_files(folder).values())):
        with safe_open(str(folder / file), framework="pt", device=device) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


def _refuse_unsupported(path: Path, values: dict[str, Any]) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise InputError(f"{path}: hidden_act is {values['hidden_act']!r}, expected 'silu'")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if values.get(name):
            raise InputError(
                f"{path}: {name} is {values[name]!r}, expected false for the family {FAMILIES[0]}"
            )
    if "quantization_config" in values:
        raise InputError(
            f"{path}: quantization_config found; quantised weights are not read, use fp32 or bf16 ones"
        )


def _default_block_length(folder: Path) -> int:
    """Block length of a folder whose config.json has none: published variants carry it in their name only
    (JetLM/SDAR-8B-Chat-b32), which a hub cache repeats in its folder names."""
    for part in reversed(folder.absolute().parts):
        if match := re.search(r"-b(4|8|16|32|64)$", part):
            return int(match.group(1))
    return DEFAULT_BLOCK_LENGTH


def _rope_theta(path: Path, values: dict[str, Any]) -> float:
    """The rotary base, flat or nested (transformers 5 writes ``rope_parameters``); any scaling is refused."""
    nested = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = nested.get("rope_type", nested.get("type", "default")) if isinstance(nested, dict) else nested
    if kind != "default":
        raise InputError(f"{path}: rotary scaling {kind!r} is not implemented, expected 'default'")
    if "rope_theta" in nested:
        return _real(path, nested, "rope_theta", None)
    return _real(path, values, "rope_theta", None)


def _real(path: Path, values: dict[str, Any], name: str, default: float | None) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{path}: {name} is {value!r}, expected a number above 0")
    return float(value)


class _IntReader:
    """Integers of one config file, each from 1 to ``MAX_SIZE`` unless said otherwise."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def __call__(
        self, name: str, default: int | None = None, *, at_least: int = 1, at_most: int = MAX_SIZE
    ) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise InputError(f"{self.path}: {name} is {value!r}, expected an integer of at least {at_least}")
        if value > at_most:
            raise InputError(f"{self.path}: {name} is {value}, expected an integer of at most {at_most}")
        return value


def _id_list(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{path}: eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _optional_id(path: Path, values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{path}: {name} is {value!r}, expected a token id or null")
    return value


def _check_ids(path: Path, config: ModelConfig) -> None:
    named = [("mask_token_id", config.mask_token_id), ("bos_token_id", config.bos_token_id)]
    named += [("pad_token_id", config.pad_token_id), ("eos_token_id", config.eos_token_id)]
    named += [("stop token id", token) for token in config.stop_token_ids]
    for name, token in named:
        if token is not None and token >= config.vocab_size:
            raise InputError(
                f"{path}: {name} {token} is outside the model's vocabulary of {config.vocab_size}"
            )
    if config.mask_token_id in config.stop_token_ids:
        raise InputError(f"{path}: mask_token_id {config.mask_token_id} is also a stop token id")
