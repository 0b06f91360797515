"""The layer loop that all families share, over the kernels: which blocks run is what the settings and weights say
(head norms, biases of queries, keys and values, partial rotary, query scaling, experts).

Shapes: R rows of a pass (N segments of L tokens, then zero rows up to a multiple of 32), H hidden size,
Hq / Hkv query and key heads, d head width, r rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
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

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Maps (layer, queries [R, Hq, d], keys and values [R, Hkv, d], all turned and scaled) to attention [R, Hq, d]; rows
past those of the pass may be left out."""

Linear = Callable[..., Tensor]
"""Maps (rows [R, K], weight [N, K], bias [N] or None) to [R, N]: kernels/gemm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRows:
    """What the rows of a pass are, whatever they attend to."""

    tokens: Tensor  # [R] int32, -1 where masked
    cosines: Tensor  # [R, r / 2]
    sines: Tensor  # [R, r / 2]
    query_scale: Tensor | None = None  # [R] fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPart:
    """Segments of W positions inside blocks of ``length`` L, whose other keys and values are read from the cache."""

    length: int
    slots: Tensor  # [N] int64
    tiles: Tensor  # [N] int64: the key tile of the block
    blocks: Tensor  # [N] int64: which block of the tile
    offsets: Tensor  # [N] int64: where in the block the positions begin

    def block_of(self, cache: Tensor) -> Tensor:
        """The block's entries [N, L, Hkv, d] of ``cache`` [slots, tiles, Hkv, tile, d]."""
        by_block = cache.unflatten(3, (-1, self.length))
        entries: Tensor = by_block[self.slots, self.tiles, :, self.blocks]
        return entries.transpose(1, 2)

    def rows(self, width: int) -> tuple[Tensor, Tensor]:
        """Indices [N, 1] and [N, W] of the positions in [N, L]."""
        segments = torch.arange(len(self.slots), device=self.offsets.device)[:, None]
        return segments, self.offsets[:, None] + torch.arange(width, device=self.offsets.device)


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
    part: BlockPart | None = None
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
    num, length = inputs.num_segments, inputs.block_length

    def attend(layer: int, *heads: Tensor) -> Tensor:
        queries, keys, values = (part[: num * length].unflatten(0, (num, length)) for part in heads)
        key_part, value_part = key_cache[layer], value_cache[layer]
        if len(inputs.stored):
            write_cache(key_part, keys[inputs.stored], inputs.stored_slots, inputs.stored_starts)
            write_cache(value_part, values[inputs.stored], inputs.stored_slots, inputs.stored_starts)
        if inputs.part is None:
            output, _ = block_attention(queries, keys, values, key_part, value_part, inputs.plan)
            return output.flatten(0, 1)
        keys, values = inputs.part.block_of(key_part), inputs.part.block_of(value_part)
        at = inputs.part.rows(length)
        whole = queries.new_zeros(num, inputs.part.length, *queries.shape[2:])
        whole[at] = queries
        output, _ = block_attention(whole, keys, values, key_part, value_part, inputs.plan)
        return output[at].flatten(0, 1)

    rows = PassRows(
        tokens=inputs.tokens, cosines=inputs.cosines, sines=inputs.sines, query_scale=inputs.query_scale
    )
    return run_rows(config, weights, rows, attend, linear)


def run_rows(
    config: ModelConfig, weights: ModelWeights, rows: PassRows, attend: Attend, linear: Linear
) -> Tensor:
    """Hidden states after the final norm, [R, H] in the weights' dtype, with ``attend`` for what rows see."""
    hidden = embed(rows.tokens, weights.embedding, config.mask_token_id)
    for index, layer in enumerate(weights.layers):
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        attended = attend(index, *_heads(config, layer, normed, rows, linear))
        hidden = linear(pad_rows(attended.flatten(1)), layer.output).add_(hidden)
        normed = rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
        mlp = linear(silu_gate(linear(normed, layer.gate_up)), layer.down)
        if layer.experts is not None and config.experts is not None:
            mlp = mlp.add_(run_experts(config.experts, layer.experts, normed, linear))
        hidden = mlp.add_(hidden)
    return rms_norm(hidden, weights.final_norm, config.rms_norm_eps)


def _heads(
    config: ModelConfig, layer: LayerWeights, normed: Tensor, rows: PassRows, linear: Linear
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, Hq, d], keys and values [R, Hkv, d] of one layer for ``normed`` [R, H]."""
    num_heads, num_kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    heads = linear(normed, layer.qkv, layer.qkv_bias)
    heads = heads.view(normed.shape[0], num_heads + 2 * num_kv_heads, width)
    turned, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if layer.head_norm is not None:
        turned = head_rms_norm(turned, layer.head_norm, config.rms_norm_eps)
    turned = apply_rotary(turned, rows.cosines, rows.sines)
    if rows.query_scale is not None:
        scaled = turned[:, :num_heads].float() * rows.query_scale[:, None, None]
        turned[:, :num_heads] = scaled.to(turned.dtype)
    return turned[:, :num_heads], turned[:, num_heads:], values
