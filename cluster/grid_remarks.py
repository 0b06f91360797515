"""What a grid asks for that will not happen as written, one line each: duplicates, cells without drafts, actors
without work. Nothing here is an error; a plan and a run say it before they start.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dlmgrid.cluster.cells import Model, Questions
from dlmgrid.cluster.grid import DecoderEntry, Grid

ADAPTER = "linear_spec_lora"
"""The folder of Nemotron-Labs-Diffusion's optional adapter for the draft passes of ``linear_spec``."""


def grid_remarks(
    grid: Grid,
    models: Sequence[Model],
    questions: Sequence[Questions],
    limit: int | None,
    *,
    records: bool = False,
) -> list[str]:
    """The remarks on a grid whose items are loaded; ``limit`` is that of the command line, ``records`` whether runs
    are recorded."""
    return [
        *_duplicates(grid),
        *_draft_free(grid),
        *_without_effect(grid, models, records=records),
        *_limits(grid, questions, limit),
        *_resources(grid, questions),
    ]


def _duplicates(grid: Grid) -> list[str]:
    drafted = [
        f"{_described(method, 'name')} with budget {budget}"
        for method in grid.methods
        if method.name != "none"
        for budget in method.budgets or grid.budgets or []
        if budget
    ]
    drafted += [method.name for method in grid.methods if method.name == "none"]
    axes: dict[str, Iterable[Any]] = {
        "models": [_described(entry, "path") for entry in grid.models],
        "benchmarks": [_described(entry, "name") for entry in grid.benchmarks],
        "temperatures": [f"{temperature:g}" for temperature in grid.temperatures],
        "methods": drafted,
        "decoder": [_described(entry, "name") for entry in grid.decoder],
    }
    lines = []
    for axis, values in axes.items():
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            lines.append(f"{axis}: {_listed(twice)} given more than once; each cell is run once")
    return lines


def _draft_free(grid: Grid) -> list[str]:
    """Budgets that draft nothing: those of ``none``, and 0 of any method."""
    lines = []
    for method in grid.methods:
        if method.name == "none":
            if method.budgets is not None:
                lines.append(f"methods: none drafts nothing; its budgets {method.budgets} are not used")
        elif 0 in (method.budgets or grid.budgets or []):
            lines.append(f"methods: {method.name} with budget 0 is the draft-free cell, which is run once")
    windows = sorted({decoder.window for decoder in grid.decoder if decoder.window})
    if windows and all(method.name == "none" for method in grid.methods):
        lines.append(f"decoder: window {_listed(windows)} without effect: no method of the grid drafts")
    return lines


def _without_effect(grid: Grid, models: Sequence[Model], *, records: bool) -> list[str]:
    lines = []
    if grid.repeats > 1 and 0 in grid.temperatures and not any(_draws_order(entry) for entry in grid.decoder):
        lines.append(
            f"repeats: {grid.repeats} at temperature 0 are copies of one another: nothing is drawn there"
        )
    if grid.record and not records:
        lines.append(
            f"record: {', '.join(grid.record)} without effect: nothing is recorded; use dlmgrid record, or dlmgrid "
            "plan --record"
        )
    if any(method.name == "linear_spec" for method in grid.methods):
        lines += [
            f"model {model.entry.path}: its draft adapter {ADAPTER} is not read; linear_spec drafts with the "
            "model itself"
            for model in models
            if (model.folder / ADAPTER).is_dir()
        ]
    stopping = [model.entry.path for model in models if model.shape.stop != "full"]
    if grid.stop == "full" and stopping:
        lines.append(
            f"stop: full on {', '.join(stopping)}: blocks behind the stop id change nothing before it, so the answers "
            "are those of eos, with more forwards"
        )
    return lines


def _draws_order(decoder: DecoderEntry) -> bool:
    """Whether a decoder draws the order of positions, or may: what a published one does its family knows."""
    return bool(decoder.alg_temp) or decoder.confidence in ("random", "origin") or decoder.variant is not None


def _limits(grid: Grid, questions: Sequence[Questions], limit: int | None) -> list[str]:
    lines = []
    for asked in questions:
        wanted = min(
            (bound for bound in (asked.entry.limit or grid.limit, limit) if bound is not None), default=0
        )
        if wanted > len(asked.items):
            lines.append(
                f"benchmark {asked.entry.name} has {len(asked.items)} items; limit {wanted} takes them all"
            )
    return lines


def _resources(grid: Grid, questions: Sequence[Questions]) -> list[str]:
    lines = []
    resources = grid.resources
    num_keys = len(grid.models) * sum(len(asked.items) for asked in questions) * grid.repeats
    num_references = num_keys * len(grid.decoder) * len(grid.temperatures)
    if resources.num_actors is not None and resources.num_actors > num_references:
        lines.append(
            f"resources: num_actors {resources.num_actors} is more than the {num_references} samples that can be "
            "decoded apart; the others get no work"
        )
    here = os.cpu_count() or 1
    wanted = resources.cpus_per_actor
    if wanted > here:
        lines.append(
            f"resources: cpus_per_actor {wanted} is more than the {here} CPUs of this machine; a run needs a cluster "
            "with larger nodes"
        )
    return lines


def _described(entry: Any, main: str) -> str:
    """An entry's name with the settings that tell it from others; a ``limit`` only chooses items, ``budgets`` make
    cells of their own."""
    values = entry.model_dump(exclude_defaults=True, exclude={main, "limit", "budgets"})
    settings = ", ".join(f"{key} {value}" for key, value in values.items())
    name = str(getattr(entry, main))
    return f"{name} ({settings})" if settings else name


def _listed(values: Sequence[str]) -> str:
    shown = ", ".join(values[:3])
    more = f" and {len(values) - 3} more" if len(values) > 3 else ""
    return f"{shown}{more} {'is' if len(values) == 1 else 'are'}"
