"""Schedules: how many positions each step of a block opens, where the number depends on the step.

``even_split`` is LLaDA's (ML-GSAI/LLaDA generate.py): the block's masks over the steps, the remainder going to the
first ones. ``linear_counts`` is Dream's (DreamLM/Dream generation_utils.py): times t run from 1 to eps in equal
strides, and the step from t to s opens the fraction 1 - s / t of what is still masked, rounded down, hence
sometimes nothing; the last step opens the rest. Both fix the number masked at every step in advance, so the step
follows from the state but for steps that open nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

DREAM_EPS = 1e-3
"""The least time of Dream's schedule (class default of its generation config)."""


def even_split(num_masked: int, num_steps: int) -> tuple[int, ...]:
    """Positions that each of ``num_steps`` steps opens, of ``num_masked``. Raises ValueError for a step left idle."""
    if not 1 <= num_steps <= num_masked:
        raise ValueError(
            f"steps: {num_steps} steps for {num_masked} positions; want 1 to {num_masked}, so that each opens one"
        )
    least, rest = divmod(num_masked, num_steps)
    return tuple(least + (step < rest) for step in range(num_steps))


def linear_fractions(num_steps: int, eps: float = DREAM_EPS) -> tuple[float, ...]:
    """1 - s / t of each step in fp32, as published; 1 at the last step."""
    if num_steps < 1:
        raise ValueError(f"steps is {num_steps}, it must be at least 1")
    times = torch.linspace(1, eps, num_steps + 1)
    fractions: list[float] = (1 - times[1:] / times[:-1]).tolist()
    return (*fractions[:-1], 1.0)


def linear_counts(num_masked: int, num_steps: int, first_step: int = 0) -> tuple[int, ...]:
    """Positions that steps ``first_step``… of ``num_steps`` open, of ``num_masked``; 0 where a step opens none."""
    fractions = torch.tensor(linear_fractions(num_steps))
    counts = []
    left = num_masked
    for step in range(first_step, num_steps):
        opened = int(torch.tensor(float(left)) * fractions[step])
        counts.append(opened)
        left -= opened
    return tuple(counts)


def opened_by_masked(num_masked: int, counts: tuple[int, ...]) -> Tensor:
    """int64 [num_masked + 1]: what the next step that opens anything opens, by the number still masked.

    Numbers that the schedule never passes have 1.
    """
    table = torch.ones(num_masked + 1, dtype=torch.int64)
    left = num_masked
    for opened in counts:
        if opened:
            table[left] = opened
        left -= opened
    return table
