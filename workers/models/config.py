"""What a checkpoint's config.json says, as the forward pass and the decoder need it. No torch here.

:class:`ModelConfig` is one record for all families; :class:`ConfigFile` reads values with errors that name the
file, the key, what was found and what was expected. Which keys a family has is said in the family's file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.shards import product, read_json, tensor_files

if TYPE_CHECKING:
    from dlmgrid.workers.models.family import Family

MAX_LAYERS = 1024
MAX_SIZE = 2**31 - 1
"""Bounds of config.json's integers: a file beyond them is broken, and listing its tensors would not end."""

MIN_BLOCK_LENGTH = 4
MAX_BLOCK_LENGTH = 64
KEY_TILE = 64
"""Width of the attention's key tile (kernels/attention), which a block length must divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023) of the rotary frequencies. ``original_length`` in positions;
    ``attention_factor`` multiplies cosines and sines."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_length))."""

    beta: float
    original_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """A mixture of experts: layers from ``first_layer`` on hold one in place of the dense MLP.

    A token's ``num_chosen`` experts come from the ``num_kept_groups`` best of ``num_groups`` equal groups; their
    weights, scaled to the sum ``routed_scale``, are the unbiased sigmoids. ``shared_size`` is the width of the
    expert that every token passes. ``is_merged``: the files hold one stacked tensor a projection.
    """

    num_experts: int
    num_chosen: int
    num_groups: int
    num_kept_groups: int
    expert_size: int
    shared_size: int
    routed_scale: float
    first_layer: int
    is_merged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What the forward pass and the decoder need to know of a checkpoint. Lengths in tokens.

    ``rotary_dim`` is the number of dimensions of a head that turn, 0 for all of them.
    """

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
    qkv_bias: bool = False
    rotary_dim: int = 0
    yarn: YarnScaling | None = None
    query_scaling: QueryScaling | None = None
    experts: ExpertConfig | None = None

    @property
    def num_parameters(self) -> int:
        from dlmgrid.workers.models.layout import expected_tensors

        return sum(product(shape) for shape in expected_tensors(self).values())

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one position in bf16."""
        return 4 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def seeds_next_block(self) -> bool:
        """Whether the commit pass of a block gives the first token of the next one."""
        return self._family.seeds_next_block

    @property
    def caches(self) -> tuple[str, ...]:
        """The kinds of key/value cache that the model can be run with; the first is the default."""
        return self._family.caches

    def published_decoder(self, variant: str | None = None) -> dict[str, Any]:
        """A published decode rule of the family as fields of a cell, by default its reference implementation's.

        Raises InputError for a variant that the family does not have.
        """
        return self._family.published_decoder(variant).settings

    @property
    def _family(self) -> Family:
        from dlmgrid.workers.models.families import get_family

        return get_family(self.family)


class ConfigFile:
    """config.json of a checkpoint folder, with generation_config.json beside it.

    ``block_length`` is what a grid asks for in place of the checkpoint's own.
    """

    def __init__(self, folder: Path, values: dict[str, Any], block_length: int | None = None) -> None:
        self.folder = folder
        self.path = folder / "config.json"
        self.values = values
        self.wanted_block_length = block_length
        path = folder / "generation_config.json"
        self.generation: dict[str, Any] = read_json(path) if path.exists() else {}

    def integer(
        self, name: str, default: int | None = None, *, at_least: int = 1, at_most: int = MAX_SIZE
    ) -> int:
        """An integer from 1 to ``MAX_SIZE`` unless said otherwise."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise InputError(f"{self.path}: {name} is {value!r}, expected an integer of at least {at_least}")
        if value > at_most:
            raise InputError(f"{self.path}: {name} is {value}, expected an integer of at most {at_most}")
        return value

    def real(self, name: str, default: float | None, values: dict[str, Any] | None = None) -> float:
        """A number above 0, from ``values`` in place of the file's top level where given."""
        value = (self.values if values is None else values).get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{self.path}: {name} is {value!r}, expected a number above 0")
        return float(value)

    def optional_id(self, name: str) -> int | None:
        """A token id or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{self.path}: {name} is {value!r}, expected a token id or null")
        return value

    def first_id(self, name: str) -> int | None:
        """The first of the ids under ``name``, or None."""
        ids = _id_list(self.path, self.values.get(name))
        return ids[0] if ids else None

    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those of generation_config.json, else those of config.json."""
        if self.generation.get("eos_token_id") is not None:
            stops = _id_list(self.folder / "generation_config.json", self.generation["eos_token_id"])
        else:
            stops = _id_list(self.path, self.values.get("eos_token_id"))
        if not stops:
            raise InputError(
                f"{self.path}: no eos_token_id here or in generation_config.json; add the ids that end an answer"
            )
        return stops

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuse a value that the forward pass does not implement; a key that is absent passes."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            expected = " or ".join(_shown(one) for one in allowed)
            family = self.values.get("model_type")
            raise InputError(f"{self.path}: {name} is {value!r}, expected {expected} for the family {family}")

    def heads(
        self, heads: str = "num_attention_heads", kv_heads: str = "num_key_value_heads"
    ) -> tuple[int, int]:
        """The numbers of query and key heads."""
        num_heads = self.integer(heads)
        num_kv_heads = self.integer(kv_heads, num_heads)
        if num_heads % num_kv_heads:
            raise InputError(
                f"{self.path}: {num_heads} attention heads are not a multiple of {num_kv_heads} key/value heads"
            )
        return num_heads, num_kv_heads

    def head_dim(self, default: int, name: str = "head_dim") -> int:
        """The width of a head, which the rotary embedding wants even."""
        width = self.integer(name, default)
        if width % 2:
            raise InputError(f"{self.path}: {name} is {width}; rotary embedding needs an even width")
        return width

    def block_length(self, name: str, default: int) -> int:
        """The block length: the grid's, else the file's under ``name``, else that of the folder's name or
        ``default``."""
        if self.wanted_block_length is not None:
            check_block_length(self.wanted_block_length, "block_length")
            return self.wanted_block_length
        length = self.integer(name, _named_block_length(self.folder) or default)
        check_block_length(length, str(self.path))
        return length

    def rope_parameters(self) -> dict[str, Any]:
        """Rotary settings, flat or nested (transformers 5 writes ``rope_parameters``), under their nested
        names."""
        nested = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise InputError(f"{self.path}: rotary scaling {nested!r} is not implemented, expected 'default'")
        kind = nested.get("rope_type", nested.get("type", "default"))
        top = {"rope_theta": self.values["rope_theta"]} if "rope_theta" in self.values else {}
        return top | nested | {"rope_type": kind}

    def plain_rope_theta(self) -> float:
        """The rotary base; any scaling is refused."""
        parameters = self.rope_parameters()
        if parameters["rope_type"] != "default":
            raise InputError(
                f"{self.path}: rotary scaling {parameters['rope_type']!r} is not implemented, expected 'default'"
            )
        return self.real("rope_theta", None, parameters)

    def has_tensor(self, suffix: str) -> bool:
        """Whether the weights hold a tensor whose name ends so."""
        return any(name.endswith(suffix) for name in tensor_files(self.folder))

    def torch_dtype(self) -> str:
        return str(self.values.get("torch_dtype") or self.values.get("dtype") or "bfloat16")


def read_decoder_config(
    file: ConfigFile,
    family: str,
    *,
    block_key: str = "block_size",
    block_length: int,
    mask_token_id: int,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    rope_theta: float | None = None,
    max_positions: int = 32768,
) -> ModelConfig:
    """Read the keys that transformers' dense decoders share (Qwen2, Qwen3, Llama, Ministral).

    ``block_length``, ``mask_token_id`` and ``max_positions`` are the family's where the file is silent;
    ``rope_theta`` is given where the family reads it itself. Raises InputError for a missing or impossible value.
    """
    file.must_be("hidden_act", "silu")
    if "quantization_config" in file.values:
        raise InputError(
            f"{file.path}: quantization_config found; quantised weights are not read, use fp32 or bf16 ones"
        )
    hidden_size = file.integer("hidden_size")
    num_heads, num_kv_heads = file.heads()
    head_dim = file.head_dim(hidden_size // num_heads)
    vocab_size = file.integer("vocab_size")
    length = file.block_length(block_key, block_length)
    stops = file.stop_token_ids()
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_hidden_layers=file.integer("num_hidden_layers", at_most=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=file.integer("intermediate_size"),
        vocab_size=vocab_size,
        rope_theta=file.plain_rope_theta() if rope_theta is None else rope_theta,
        rms_norm_eps=file.real("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(file.values.get("tie_word_embeddings", False)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        block_length=length,
        mask_token_id=file.integer("mask_token_id", mask_token_id, at_least=0),
        stop_token_ids=stops,
        bos_token_id=file.optional_id("bos_token_id"),
        eos_token_id=file.first_id("eos_token_id"),
        pad_token_id=file.optional_id("pad_token_id"),
        max_position_embeddings=file.integer("max_position_embeddings", max_positions),
        torch_dtype=file.torch_dtype(),
    )


def decoder_config_json(config: ModelConfig, *, block_key: str = "block_size") -> dict[str, Any]:
    """The keys that :func:`read_decoder_config` reads, for a checkpoint with these settings."""
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "mask_token_id",
        "bos_token_id", "pad_token_id", "max_position_embeddings", "torch_dtype",
    )  # fmt: skip
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    return values | {
        "hidden_act": "silu",
        block_key: config.block_length,
        "eos_token_id": list(config.stop_token_ids),
    }


def check_block_length(length: int, where: str = "block_length") -> None:
    """Raise InputError where blocks of ``length`` tokens cannot be run."""
    if not MIN_BLOCK_LENGTH <= length <= MAX_BLOCK_LENGTH or KEY_TILE % length:
        fits = [str(n) for n in range(MIN_BLOCK_LENGTH, MAX_BLOCK_LENGTH + 1) if KEY_TILE % n == 0]
        raise InputError(f"{where}: block length {length} cannot be run; use one of {', '.join(fits)}")


def check_ids(path: Path, config: ModelConfig) -> None:
    """Raise InputError for a special id outside the vocabulary, and for a mask that is also a stop."""
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


def _named_block_length(folder: Path) -> int | None:
    """Block length of a folder whose config.json has none: published variants carry it in their name only
    (JetLM/SDAR-8B-Chat-b32), which a hub cache repeats in its folder names."""
    for part in reversed(folder.absolute().parts):
        if match := re.search(r"-b(4|8|16|32|64)$", part):
            return int(match.group(1))
    return None


def _id_list(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{path}: eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
