"""Block attention over a cached prefix and the block's own keys; canvas attention over a whole canvas."""

from dlmgrid.kernels.attention.canvas import (
    CanvasGroup,
    CanvasSegment,
    canvas_attention,
    canvas_attention_vendor,
    plan_canvas_attention,
)
from dlmgrid.kernels.attention.reference import (
    SPLIT_KEYS,
    TILE_KEYS,
    AttentionPlan,
    block_attention,
    plan_attention,
    write_cache,
)

__all__ = [
    "SPLIT_KEYS",
    "TILE_KEYS",
    "AttentionPlan",
    "CanvasGroup",
    "CanvasSegment",
    "block_attention",
    "canvas_attention",
    "canvas_attention_vendor",
    "plan_attention",
    "plan_canvas_attention",
    "write_cache",
]
