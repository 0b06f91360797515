"""Which tensors a checkpoint of given settings holds: names, shapes and roles. No torch here.

A family gives the published name of each *role*; the shape of a role follows from the settings. Roles of one layer:
``input_norm``, ``q`` ``k`` ``v`` (or ``qkv``, their rows one after another), ``q_bias`` ``k_bias`` ``v_bias``,
``output``, ``q_norm`` ``k_norm``, ``post_norm``, then ``gate`` ``up`` ``down`` of a dense MLP, or ``router``,
``router_bias``, ``expert_gate`` ``expert_up`` ``expert_down`` (one tensor an expert, or ``merged_gate`` … with the
experts stacked), ``shared_gate`` ``shared_up`` ``shared_down``. Of the model: ``embedding``, ``final_norm``, ``head``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.families import get_family

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a published tensor belongs. ``layer`` and ``expert`` are -1 where it has none."""

    role: str
    shape: Shape
    layer: int = -1
    expert: int = -1


def tensor_places(config: ModelConfig) -> dict[str, TensorPlace]:
    """Every tensor that a checkpoint of these settings holds, by its published name."""
    names = get_family(config.family).tensor_names
    return {
        names[place.role].format(layer=place.layer, expert=place.expert): place
        for place in _places(config, "qkv" in names)
    }


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes that a checkpoint of these settings holds."""
    return {name: place.shape for name, place in tensor_places(config).items()}


def _places(config: ModelConfig, is_fused: bool) -> Iterator[TensorPlace]:
    hidden = config.hidden_size
    yield TensorPlace("embedding", (config.vocab_size, hidden))
    for layer in range(config.num_hidden_layers):
        for role, shape in _attention_roles(config, is_fused):
            yield TensorPlace(role, shape, layer)
        yield TensorPlace("post_norm", (hidden,), layer)
        if config.experts is None or layer < config.experts.first_layer:
            for role, shape in _mlp_roles("", hidden, config.intermediate_size):
                yield TensorPlace(role, shape, layer)
        else:
            yield from _expert_places(config, layer)
    yield TensorPlace("final_norm", (hidden,))
    if not config.tie_word_embeddings:
        yield TensorPlace("head", (config.vocab_size, hidden))


def _attention_roles(config: ModelConfig, is_fused: bool) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield "input_norm", (hidden,)
    if is_fused:
        yield "qkv", (queries + 2 * keys, hidden)
    else:
        yield "q", (queries, hidden)
        yield "k", (keys, hidden)
        yield "v", (keys, hidden)
    if config.qkv_bias:
        yield "q_bias", (queries,)
        yield "k_bias", (keys,)
        yield "v_bias", (keys,)
    yield "output", (hidden, queries)
    if config.qk_norm:
        yield "q_norm", (config.head_dim,)
        yield "k_norm", (config.head_dim,)


def _mlp_roles(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate", (inner, hidden)
    yield prefix + "up", (inner, hidden)
    yield prefix + "down", (hidden, inner)


def _expert_places(config: ModelConfig, layer: int) -> Iterator[TensorPlace]:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    yield TensorPlace("router", (experts.num_experts, hidden), layer)
    yield TensorPlace("router_bias", (experts.num_experts,), layer)
    if experts.is_merged:
        for role, shape in _mlp_roles("merged_", hidden, experts.expert_size):
            yield TensorPlace(role, (experts.num_experts, *shape), layer)
    else:
        for expert in range(experts.num_experts):
            for role, shape in _mlp_roles("expert_", hidden, experts.expert_size):
                yield TensorPlace(role, shape, layer, expert)
    if experts.shared_size:
        for role, shape in _mlp_roles("shared_", hidden, experts.shared_size):
            yield TensorPlace(role, shape, layer)
