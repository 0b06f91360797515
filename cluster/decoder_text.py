"""A decoder in words, as every table and note names it, and what else tells cells apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlmgrid.workers.cell import CELL_FIELDS, DEFAULT_COMPARISON

NAMED = (
    "decoder", "threshold", "comparison", "factor", "commits_per_step", "verification", "fused_commit", "window",
)  # fmt: skip
"""The settings of a cell that :func:`decoder_text` names wherever they are not the default."""


def decoder_text(settings: Mapping[str, Any]) -> str:
    """The decoder of a cell's settings, with each of ``NAMED`` that is not its default: ``threshold 0.9 fused``.

    Settings that differ give texts that differ.
    """
    parts = [settings["decoder"]]
    parts += [_number(settings[name]) for name in ("threshold", "factor") if settings[name] is not None]
    if settings["comparison"] not in (None, DEFAULT_COMPARISON):
        parts.append(settings["comparison"])
    if settings["commits_per_step"] != 1:
        parts.append(str(settings["commits_per_step"]))
    if settings["verification"] != "coupled":
        parts.append(settings["verification"])
    if settings["fused_commit"]:
        parts.append("fused")
    if settings["window"]:
        parts.append(f"window {settings['window']}")
    return " ".join(parts)


def varied_settings(
    cells: Iterable[Mapping[str, Any]], *, alike: Sequence[str] = ("model", "benchmark")
) -> list[str]:
    """Names of the settings in which cells differ that have the settings ``alike`` in common, in the order of
    ``CELL_FIELDS``."""
    values: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for settings in cells:
        for name in CELL_FIELDS:
            values[name, *(str(settings[other]) for other in alike)].add(str(settings[name]))
    varied = {key[0] for key, found in values.items() if len(found) > 1}
    return [name for name in CELL_FIELDS if name in varied]


_SHOWN_APART = ("model", "revision", "benchmark", "temperature", "method", "budget", *NAMED)
"""Settings that a table of cells has a column for, or that are in the decoder's."""


def unnamed_settings(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the settings that tell cells apart which look alike in a table of cells."""
    varied = varied_settings(cells, alike=("model", "benchmark", "method"))
    return [name for name in varied if name not in _SHOWN_APART]


def other_settings(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """The ``names`` of a cell's settings with their values, those left out that are not set."""
    given = {name: settings[name] for name in names if settings[name] not in (None, "", False)}
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
