"""A decoder in words, as every table and note names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlmgrid.workers.cell import DEFAULT_COMPARISON

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


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
