"""Remarks end, keep to their length, and differ."""

from __future__ import annotations

import random

from dlmgrid.workers.benchmarks import remarks


def test_every_word_can_be_followed_and_reached() -> None:
    words = {word for successors in remarks._SUCCESSORS.values() for word in successors} - {"."}
    assert words == set(remarks._SUCCESSORS) - {""}


def test_remarks_are_short_and_varied() -> None:
    rng = random.Random(1)
    drawn = [remarks.remark(rng) for _ in range(2000)]
    assert all(2 <= len(text.split()) <= remarks.MOST_WORDS for text in drawn)
    assert len(set(drawn)) > 1500
