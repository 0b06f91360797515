"""The layer loop that all families share, over the kernels: which blocks run is what the settings and weights say
(head norms, biases of queries, keys and values, partial rotary, query scaling, experts).

Shapes: R rows of a pass (N segments of L tokens, then zero rows up to a multiple of 32), H hidden size,
Hq / Hkv query and key heads, d head width, r rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dlmgrid.kernels.attention import AttentionPlan, block_attention, write_cache
from dlmgrid.kernels.embedding import embed
from dlmgrid.kernels.gemm import pad_rows
from dlmgrid.kernels.rmsnorm import head_rms_norm, rms_norm
from dlmgrid.kernels.rotary import apply_rotary
from dlmgrid.kernels.silu_gate import silu_gate
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.experts import run_experts
from dlmgrid.workers.models.weights import LayerWeights, ModelWeights

Linear = Callable[..., Tensor]
"""Maps (rows [R, K], weight [N, K], bias [N] or None) to [R, N]: kernels/gemm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassInputs:
    """What one pass works on, made once and read by every layer."""

    tokens: Tensor  # [R] int32, -1 where masked
    num_segments: int
    block_length: int
    cosines: Tensor  # [R, r / 2]
    sines: Tensor  # [R, r / 2]
    query_scale: Tensor | None = None  # [R] fp32
    plan: AttentionPlan
    stored: Tensor  # [n] int64: segments that write their keys and values
    stored_slots: Tensor  # [n] int64
    stored_starts: Tensor  # [n] int64


def run_layers(
    config: ModelConfig,
    weights: ModelWeights,
    inputs: PassInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    linear: Linear,
) -> Tensor:
    """Hidden states after the final norm, [R, H] in the weights' dtype.

    The caches are [layers, slots, tiles, Hkv, tile, d]. In every layer the segments that store write their
    keys and values first, so a later block of the same pass attends to them.
    """
    hidden = embed(inputs.tokens, weights.embedding, config.mask_token_id)
    for index, layer in enumerate(weights.layers):
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        attended = _attend(config, layer, normed, inputs, key_cache[index], value_cache[index], linear)
        hidden = linear(attended, layer.output).add_(hidden)
        normed = rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
        mlp = linear(silu_gate(linear(normed, layer.gate_up)), layer.down)
        if layer.experts is not None and config.experts is not None:
            mlp = mlp.add_(run_experts(config.experts, layer.experts, normed, linear))
        hidden = mlp.add_(hidden)
    return rms_norm(hidden, weights.final_norm, config.rms_norm_eps)


def _attend(
    config: ModelConfig,
    layer: LayerWeights,
    normed: Tensor,
    inputs: PassInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    linear: Linear,
) -> Tensor:
    """Attention of one layer for ``normed`` [R, H]: [R, Hq d] before the output projection."""
    num_heads, num_kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = normed.shape[0]
    heads = linear(normed, layer.qkv, layer.qkv_bias).view(rows, num_heads + 2 * num_kv_heads, width)
    turned, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if layer.head_norm is not None:
        turned = head_rms_norm(turned, layer.head_norm, config.rms_norm_eps)
    turned = apply_rotary(turned, inputs.cosines, inputs.sines)

    num, length = inputs.num_segments, inputs.block_length
    if inputs.query_scale is not None:
        scaled = turned[:, :num_heads].float() * inputs.query_scale[:, None, None]
        turned[:, :num_heads] = scaled.to(turned.dtype)
    turned = turned[: num * length].unflatten(0, (num, length))
    queries, keys = turned[:, :, :num_heads], turned[:, :, num_heads:]
    values = values[: num * length].unflatten(0, (num, length))
    if len(inputs.stored):
        write_cache(key_cache, keys[inputs.stored], inputs.stored_slots, inputs.stored_starts)
        write_cache(value_cache, values[inputs.stored], inputs.stored_slots, inputs.stored_starts)
    output, _ = block_attention(queries, keys, values, key_cache, value_cache, inputs.plan)
    return pad_rows(output.reshape(num * length, num_heads * width))
