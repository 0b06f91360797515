"""The SDAR family (SDAR-1.7B/4B/8B-Chat: the Qwen3 decoder with block-causal attention), and its relatives
without q/k norms: weights as the engine holds them, and the layer loop over the kernels.

Source of the layout: JetAstra/SDAR, training/model/SDAR-8B-Chat; row i predicts position i, blocks lie on the
absolute grid of the block length, the prompt included.

Shapes: R rows of a pass (N segments of L tokens, then zero rows up to a multiple of 32), H hidden size,
Hq / Hkv query and key heads, d head width, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.kernels.attention import AttentionPlan, block_attention, write_cache
from dlmgrid.kernels.embedding import embed
from dlmgrid.kernels.gemm import pad_rows
from dlmgrid.kernels.rmsnorm import head_rms_norm, rms_norm
from dlmgrid.kernels.rotary import apply_rotary
from dlmgrid.kernels.silu_gate import silu_gate
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.checkpoint import ModelConfig, expected_tensors, stream_tensors

VOCABULARY_MULTIPLE = 64
"""The head's rows are padded to a multiple of this, so the logits' width has no odd tail."""

Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. Queries, keys and values are one product, gate and up projection another."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hkv) d, H]
    head_norm: Tensor | None  # [Hq + Hkv, d]: the q norm once a query head, the k norm once a key head
    output: Tensor  # [H, Hq d]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]


@dataclass(frozen=True, kw_only=True, slots=True)
class SdarWeights:
    """All weights of a model, in one dtype on one device."""

    embedding: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    head: Tensor  # [V padded, H], zero rows in the padding

    @property
    def num_bytes(self) -> int:
        seen: dict[int, int] = {}
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    def tensors(self) -> list[Tensor]:
        """Every distinct matrix and vector."""
        of_layers = [
            tensor
            for layer in self.layers
            for tensor in (
                layer.input_norm,
                layer.qkv,
                layer.head_norm,
                layer.output,
                layer.post_norm,
                layer.gate_up,
                layer.down,
            )
            if tensor is not None
        ]
        return [self.embedding, *of_layers, self.final_norm, self.head]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassInputs:
    """What one pass works on, made once and read by every layer."""

    tokens: Tensor  # [R] int32, -1 where masked
    num_segments: int
    block_length: int
    cosines: Tensor  # [R, d / 2]
    sines: Tensor  # [R, d / 2]
    plan: AttentionPlan
    stored: Tensor  # [n] int64: segments that write their keys and values
    stored_slots: Tensor  # [n] int64
    stored_starts: Tensor  # [n] int64


def load_weights(folder: Path | str, config: ModelConfig, device: str, dtype: torch.dtype) -> SdarWeights:
    """Read the checkpoint's tensors, shard by shard, into the layout of :class:`SdarWeights` on ``device``.

    On the CPU matrices are laid out by column (kernels/gemm), and a tied head is a second copy in that
    layout. The folder is one that :func:`~dlmgrid.workers.models.checkpoint.check_checkpoint` has passed.
    """
    frame = _Frame(config, device, dtype)
    wanted = set(expected_tensors(config))
    for name, tensor in stream_tensors(folder, device):
        frame.place(name, tensor)
        wanted.discard(name)
    assert not wanted, f"check_checkpoint passed a checkpoint without {sorted(wanted)[:3]}"
    return frame.finish()


def weights_from_tensors(
    tensors: dict[str, Tensor], config: ModelConfig, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> SdarWeights:
    """The same from tensors in memory, by their published names. Raises KeyError for a missing one."""
    frame = _Frame(config, device, dtype)
    for name in expected_tensors(config):
        frame.place(name, tensors[name])
    return frame.finish()


def run_layers(
    config: ModelConfig,
    weights: SdarWeights,
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
        hidden = linear(silu_gate(linear(normed, layer.gate_up)), layer.down).add_(hidden)
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
    heads = linear(normed, layer.qkv).view(rows, num_heads + 2 * num_kv_heads, width)
    turned, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if layer.head_norm is not None:
        turned = head_rms_norm(turned, layer.head_norm, config.rms_norm_eps)
    turned = apply_rotary(turned, inputs.cosines, inputs.sines)

    num, length = inputs.num_segments, inputs.block_length
    turned = turned[: num * length].unflatten(0, (num, length))
    queries, keys = turned[:, :, :num_heads], turned[:, :, num_heads:]
    values = values[: num * length].unflatten(0, (num, length))
    if len(inputs.stored):
        write_cache(key_cache, keys[inputs.stored], inputs.stored_slots, inputs.stored_starts)
        write_cache(value_cache, values[inputs.stored], inputs.stored_slots, inputs.stored_starts)
    output, _ = block_attention(queries, keys, values, key_cache, value_cache, inputs.plan)
    return pad_rows(output.reshape(num * length, num_heads * width))


@dataclass(slots=True)
class _Frame:
    """Weights while they are being filled in."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    vectors: dict[str, Tensor] = field(default_factory=dict)
    matrices: dict[str, Tensor] = field(default_factory=dict)

    def place(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to where it belongs, by its published name."""
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"tensor {name}: holds NaN or infinity; the checkpoint is damaged, download it again"
            )
        config = self.config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        inner, hidden = config.intermediate_size, config.hidden_size
        padded = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        if name == "model.embed_tokens.weight":
            self.vectors[name] = tensor.to(self.device, self.dtype, copy=True)
            if config.tie_word_embeddings:
                self._fill("lm_head", padded, hidden, 0, tensor)
            return
        if name == "lm_head.weight":
            self._fill("lm_head", padded, hidden, 0, tensor)
            return
        place = name.removesuffix(".weight")
        prefix, _, leaf = place.rpartition(".")
        if leaf in ("q_proj", "k_proj", "v_proj"):
            start = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[leaf]
            self._fill(prefix + ".qkv", queries + 2 * keys, hidden, start, tensor)
        elif leaf in ("gate_proj", "up_proj"):
            self._fill(prefix + ".gate_up", 2 * inner, hidden, inner if leaf == "up_proj" else 0, tensor)
        elif leaf in ("o_proj", "down_proj"):
            self._fill(place, hidden, tensor.shape[1], 0, tensor)
        else:
            self.vectors[name] = tensor.to(self.device, self.dtype, copy=True)

    def _fill(self, name: str, outputs: int, width: int, start: int, tensor: Tensor) -> None:
        """Rows ``start``… of matrix ``name`` [outputs, width]; rows that nothing fills stay zero."""
        matrix = self.matrices.get(name)
        if matrix is None:
            if self.device == "cpu":
                matrix = torch.zeros(width, outputs, dtype=self.dtype).t()
            else:
                matrix = torch.zeros(outputs, width, dtype=self.dtype, device=self.device)
            self.matrices[name] = matrix
        matrix[start : start + tensor.shape[0]] = tensor

    def _head_norm(self, prefix: str) -> Tensor | None:
        if not self.config.qk_norm:
            return None
        queries = self.vectors[prefix + "self_attn.q_norm.weight"]
        keys = self.vectors[prefix + "self_attn.k_norm.weight"]
        counts = (self.config.num_attention_heads, self.config.num_key_value_heads)
        return torch.cat([queries.expand(counts[0], -1), keys.expand(counts[1], -1)])

    def finish(self) -> SdarWeights:
        layers = []
        for index in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            layers.append(
                LayerWeights(
                    input_norm=self.vectors[prefix + "input_layernorm.weight"],
                    qkv=self.matrices[prefix + "self_attn.qkv"],
                    head_norm=self._head_norm(prefix),
                    output=self.matrices[prefix + "self_attn.o_proj"],
                    post_norm=self.vectors[prefix + "post_attention_layernorm.weight"],
                    gate_up=self.matrices[prefix + "mlp.gate_up"],
                    down=self.matrices[prefix + "mlp.down_proj"],
                )
            )
        return SdarWeights(
            embedding=self.vectors["model.embed_tokens.weight"],
            layers=tuple(layers),
            final_norm=self.vectors["model.norm.weight"],
            head=self.matrices["lm_head"],
        )
