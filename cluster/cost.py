"""A bound on what a row costs, in target forwards, before anything is run."""

from __future__ import annotations

from dlmgrid.workers.cell import CANVAS_CACHES, SCHEDULES, Cell
from dlmgrid.workers.drafting.catalog import METHODS


def forwards_per_row(cell: Cell) -> int:
    """Target forwards that one row takes at most, with no early stop and nothing accepted from a draft.

    Prefill, and for each block its denoising steps and its commit pass; a prompt that does not fill its last block
    adds one block. A fused commit pass is the next block's first pass. A reference row is decoded twice: packed,
    and one sample at a time. A bidirectional model has denoising steps alone; a method that drafts by passes has two
    passes for every token behind the prefill's.
    """
    if cell.method in METHODS and METHODS[cell.method].drafts_by_pass:
        num_tokens = -(-cell.gen_length // cell.block_length) * cell.block_length
        return 1 + 2 * (num_tokens - 1)
    if cell.cache in CANVAS_CACHES:
        in_block = -(-cell.block_length // cell.commits_per_step) + int(cell.opens_first_position)
        num_steps = -(-cell.gen_length // cell.block_length) * in_block
        if cell.decoder in SCHEDULES:
            num_steps = cell.steps or cell.gen_length
        return 2 * num_steps if cell.is_reference else num_steps
    num_blocks = -(-cell.gen_length // cell.block_length) + 1
    steps = -(-cell.block_length // cell.commits_per_step)
    once = 1 + num_blocks * (steps + 1)
    if cell.fused_commit:
        once -= num_blocks - 1
    return 2 * once if cell.is_reference else once
