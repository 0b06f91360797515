"""Models by shape for ``make bench``: random weights made on the device, since a pass's time does not hang on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dlmgrid.workers.engine.engine import Engine
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.layout import expected_tensors
from dlmgrid.workers.models.weights import ModelWeights, weights_from_tensors

_DIMENSIONS = {  # hidden, layers, heads, key heads, head width, intermediate, vocabulary, tied head, head norms
    "SDAR-8B": (4096, 36, 32, 8, 128, 12288, 151936, False, True),
    "SDAR-4B": (2560, 36, 32, 8, 128, 9728, 151936, True, True),
    "SDAR-1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True, True),
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True, False),
    "tiny": (64, 2, 4, 2, 64, 128, 300, True, True),
}
SHAPES = tuple(_DIMENSIONS)


def shape_config(name: str, block_length: int = 32) -> ModelConfig:
    """The settings of a model of this shape. Raises KeyError for one that is not in SHAPES."""
    hidden, layers, heads, kv_heads, width, inner, vocab, tied, qk_norm = _DIMENSIONS[name]
    return ModelConfig(
        family="sdar", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=width, intermediate_size=inner, vocab_size=vocab, rope_theta=1e6,
        rms_norm_eps=1e-6, tie_word_embeddings=tied, qk_norm=qk_norm, block_length=block_length,
        mask_token_id=vocab - 1, stop_token_ids=(), bos_token_id=None, eos_token_id=None, pad_token_id=None,
        max_position_embeddings=40960, torch_dtype="bfloat16",
    )  # fmt: skip


class RandomTensors(Mapping[str, Tensor]):
    """Published tensors of a model, drawn on ``device`` one at a time as they are asked for."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        self._shapes = expected_tensors(config)
        self._generator = torch.Generator(device).manual_seed(0)
        self._device, self._dtype = device, dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        values = torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)
        return values * 0.02 + (1.0 if len(shape) == 1 else 0.0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def random_weights(config: ModelConfig, device: str, dtype: torch.dtype) -> ModelWeights:
    """Weights drawn on the device, for every engine of one shape."""
    return weights_from_tensors(RandomTensors(config, device, dtype), config, device, dtype)


def random_engine(
    config: ModelConfig, *, num_slots: int, max_length: int, device: str, dtype: torch.dtype, numerics: str,
    kernels: str,
) -> Engine:  # fmt: skip
    """An engine with random weights. Raises InputError for what :class:`Engine` refuses."""
    return Engine(
        config, random_weights(config, device, dtype), num_slots=num_slots, max_length=max_length, device=device,
        dtype=dtype, numerics=numerics, kernels=kernels,
    )  # fmt: skip
