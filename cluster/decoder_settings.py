"""What a decoder of the grid means for a model, and whether its lengths go together. Torch-free."""

from __future__ import annotations

from typing import Any

from dlmgrid.cluster.grid import DRAW_SETTINGS, DecoderEntry, Grid, ModelEntry
from dlmgrid.cluster.sources import ModelShape
from dlmgrid.workers.cell import (
    APPROXIMATE_CACHES,
    CANVAS_CACHES,
    CERTAINTY,
    SCHEDULES,
    SHIFTED_CANVAS_FAMILIES,
)
from dlmgrid.workers.errors import InputError


def check_canvas(entry: ModelEntry, shape: ModelShape, decoder: DecoderEntry, gen_length: int) -> None:
    """Raises InputError where blocks, steps or the decoder do not fit a generation of a bidirectional model, or a
    decoder is for such models only."""
    settings = decoder_settings(decoder, shape)
    name = settings["decoder"]
    if not set(CANVAS_CACHES) & set(shape.caches):
        if name in SCHEDULES:
            raise InputError(
                f"decoder {name} is a schedule over blocks that are all masked, which this model's first block is "
                "not; use static, threshold or factor"
            )
        return
    length = entry.block_length or shape.block_length or gen_length
    if length > gen_length:
        raise InputError(f"block_length {length} is more than gen_length {gen_length}; lower block_length")
    if gen_length % length:
        raise InputError(
            f"gen_length {gen_length} is not a multiple of block_length {length}; change one of the two"
        )
    if decoder.fused_commit:
        raise InputError("a bidirectional model has no commit passes to join; remove fused_commit")
    if decoder.window:
        raise InputError("a bidirectional model sees its next block in every pass; remove window")
    if settings.get("sub_block_length"):
        raise InputError(
            "a bidirectional model has no sub-blocks; remove sub_block_length, lower block_length"
        )
    if name not in SCHEDULES:
        return
    num_blocks, num_steps = gen_length // length, settings["steps"] or gen_length
    if num_steps % num_blocks:
        raise InputError(
            f"steps {num_steps} is not a multiple of the {num_blocks} blocks of {length} tokens; change it"
        )
    if name == "llada" and num_steps > gen_length:
        raise InputError(
            f"steps {num_steps} is more than gen_length {gen_length}: steps would open nothing; lower it"
        )
    cache = entry.cache or shape.caches[0]
    if shape.family in SHIFTED_CANVAS_FAMILIES and cache in APPROXIMATE_CACHES and num_steps < 2 * num_blocks:
        raise InputError(
            f"steps {num_steps} gives a block {num_steps // num_blocks}; with cache {cache} a block needs 2, since the "
            "first opens its first position alone"
        )


def check_canvas_kernels(grid: Grid, shape: ModelShape) -> None:
    """Raises InputError where a grid asks a bidirectional model for passes that it does not have."""
    if not set(CANVAS_CACHES) & set(shape.caches):
        return
    if grid.kernels != "torch":
        raise InputError(
            f"kernels: {grid.kernels} has no attention over the canvas of a bidirectional model; use kernels: torch"
        )
    if "window" in grid.record:
        raise InputError("a bidirectional model sees its next block in every pass; remove window from record")
    folded = [method.name for method in grid.methods if method.fold is not None]
    if folded:
        raise InputError(
            f"a bidirectional model's canvases do not fold; remove fold from method {folded[0]!r} or give the model "
            "a grid of its own"
        )


def decoder_settings(decoder: DecoderEntry, shape: ModelShape) -> dict[str, Any]:
    """The fields of a cell that a decoder of the grid sets for a model. Raises InputError for an unknown variant."""
    if decoder.name == "published":
        return shape.published_decoder(decoder.variant) | {"steps": decoder.steps}
    given = {name: getattr(decoder, name) for name in (*DRAW_SETTINGS, "sub_block_length")}
    return {
        "decoder": decoder.name,
        "commits_per_step": decoder.commits_per_step,
        "threshold": decoder.threshold,
        "comparison": decoder.comparison,
        "factor": decoder.factor,
        "steps": decoder.steps,
        "confidence": CERTAINTY if decoder.name == "entropy_bounded" else shape.confidence,
    } | {name: value for name, value in given.items() if value is not None}
