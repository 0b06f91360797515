"""Tiny LLaDA and Dream checkpoints: random weights in the published names, for tests of the whole path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.synthetic import tiny_config, write_random_checkpoint

CANVAS_FAMILIES = ("llada", "dream")


def tiny_canvas_config(family: str, *, num_hidden_layers: int = 2) -> ModelConfig:
    """A small model of ``family`` over bytes: LLaDA with as many key as query heads, Dream with half of them."""
    num_kv_heads = {"llada": 4, "dream": 2}[family]
    config = tiny_config(num_hidden_layers=num_hidden_layers, num_key_value_heads=num_kv_heads, qk_norm=False)
    return replace(config, family=family, qkv_bias=family == "dream", block_length=0)


def write_tiny_canvas(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    scale: float = 0.2,
    num_shards: int = 1,
    num_hidden_layers: int = 2,
) -> ModelConfig:
    """Write a checkpoint of :func:`tiny_canvas_config`; at this ``scale`` its distributions are far from flat."""
    config = tiny_canvas_config(family, num_hidden_layers=num_hidden_layers)
    write_random_checkpoint(folder, config, seed=seed, scale=scale, num_shards=num_shards)
    return config
