"""Block attention over a cached prefix and the block's own keys."""

from dlmgrid.kernels.attention.reference import (
    SPLIT_KEYS,
    TILE_KEYS,
    AttentionPlan,
    block_attention,
    plan_attention,
    write_cache,
)

__all__ = ["SPLIT_KEYS", "TILE_KEYS", "AttentionPlan", "block_attention", "plan_attention", "write_cache"]
