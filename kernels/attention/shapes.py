"""Shapes of block attention for tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class AttentionShape(NamedTuple):
    """One sample's pass: query and key heads, head width, block length, block start, branches."""

    num_heads: int
    num_kv_heads: int
    width: int
    length: int
    start: int
    branches: int


ODD_SHAPES = (
    AttentionShape(4, 2, 64, 32, 0, 3),
    AttentionShape(6, 2, 80, 4, 68, 5),
    AttentionShape(3, 1, 96, 8, 504, 2),
    AttentionShape(4, 1, 128, 16, 528, 3),
    AttentionShape(1, 1, 192, 64, 576, 1),
)
"""All head widths; blocks of 4 to 64; starts before, at and after the edges of tiles and splits."""

MODEL_SHAPES = {
    "SDAR-8B": (32, 8, 128),
    "SDAR-4B": (32, 8, 128),
    "SDAR-1.7B": (16, 8, 128),
    "smollm2-135m": (9, 3, 64),
}
"""Query heads, key heads, head width."""

PREFIXES = (0, 512, 2048, 8192, 32768)
