"""What the generated benchmarks share: a training example, and the rule that keeps problems out of
training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

HELD_OUT_SHARE = 10
"""One problem in this many is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One user turn and the assistant's answer to it, as plain text."""

    prompt: str
    answer: str


def is_held_out(*identity: object) -> bool:
    """Whether the problem of this identity belongs to the benchmark rather than to the training text.

    The decision hangs on the problem alone, never on a seed, so no seed can draw a held-out problem into
    training.
    """
    text = "\x1f".join(str(part) for part in identity)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0
