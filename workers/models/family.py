"""What a model family declares: one frozen record, one file a family. No torch here.

A family file says how config.json is read and written, what the published tensors are called (by role, see
:mod:`~dlmgrid.workers.models.layout`), which positions attend to which, and how the reference implementation
decodes. The layer loop itself is shared (:mod:`~dlmgrid.workers.models.layers`): it follows the settings of
:class:`~dlmgrid.workers.models.config.ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import ConfigFile, ModelConfig

Attention = Literal["block_causal", "token_causal", "bidirectional"]
"""``block_causal``: a position sees earlier blocks and its own block whole. ``token_causal``: committed positions see
what is before them; the active block sees them all and itself. ``bidirectional``: every position sees the canvas."""

BlockGrid = Literal["absolute", "prompt"]
"""Where blocks lie: at multiples of the block length, the prompt counted, or from the prompt's end on."""


Seed = Literal["none", "argmax", "drawn"]

StopRule = Literal["block", "prefix", "prefix_commit"]
"""``block``: once the block that holds a stop id is complete and committed. ``prefix``: as soon as a stop id has no
mask before it, with no further pass. ``prefix_commit``: the same, with the commit pass of the unfinished block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedDecoder:
    """The decode rule of one published implementation, as the fields of a cell. ``source`` names it.

    ``decoder`` and its parameters are those of workers/decoding/commit_rules, ``confidence`` what the rule compares
    (workers/decoding/confidence), ``sub_block_length`` the width of the sub-blocks that are filled in order, 0
    for none.
    """

    source: str
    decoder: str = "static"
    commits_per_step: int = 1
    threshold: float | None = None
    comparison: str | None = None
    factor: float | None = None
    confidence: str = "tempered"
    sub_block_length: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a cell that the rule sets, by name."""
        values = asdict(self)
        del values["source"]
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A published checkpoint: its name on the hub and its settings, from which sizes follow."""

    name: str
    config: ModelConfig
    note: str = ""

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def block_length(self) -> int:
        return self.config.block_length

    @property
    def cache(self) -> str:
        """The family's default cache, and what it promises: ``block (exact)``."""
        from dlmgrid.workers.models.families import get_family

        family = get_family(self.config.family)
        return f"{family.caches[0]} ({family.exactness})"

    @property
    def parameters(self) -> int:
        return self.config.num_parameters

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one position in bf16."""
        return self.config.cache_bytes_per_token

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in bf16."""
        return 2 * self.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family.

    Attributes:
        name: what rows and errors call it.
        model_types: values of config.json's ``model_type``; the first is written.
        read: settings from a config file. Raises InputError for what the forward pass does not implement.
        config_json: the config.json of a checkpoint with given settings, as published; the inverse of ``read``.
        tensor_names: role to published tensor name, with ``{layer}`` and ``{expert}``.
        attention, grid: see :data:`Attention` and :data:`BlockGrid`.
        shifted: whether row i - 1 predicts position i (else row i).
        seed: what the last row of a pass that stores gives the next block: nothing, its first token by argmax, or
            its first token drawn at the temperature.
        stop_rule: when a stop id ends a sample: see :data:`StopRule`.
        caches: kinds of key/value cache that can be asked for; the first is the default.
        exactness: what a cache promises against the uncached model, in a few words.
        decoder: the reference implementation's decode rule, the default of a grid that names none.
        variants: rules of other published implementations, by name.
        chat_template: the shipped template that fits checkpoints without one of their own, "" where none is known.
        published: checkpoints known to have this layout.
    """

    name: str
    model_types: tuple[str, ...]
    read: Callable[[ConfigFile], ModelConfig]
    config_json: Callable[[ModelConfig], dict[str, Any]]
    tensor_names: Mapping[str, str]
    attention: Attention = "block_causal"
    grid: BlockGrid = "absolute"
    shifted: bool = False
    seed: Seed = "none"
    stop_rule: StopRule = "block"
    caches: tuple[str, ...] = ("block",)
    exactness: str = "exact"
    decoder: PublishedDecoder
    variants: Mapping[str, PublishedDecoder]
    chat_template: str
    published: tuple[KnownModel, ...]

    def published_decoder(self, variant: str | None) -> PublishedDecoder:
        """The decode rule of the reference implementation, or of the one called ``variant``.

        Raises InputError, listing the known, for a variant that the family does not have.
        """
        if variant is None:
            return self.decoder
        if variant not in self.variants:
            raise InputError(
                f"variant {variant!r} is not a published decoder of the family {self.name}; "
                f"known: {', '.join(self.variants)}"
            )
        return self.variants[variant]

    @property
    def seeds_next_block(self) -> bool:
        """Whether a block's first token comes from the commit pass before it, so that no pass can join the two."""
        return self.seed != "none"


HF_TENSOR_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "input_norm": "model.layers.{layer}.input_layernorm.weight",
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "k": "model.layers.{layer}.self_attn.k_proj.weight",
    "v": "model.layers.{layer}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "output": "model.layers.{layer}.self_attn.o_proj.weight",
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "post_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
"""The names of transformers' Qwen2, Qwen3 and Llama decoders."""
