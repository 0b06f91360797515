"""The layer loop that all families share, over the kernels: which blocks run is what the settings and weights say
(head norms, biases of queries, keys and values, partial rotary, query scaling, experts).

Shapes: R rows of a pass (N segments of L tokens, then zero rows up to a multiple of 32), H hidden size,
Hq / Hkv query and key heads, d head width, r rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmgrid.kernels.attention import write_cache
from dlmgrid.kernels.gemm import pad_rows
from dlmgrid.kernels.operators import Operators
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.experts import run_experts
from dlmgrid.workers.models.weights import LayerWeights, ModelWeights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Maps (layer, queries [R, Hq, d], keys and values [R, Hkv, d], all turned and scaled) to attention [R, Hq, d]; rows
past those of the pass may be left out."""


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
class PassInputs(PassRows):
    """What one pass over blocks works on, made once and read by every layer.

    Which segments write their keys and values, and where: either the n that do, or ``writes``, slots (-1: nowhere) and
    block starts on the grid, int32 [N] each, of all, for kernels that take a pass of fixed shape.
    """

    num_segments: int
    block_length: int
    plan: Any  # of the operators that run the pass
    part: BlockPart | None = None
    stored: Tensor | None = None  # [n] int64
    stored_slots: Tensor | None = None  # [n] int64
    stored_starts: Tensor | None = None  # [n] int64
    writes: tuple[Tensor, Tensor] | None = None

    def write(
        self,
        keys: Tensor,
        values: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        operators: Operators,
        of: Tensor | None = None,
    ) -> None:
        """Write the stored segments of ``keys`` and ``values`` [N, L, Hkv, d], or of their rows ``of`` [N, L] in
        [P, Hkv, d], to a layer's caches."""
        if self.writes is not None and operators.write_blocks is not None:
            shape = (self.num_segments, self.block_length)
            blocks = (
                part[: shape[0] * shape[1]].unflatten(0, shape) if of is not None else part
                for part in (keys, values)
            )
            operators.write_blocks(*blocks, key_cache, value_cache, *self.writes, row_map=of)
        if (
            self.stored is None
            or self.stored_slots is None
            or self.stored_starts is None
            or not len(self.stored)
        ):
            return
        rows = self.stored if of is None else of[self.stored]
        write_cache(key_cache, keys[rows], self.stored_slots, self.stored_starts)
        write_cache(value_cache, values[rows], self.stored_slots, self.stored_starts)


def run_layers(
    config: ModelConfig,
    weights: ModelWeights,
    inputs: PassInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    operators: Operators,
) -> Tensor:
    """Hidden states after the final norm, [R, H] in the weights' dtype.

    The caches are [layers, slots, tiles, Hkv, tile, d]. In every layer the segments that store write their
    keys and values first, so a later block of the same pass attends to them.
    """
    num, length = inputs.num_segments, inputs.block_length

    def attend(layer: int, *heads: Tensor) -> Tensor:
        queries, keys, values = (part[: num * length].unflatten(0, (num, length)) for part in heads)
        key_part, value_part = key_cache[layer], value_cache[layer]
        inputs.write(keys, values, key_part, value_part, operators)
        if inputs.part is None:
            output, _ = operators.block_attention(queries, keys, values, key_part, value_part, inputs.plan)
            return output.flatten(0, 1)
        keys, values = (inputs.part.block_of(cache).contiguous() for cache in (key_part, value_part))
        at = inputs.part.rows(length)
        whole = queries.new_zeros(num, inputs.part.length, *queries.shape[2:])
        whole[at] = queries
        output, _ = operators.block_attention(whole, keys, values, key_part, value_part, inputs.plan)
        return output[at].flatten(0, 1)

    return run_rows(config, weights, inputs, attend, operators)


def run_rows(
    config: ModelConfig, weights: ModelWeights, rows: PassRows, attend: Attend, operators: Operators
) -> Tensor:
    """Hidden states after the final norm, [R, H] in the weights' dtype, with ``attend`` for what rows see."""
    hidden = operators.embed(rows.tokens, weights.embedding, config.mask_token_id)
    for index, layer in enumerate(weights.layers):
        normed = operators.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        attended = attend(index, *project_heads(config, layer, normed, rows, operators))
        hidden = operators.linear_residual(pad_rows(attended.flatten(1)), layer.output, hidden)
        hidden = run_mlp(config, layer, hidden, operators)
    return operators.rms_norm(hidden, weights.final_norm, config.rms_norm_eps)


def run_mlp(config: ModelConfig, layer: LayerWeights, hidden: Tensor, operators: Operators) -> Tensor:
    """``hidden`` [R, H] with the output of the layer's second half added."""
    normed = operators.rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
    inner = operators.linear_silu_gate(normed, layer.gate_up)
    if layer.experts is None or config.experts is None:
        return operators.linear_residual(inner, layer.down, hidden)
    mlp = operators.linear(inner, layer.down)
    mlp = mlp.add_(run_experts(config.experts, layer.experts, normed, operators))
    return mlp.add_(hidden)


def project_heads(
    config: ModelConfig, layer: LayerWeights, normed: Tensor, rows: PassRows, operators: Operators
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, Hq, d], keys and values [R, Hkv, d] of one layer for ``normed`` [R, H], normed, turned and scaled as
    the model has it."""
    num_heads, num_kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    heads = operators.linear(normed, layer.qkv, layer.qkv_bias)
    heads = heads.view(normed.shape[0], num_heads + 2 * num_kv_heads, width)
    turned, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    turned = operators.norm_rotary(turned, layer.head_norm, rows.cosines, rows.sines, config.rms_norm_eps)
    if rows.query_scale is not None:
        scaled = turned[:, :num_heads].float() * rows.query_scale[:, None, None]
        turned[:, :num_heads] = scaled.to(turned.dtype)
    return turned[:, :num_heads], turned[:, num_heads:], values
