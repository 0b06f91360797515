"""The drafting methods by name, as plain data: what the driver checks a grid against. No torch here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dlmgrid.workers.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodInfo:
    """One method. ``implementation`` is ``module:function`` of its builder, imported by the worker only."""

    name: str
    title: str
    summary: str
    source: str
    lossless: bool
    implementation: str
    needs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    decoders: tuple[str, ...] = ("static", "threshold")


METHODS: dict[str, MethodInfo] = {
    method.name: method
    for method in (
        MethodInfo(
            name="none",
            title="Draft-free decoding",
            summary="The serialized run: one state a pass. Every other method is compared with it.",
            source="SDAR, generate.py of JetAstra/SDAR (block-wise decoding with a commit pass)",
            lossless=True,
            implementation="dlmgrid.workers.drafting.none:build",
        ),
        MethodInfo(
            name="ssd",
            title="Self-speculative decoding, confidence-ordered chain",
            summary=(
                "A chain of D states: the commit rule is applied again and again to the stale distributions of "
                "the last pass."
            ),
            source="Self Speculative Decoding for Diffusion LLMs, arXiv 2510.04147",
            lossless=True,
            implementation="dlmgrid.workers.drafting.ssd:build",
        ),
        MethodInfo(
            name="confidence_tree",
            title="Confidence tree",
            summary=(
                "The D states of largest mass, grown level by level; the next position is drawn from the stale "
                "confidences normalised over the positions still masked, equal states are merged, and a second "
                "token is tried where the first has a probability below 0.6."
            ),
            source="BlockSpec-style tree as compared in SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.drafting.confidence_tree:build",
        ),
    )
}


DIAGNOSTIC_METHODS: dict[str, MethodInfo] = {
    method.name: method
    for method in (
        MethodInfo(
            name="oracle_position",
            title="Oracle positions, stale tokens (replay only)",
            summary="A chain through the positions that the target will commit: what a perfect order would give.",
            source="diagnosis of SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.trajectories.diagnostic_drafters:oracle_position",
            needs=("recorded trajectories",),
        ),
        MethodInfo(
            name="oracle_token",
            title="Oracle tokens, confidence tree (replay only)",
            summary="The confidence tree with the tokens that the target will commit: what perfect tokens would give.",
            source="diagnosis of SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.trajectories.diagnostic_drafters:oracle_token",
            needs=("recorded trajectories",),
        ),
        MethodInfo(
            name="stale_order",
            title="Oracle tokens, chain of stale order (replay only)",
            summary="The chain of ssd with the tokens that the target will commit: how far one stale order reaches.",
            source="diagnosis of SPOT, arXiv 2610.22543",
            lossless=True,
            implementation="dlmgrid.workers.trajectories.diagnostic_drafters:stale_order",
            needs=("recorded trajectories",),
        ),
    )
}
"""Methods that look into a recorded future: `dlmgrid replay` knows them, a live run cannot."""


def get_method(name: str) -> MethodInfo:
    """The method called ``name``. Raises InputError naming the nearest known one."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(METHODS)
    raise InputError(f"unknown method {name!r}; {hint}")
