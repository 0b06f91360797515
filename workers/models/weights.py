"""A model's weights as the layer loop reads them, and how published tensors are put there, shard by shard.

Shapes: H hidden size, Hq / Hkv query and key heads, d head width, I intermediate size, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.checkpoint import stream_tensors
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.layout import TensorPlace, tensor_places

VOCABULARY_MULTIPLE = 64
"""The head's rows are padded to a multiple of this, so the logits' width has no odd tail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """The routed experts of one layer; the router is fp32 whatever the model's dtype."""

    router: Tensor  # [E, H] fp32
    router_bias: Tensor  # [E] fp32
    gate_up: Tensor  # [E, 2 I, H]
    down: Tensor  # [E, H, I]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. Queries, keys and values are one product, gate and up projection another.

    In a layer with experts ``gate_up`` and ``down`` are those of the shared expert.
    """

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hkv) d, H]
    qkv_bias: Tensor | None = None  # [(Hq + 2 Hkv) d]
    head_norm: Tensor | None  # [Hq + Hkv, d]: the q norm once a query head, the k norm once a key head
    output: Tensor  # [H, Hq d]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    experts: ExpertWeights | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the layer."""
        for part in (self, self.experts):
            for one in fields(part) if part is not None else ():
                value = getattr(part, one.name)
                if isinstance(value, Tensor):
                    yield value


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
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
        of_layers = [tensor for layer in self.layers for tensor in layer.tensors()]
        return [self.embedding, *of_layers, self.final_norm, self.head]


def load_weights(folder: Path | str, config: ModelConfig, device: str, dtype: torch.dtype) -> ModelWeights:
    """Read the checkpoint's tensors, shard by shard, into the layout of :class:`ModelWeights` on ``device``.

    On the CPU matrices are laid out by column (kernels/gemm), and a tied head is a second copy in that
    layout. The folder is one that :func:`~dlmgrid.workers.models.checkpoint.check_checkpoint` has passed.
    """
    places = tensor_places(config)
    frame = _Frame(config, device, dtype)
    for name, tensor in stream_tensors(folder, device):
        frame.place(name, places.pop(name), tensor)
    assert not places, f"check_checkpoint passed a checkpoint without {sorted(places)[:3]}"
    return frame.finish()


def weights_from_tensors(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> ModelWeights:
    """The same from tensors in memory, by their published names. Raises KeyError for a missing one."""
    frame = _Frame(config, device, dtype)
    for name, place in tensor_places(config).items():
        frame.place(name, place, tensors[name])
    return frame.finish()


def _is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite: from the extremes, which NaN spreads to, at the speed of a copy."""
    lowest, highest = torch.aminmax(tensor)
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))


Slot = tuple[int, str]
"""Layer (-1: the model's own) and what it is called in :class:`LayerWeights` or :class:`ModelWeights`."""


@dataclass(slots=True)
class _Frame:
    """Weights while they are being filled in."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    vectors: dict[Slot, Tensor] = field(default_factory=dict)
    matrices: dict[Slot, Tensor] = field(default_factory=dict)

    def place(self, name: str, place: TensorPlace, tensor: Tensor) -> None:
        """Copy a tensor to where it belongs; ``name`` is its published name."""
        if not _is_finite(tensor):
            raise InputError(
                f"tensor {name}: holds NaN or infinity; the checkpoint is damaged, download it again"
            )
        config, layer = self.config, place.layer
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        padded = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        kind, _, leaf = place.role.rpartition("_")
        match place.role:
            case "embedding":
                self._keep((-1, "embedding"), tensor)
                if config.tie_word_embeddings:
                    self._fill((-1, "head"), (padded, config.hidden_size), 0, tensor)
            case "head":
                self._fill((-1, "head"), (padded, config.hidden_size), 0, tensor)
            case "q" | "k" | "v" | "qkv":
                start = {"k": queries, "v": queries + keys}.get(place.role, 0)
                self._fill((layer, "qkv"), (queries + 2 * keys, config.hidden_size), start, tensor)
            case "q_bias" | "k_bias" | "v_bias":
                start = {"k": queries, "v": queries + keys}.get(kind, 0)
                if (layer, "qkv_bias") not in self.vectors:
                    self._keep((layer, "qkv_bias"), torch.zeros(queries + 2 * keys))
                self.vectors[layer, "qkv_bias"][start : start + len(tensor)] = tensor
            case "output":
                self._fill((layer, "output"), tuple(tensor.shape), 0, tensor)
            case "gate" | "up" | "down" | "shared_gate" | "shared_up" | "shared_down":
                self._fill_mlp(layer, "", leaf, tensor, None)
            case "expert_gate" | "expert_up" | "expert_down":
                self._fill_mlp(layer, "expert_", leaf, tensor, place.expert)
            case "merged_gate" | "merged_up" | "merged_down":
                for expert, one in enumerate(tensor):
                    self._fill_mlp(layer, "expert_", leaf, one, expert)
            case "router":
                self._fill((layer, "router"), tuple(tensor.shape), 0, tensor, dtype=torch.float32)
            case "router_bias":
                self.vectors[layer, "router_bias"] = tensor.to(self.device, torch.float32, copy=True)
            case _:  # the norms
                self._keep((layer, place.role), tensor)

    def _keep(self, slot: Slot, tensor: Tensor) -> None:
        self.vectors[slot] = tensor.to(self.device, self.dtype, copy=True)

    def _fill_mlp(self, layer: int, prefix: str, leaf: str, tensor: Tensor, expert: int | None) -> None:
        """One projection [N, K] of the MLP: gate above up in one matrix, down in another."""
        outputs, width = tensor.shape
        if leaf == "down":
            self._fill((layer, prefix + "down"), (outputs, width), 0, tensor, expert=expert)
        else:
            start = outputs if leaf == "up" else 0
            self._fill((layer, prefix + "gate_up"), (2 * outputs, width), start, tensor, expert=expert)

    def _fill(
        self,
        slot: Slot,
        shape: tuple[int, ...],
        start: int,
        tensor: Tensor,
        *,
        expert: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Rows ``start``… of a matrix [N, K], or of one expert's in [E, N, K]; rows that nothing fills stay zero."""
        matrix = self.matrices.get(slot)
        if matrix is None:
            outputs, width = shape
            count = [] if expert is None or self.config.experts is None else [self.config.experts.num_experts]
            dtype = dtype or self.dtype
            if self.device == "cpu":
                matrix = torch.zeros(*count, width, outputs, dtype=dtype).transpose(-1, -2)
            else:
                matrix = torch.zeros(*count, outputs, width, dtype=dtype, device=self.device)
            self.matrices[slot] = matrix
        rows = matrix if expert is None else matrix[expert]
        rows[start : start + tensor.shape[0]] = tensor

    def _head_norm(self, layer: int) -> Tensor | None:
        if not self.config.qk_norm:
            return None
        queries, keys = self.vectors[layer, "q_norm"], self.vectors[layer, "k_norm"]
        counts = (self.config.num_attention_heads, self.config.num_key_value_heads)
        return torch.cat([queries.expand(counts[0], -1), keys.expand(counts[1], -1)])

    def _experts(self, layer: int) -> ExpertWeights | None:
        if (layer, "router") not in self.matrices:
            return None
        return ExpertWeights(
            router=self.matrices[layer, "router"],
            router_bias=self.vectors[layer, "router_bias"],
            gate_up=self.matrices[layer, "expert_gate_up"],
            down=self.matrices[layer, "expert_down"],
        )

    def finish(self) -> ModelWeights:
        layers = tuple(
            LayerWeights(
                input_norm=self.vectors[layer, "input_norm"],
                qkv=self.matrices[layer, "qkv"],
                qkv_bias=self.vectors.get((layer, "qkv_bias")),
                head_norm=self._head_norm(layer),
                output=self.matrices[layer, "output"],
                post_norm=self.vectors[layer, "post_norm"],
                gate_up=self.matrices[layer, "gate_up"],
                down=self.matrices[layer, "down"],
                experts=self._experts(layer),
            )
            for layer in range(self.config.num_hidden_layers)
        )
        return ModelWeights(
            embedding=self.vectors[-1, "embedding"],
            layers=layers,
            final_norm=self.vectors[-1, "final_norm"],
            head=self.matrices[-1, "head"],
        )
