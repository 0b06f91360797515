"""Pinned tiles of the Triton products. Nothing is chosen by timing at run time: the number of rows decides.

Every tile follows one reduction tree (``reference``): chunks of CHUNK_WIDTH from zero, in steps of ``width``,
chunk sums added in ascending order. The tests hold every pair of tiles to equal bits. For that, ``width`` is one
value, and ``rows`` at least 64: on Hopper a tile of fewer rows takes another matrix instruction, whose sum within a
step is another one.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_WIDTH = 64
"""Columns of K that one step multiplies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One program computes ``rows`` x ``outputs``; ``splits_k``: one program a chunk, summed by a second kernel."""

    rows: int
    outputs: int
    warps: int
    stages: int
    splits_k: bool = False


SPLIT = Tile(rows=64, outputs=64, warps=4, stages=4, splits_k=True)
NARROW = Tile(rows=64, outputs=64, warps=4, stages=4)
MIDDLE = Tile(rows=64, outputs=128, warps=4, stages=4)
WIDE = Tile(rows=128, outputs=128, warps=8, stages=3)

TILES = {"split": SPLIT, "narrow": NARROW, "middle": MIDDLE, "wide": WIDE}

PROGRAMS_THAT_FILL_A_GPU = 132


def choose_tile(num_rows: int, num_outputs: int, num_chunks: int) -> Tile:
    """The tile of a product: wide where that fills the multiprocessors, chunks apart where nothing else does."""
    if num_rows > 192 and _programs(WIDE, num_rows, num_outputs) >= PROGRAMS_THAT_FILL_A_GPU:
        return WIDE
    if _programs(MIDDLE, num_rows, num_outputs) >= PROGRAMS_THAT_FILL_A_GPU:
        return MIDDLE
    if num_chunks > 1 and _programs(NARROW, num_rows, num_outputs) < PROGRAMS_THAT_FILL_A_GPU:
        return SPLIT
    return NARROW


def _programs(tile: Tile, num_rows: int, num_outputs: int) -> int:
    return -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)
