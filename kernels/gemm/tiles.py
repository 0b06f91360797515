"""Pinned tiles of the Triton products. Nothing is chosen by timing at run time: shape and number of rows decide.

Every tile follows one reduction tree: chunks of K of CHUNK_WIDTH columns from zero, chunk sums added in ascending
order. The tests hold every pair of tiles to equal bits. For that, the side of a tile that the left operand gives is at
least 64, the other one at least 16: with less, Hopper takes another matrix instruction, whose sum within a step may be
another one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

CHUNK_WIDTH = 16384
"""Width of a chunk of K: the products of the models named in ``shapes`` have one, so that no pipeline drains midway."""

STEP_WIDTH = 64
"""Columns of K that one step of the pointer kernel multiplies."""

MAX_STEP = 128
"""Widest step of any tile; a chunk is a multiple of it."""

MIN_PIECE = 16
"""Fewest rows of a piece; 8 would take the older matrix instruction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerTile:
    """One program of the pointer kernel computes ``rows`` x ``outputs``."""

    rows: int
    outputs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class DescriptorTile:
    """One program of the descriptor kernel computes the sum of ``pieces`` (rows) x ``outputs``.

    ``step``: columns of K a stage holds; ``swapped``: weights are the left operand.
    """

    pieces: tuple[int, ...]
    outputs: int
    step: int
    warps: int
    stages: int
    swapped: bool = True

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return sum(self.pieces)

    def stage_bytes(self, gated: bool) -> int:
        """Bytes of shared memory that a stage takes, 16-bit operands."""
        return 2 * self.step * (self.rows + self.outputs * (1 + gated))


NARROW = PointerTile(rows=64, outputs=64, warps=4, stages=4)
MIDDLE = PointerTile(rows=64, outputs=128, warps=4, stages=4)
WIDE = PointerTile(rows=128, outputs=128, warps=8, stages=3)

POINTER_TILES = {"narrow": NARROW, "middle": MIDDLE, "wide": WIDE}

PLAIN_TILES = (
    DescriptorTile((64,), 32, 128, 4, 8, swapped=False),
    DescriptorTile((64,), 32, 128, 4, 4, swapped=False),
    DescriptorTile((32,), 64, 128, 4, 8),
    DescriptorTile((32,), 64, 128, 4, 4),
    DescriptorTile((32,), 128, 128, 4, 5),
    DescriptorTile((64,), 64, 128, 4, 6),
    DescriptorTile((64,), 64, 128, 4, 3),
    DescriptorTile((64,), 128, 64, 4, 4),
    DescriptorTile((64, 16), 64, 64, 4, 5),
    DescriptorTile((64, 32), 64, 64, 4, 5),
    DescriptorTile((64, 32, 16), 64, 64, 4, 5),
    DescriptorTile((128,), 64, 64, 4, 4),
    DescriptorTile((128,), 64, 128, 4, 4),
    DescriptorTile((128, 16), 64, 64, 4, 4),
    DescriptorTile((128, 16), 64, 128, 4, 4),
    DescriptorTile((256, 32), 64, 64, 8, 5),
    DescriptorTile((64, 32), 128, 64, 8, 4),
    DescriptorTile((64, 32, 16), 128, 64, 8, 3),
    DescriptorTile((128,), 128, 64, 8, 3),
    DescriptorTile((128, 16), 128, 64, 8, 3),
    DescriptorTile((128, 16), 128, 64, 8, 6),
    DescriptorTile((128, 64), 128, 64, 8, 5),
    DescriptorTile((128, 64, 32), 64, 64, 8, 3),
    DescriptorTile((128, 64, 32), 128, 64, 8, 4),
    DescriptorTile((256,), 128, 64, 8, 4),
    DescriptorTile((64, 32), 256, 64, 8, 4),
    DescriptorTile((64, 16), 64, 128, 4, 5),
    DescriptorTile((64, 32), 64, 128, 4, 5),
    DescriptorTile((128,), 64, 64, 4, 8),
    DescriptorTile((128,), 256, 64, 8, 4),
    DescriptorTile((128, 16), 128, 64, 4, 3),
)
"""Tiles of products without a gate."""

GATED_TILES = (
    DescriptorTile((64,), 32, 128, 4, 4, swapped=False),
    DescriptorTile((64,), 32, 64, 4, 6, swapped=False),
    DescriptorTile((32,), 64, 128, 4, 5),
    DescriptorTile((32,), 64, 64, 4, 5),
    DescriptorTile((64,), 64, 64, 4, 4),
    DescriptorTile((64, 16), 64, 64, 4, 4),
    DescriptorTile((64, 32), 64, 64, 4, 4),
    DescriptorTile((64, 32, 16), 64, 64, 4, 3),
    DescriptorTile((128,), 64, 64, 4, 3),
    DescriptorTile((128,), 64, 64, 8, 3),
    DescriptorTile((128, 16), 64, 64, 4, 3),
    DescriptorTile((128, 16), 64, 64, 8, 3),
    DescriptorTile((128, 64), 64, 64, 8, 5),
    DescriptorTile((128, 64, 32), 64, 64, 8, 4),
    DescriptorTile((256, 32), 64, 64, 8, 4),
    DescriptorTile((64, 32), 128, 64, 8, 4),
    DescriptorTile((64, 32, 16), 128, 64, 8, 4),
    DescriptorTile((128, 16), 128, 64, 8, 4),
    DescriptorTile((128, 16), 64, 64, 4, 4),
    DescriptorTile((128,), 128, 64, 8, 4),
)
"""Tiles of gated products: two weight tiles, and two sums of an output."""

MEASURED: dict[tuple[int, int, bool, int], DescriptorTile] = {
    (6144, 4096, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (6144, 4096, False, 128): DescriptorTile((128,), 64, 64, 4, 8),
    (6144, 4096, False, 288): DescriptorTile((128, 16), 64, 64, 4, 4),
    (6144, 4096, False, 672): DescriptorTile((128, 16), 128, 64, 4, 3),
    (6144, 4096, False, 1344): DescriptorTile((128,), 256, 64, 8, 4),
    (4096, 4096, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (4096, 4096, False, 128): DescriptorTile((64,), 64, 128, 4, 6),
    (4096, 4096, False, 288): DescriptorTile((128, 16), 64, 128, 4, 4),
    (4096, 4096, False, 672): DescriptorTile((128, 64), 128, 64, 8, 5),
    (4096, 4096, False, 1344): DescriptorTile((128, 64), 128, 64, 8, 5),
    (24576, 4096, True, 32): DescriptorTile((32,), 64, 64, 4, 5),
    (24576, 4096, True, 128): DescriptorTile((128,), 64, 64, 4, 3),
    (24576, 4096, True, 288): DescriptorTile((128, 16), 64, 64, 4, 4),
    (24576, 4096, True, 672): DescriptorTile((128,), 128, 64, 8, 4),
    (24576, 4096, True, 1344): DescriptorTile((128,), 128, 64, 8, 4),
    (4096, 12288, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (4096, 12288, False, 128): DescriptorTile((64,), 64, 128, 4, 6),
    (4096, 12288, False, 288): DescriptorTile((128, 16), 64, 128, 4, 4),
    (4096, 12288, False, 672): DescriptorTile((128, 64), 128, 64, 8, 5),
    (4096, 12288, False, 1344): DescriptorTile((128, 64), 128, 64, 8, 5),
    (6144, 2560, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (6144, 2560, False, 128): DescriptorTile((128,), 64, 64, 4, 8),
    (6144, 2560, False, 288): DescriptorTile((64,), 128, 64, 4, 4),
    (6144, 2560, False, 672): DescriptorTile((128, 16), 128, 64, 4, 3),
    (6144, 2560, False, 1344): DescriptorTile((128,), 256, 64, 8, 4),
    (2560, 4096, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (2560, 4096, False, 128): DescriptorTile((64,), 64, 128, 4, 6),
    (2560, 4096, False, 288): DescriptorTile((64, 32), 64, 128, 4, 5),
    (2560, 4096, False, 672): DescriptorTile((64,), 128, 64, 4, 4),
    (2560, 4096, False, 1344): DescriptorTile((256,), 128, 64, 8, 4),
    (19456, 2560, True, 32): DescriptorTile((32,), 64, 64, 4, 5),
    (19456, 2560, True, 128): DescriptorTile((128,), 128, 64, 8, 4),
    (19456, 2560, True, 288): DescriptorTile((64, 32), 64, 64, 4, 4),
    (19456, 2560, True, 672): DescriptorTile((128, 16), 64, 64, 4, 3),
    (19456, 2560, True, 1344): DescriptorTile((128,), 128, 64, 8, 4),
    (2560, 9728, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (2560, 9728, False, 128): DescriptorTile((64,), 64, 128, 4, 6),
    (2560, 9728, False, 288): DescriptorTile((64, 32), 64, 128, 4, 5),
    (2560, 9728, False, 672): DescriptorTile((64, 32, 16), 64, 64, 4, 5),
    (2560, 9728, False, 1344): DescriptorTile((256,), 128, 64, 8, 4),
    (4096, 2048, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (4096, 2048, False, 128): DescriptorTile((64,), 64, 128, 4, 6),
    (4096, 2048, False, 288): DescriptorTile((128, 16), 64, 128, 4, 4),
    (4096, 2048, False, 672): DescriptorTile((128, 64), 128, 64, 8, 5),
    (4096, 2048, False, 1344): DescriptorTile((128, 64), 128, 64, 8, 5),
    (2048, 2048, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (2048, 2048, False, 128): DescriptorTile((64,), 32, 128, 4, 8, swapped=False),
    (2048, 2048, False, 288): DescriptorTile((64, 16), 64, 128, 4, 5),
    (2048, 2048, False, 672): DescriptorTile((64, 32), 64, 64, 4, 5),
    (2048, 2048, False, 1344): DescriptorTile((128, 64), 128, 64, 8, 5),
    (12288, 2048, True, 32): DescriptorTile((32,), 64, 128, 4, 5),
    (12288, 2048, True, 128): DescriptorTile((64,), 64, 64, 4, 4),
    (12288, 2048, True, 288): DescriptorTile((128, 16), 64, 64, 4, 3),
    (12288, 2048, True, 672): DescriptorTile((128, 16), 64, 64, 4, 3),
    (12288, 2048, True, 1344): DescriptorTile((128,), 128, 64, 8, 4),
    (2048, 6144, False, 32): DescriptorTile((32,), 64, 128, 4, 8),
    (2048, 6144, False, 128): DescriptorTile((32,), 64, 128, 4, 8),
    (2048, 6144, False, 288): DescriptorTile((64, 16), 64, 128, 4, 5),
    (2048, 6144, False, 672): DescriptorTile((64, 32), 64, 64, 4, 5),
    (2048, 6144, False, 1344): DescriptorTile((128, 64), 128, 64, 8, 5),
    (151936, 4096, False, 32): DescriptorTile((32,), 128, 128, 4, 5),
    (151936, 4096, False, 128): DescriptorTile((128,), 128, 64, 8, 3),
}
"""(rows of the weight, K, gated, rows of the pass up to) -> tile, the fastest on an H200 of those above, offline; the
times beside the vendor's are in figures/products_h200.json. ``python -m dlmgrid.jobs.bench_tiles`` times them."""

MULTIPROCESSORS = 132
_FLOPS = 780e12 / MULTIPROCESSORS
_L2_BYTES = 11e12 / MULTIPROCESSORS
_MEMORY_BYTES = 4.2e12
_LATENCY = 1.2e-6
_SHARED_BYTES = 227 * 1024


def estimate(tile: DescriptorTile, num_rows: int, num_outputs: int, width: int, gated: bool) -> float:
    """Seconds of a product on one H200: the busiest multiprocessor's, or reading every weight once.

    A multiprocessor's tiles take the longest of their arithmetic, their loads through L2, and what bytes in flight
    allow at the latency of memory. Rates fitted to measured products (NOTES.md).
    """
    halves = 1 + gated
    tiles = -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)
    stage = tile.stage_bytes(gated)
    resident = min(max(1, _SHARED_BYTES // (stage * tile.stages)), -(-tiles // MULTIPROCESSORS))
    loaded = width // tile.step * stage
    in_flight = (tile.stages - 1) * stage * resident
    arithmetic = 2 * tile.rows * tile.outputs * halves * width / _FLOPS
    per_tile = max(arithmetic, loaded / _L2_BYTES, loaded * _LATENCY / in_flight)
    fill = 2 * _LATENCY * -(-tiles // (MULTIPROCESSORS * resident))
    weights = 2 * num_outputs * halves * width / _MEMORY_BYTES
    return max(-(-tiles // MULTIPROCESSORS) * per_tile, weights) + fill


@functools.lru_cache(maxsize=4096)
def choose_descriptor_tile(num_rows: int, num_weight_rows: int, width: int, gated: bool) -> DescriptorTile:
    """The measured tile of a weight [``num_weight_rows``, ``width``], or the one of the least estimate."""
    buckets = [
        key[3] for key in MEASURED if key[:3] == (num_weight_rows, width, gated) and key[3] >= num_rows
    ]
    if buckets:
        return MEASURED[num_weight_rows, width, gated, min(buckets)]
    num_outputs = num_weight_rows // 2 if gated else num_weight_rows
    tiles = GATED_TILES if gated else PLAIN_TILES
    return min(tiles, key=lambda tile: estimate(tile, num_rows, num_outputs, width, gated))


MOST_ROWS_ALONE = 128
"""Rows up to which a layer's Triton products, the gate's activation in them, are faster than the vendor's with torch's
activation at every shape of figures/products_h200.json."""

FEWEST_VENDOR_ENTRIES = 4_000_000
"""Entries of a weight from which on the vendor's products are faster above that: below, a launch is what they take."""


def is_vendor_faster(num_rows: int, num_weight_rows: int, width: int) -> bool:
    """Whether ``fast`` takes the vendor's product of R rows and a 16-bit weight [``num_weight_rows``, ``width``]."""
    return num_rows > MOST_ROWS_ALONE and num_weight_rows * width >= FEWEST_VENDOR_ENTRIES


def choose_pointer_tile(num_rows: int, num_outputs: int) -> PointerTile:
    """Wide where that fills the multiprocessors, narrow where nothing else does."""
    if num_rows > 192 and _programs(WIDE, num_rows, num_outputs) >= MULTIPROCESSORS:
        return WIDE
    if _programs(MIDDLE, num_rows, num_outputs) >= MULTIPROCESSORS:
        return MIDDLE
    return NARROW


def _programs(tile: PointerTile, num_rows: int, num_outputs: int) -> int:
    return -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)
