"""Paths of a decode, their digests, and the verdict of one row against its serialized run. No torch here.

A *step* is one transition of the target: a set of (position, token) commits, sorted by position. A *path* is the
sequence of steps over the whole generation. Three levels of exactness are told apart: equal output tokens, equal
paths, and equal bits of the logits that predicted masked positions at every state on the path.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Step = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a row compares with its reference. The divergence fields are None where the paths and bits are equal.

    ``first_divergence_step`` counts transitions from 0; ``first_divergence_position`` is absolute (the prompt
    counts); ``top2_margin`` is the reference's lead of its first over its second choice there, in logits
    (perturbed by the noise at T > 0). A small margin is a near-tie; a large one is a fault.
    """

    exact_tokens: bool
    exact_path: bool
    exact_bits: bool
    first_divergence_step: int | None = None
    first_divergence_position: int | None = None
    top2_margin: float | None = None


def steps_of(positions: Sequence[int], tokens: Sequence[int], step_of_commit: Sequence[int]) -> list[Step]:
    """The path held by the commit columns of a row.

    Raises ValueError when the columns differ in length or the steps do not count up from 0 without a gap.
    """
    if not len(positions) == len(tokens) == len(step_of_commit):
        raise ValueError("commit columns differ in length")
    steps: list[list[tuple[int, int]]] = []
    for position, token, step in zip(positions, tokens, step_of_commit, strict=True):
        if step == len(steps):
            steps.append([])
        elif step != len(steps) - 1:
            raise ValueError(f"commit steps jump to {step} after {len(steps) - 1}")
        steps[step].append((position, token))
    return [tuple(sorted(step)) for step in steps]


def path_digest(steps: Sequence[Sequence[tuple[int, int]]]) -> str:
    """16 hexadecimal digits over the sequence of steps; the order within a step does not count."""
    state = hashlib.blake2b(digest_size=8)
    for step in steps:
        state.update(struct.pack("<i", len(step)))
        for position, token in sorted(step):
            state.update(struct.pack("<ii", position, token))
    return state.hexdigest()


def logits_digest(step_digests: Sequence[str]) -> str:
    """16 hexadecimal digits over the per-step digests, in order."""
    return hashlib.blake2b(",".join(step_digests).encode(), digest_size=8).hexdigest()


def compare(row: Mapping[str, Any], reference: Mapping[str, Any]) -> Verdict:
    """The verdict of ``row`` against ``reference``; both hold the generation columns of the same item and repeat."""
    steps = steps_of(row["commit_positions"], row["commit_tokens"], row["commit_steps"])
    expected = steps_of(reference["commit_positions"], reference["commit_tokens"], reference["commit_steps"])
    exact_tokens = list(row["token_ids"]) == list(reference["token_ids"])
    seeds, expected_seeds = _seeds_of(row), _seeds_of(reference)
    exact_path = steps == expected and seeds == expected_seeds
    digests, expected_digests = list(row["step_digests"]), list(reference["step_digests"])
    exact_bits = exact_path and digests == expected_digests
    if exact_tokens and exact_path and exact_bits:
        return Verdict(exact_tokens=True, exact_path=True, exact_bits=True)

    step, position = _first_divergence(steps, expected, digests, expected_digests)
    if step is None and seeds != expected_seeds:
        position = min(at for at, _ in set(seeds) ^ set(expected_seeds))
    return Verdict(
        exact_tokens=exact_tokens,
        exact_path=exact_path,
        exact_bits=exact_bits,
        first_divergence_step=step,
        first_divergence_position=position,
        top2_margin=_margin_at(reference, step, position),
    )


def _seeds_of(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The (position, token) pairs that a row's storing passes gave; rows of other families have none."""
    return list(zip(row.get("seed_positions") or [], row.get("seed_tokens") or [], strict=True))


def _first_divergence(
    steps: Sequence[Step], expected: Sequence[Step], digests: Sequence[str], expected_digests: Sequence[str]
) -> tuple[int | None, int | None]:
    for index in range(max(len(steps), len(expected))):
        ours = set(steps[index]) if index < len(steps) else set()
        theirs = set(expected[index]) if index < len(expected) else set()
        if ours != theirs:
            return index, min(position for position, _ in ours ^ theirs)
        ours_bits = digests[index] if index < len(digests) else None
        theirs_bits = expected_digests[index] if index < len(expected_digests) else None
        if ours_bits != theirs_bits:
            return index, min((position for position, _ in ours), default=None)
    return None, None


def _margin_at(reference: Mapping[str, Any], step: int | None, position: int | None) -> float | None:
    margins = reference.get("commit_margins")
    if step is None or margins is None:
        return None
    at_step = [
        (found == position, margin)
        for found, index, margin in zip(
            reference["commit_positions"], reference["commit_steps"], margins, strict=True
        )
        if index == step
    ]
    exact_match = [margin for is_same, margin in at_step if is_same]
    candidates = exact_match or [margin for _, margin in at_step]
    return float(min(candidates)) if candidates else None
