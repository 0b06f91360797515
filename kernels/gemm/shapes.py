"""Shapes of the products of a pass, for tests and benchmarks: (outputs, inputs) by model, and row counts."""

from __future__ import annotations

ODD_SHAPES = ((1, 16), (63, 100), (100, 1100), (70, 2500))
"""(N, K) that fit no tile; for correctness."""

ODD_ROWS = (1, 7, 63, 100)

PRODUCTS = {
    "SDAR-8B": {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "SDAR-4B": {"qkv": (6144, 2560), "output": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
    "SDAR-1.7B": {
        "qkv": (4096, 2048),
        "output": (2048, 2048),
        "gate_up": (12288, 2048),
        "down": (2048, 6144),
    },
    "smollm2-135m": {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
}
"""(N, K) of one layer's products, gate and up projection as one."""

PASS_ROWS = (32, 128, 288, 672, 1344)
"""Rows of a pass at L = 32 and D = 0, 3, 8, 20, 41."""
