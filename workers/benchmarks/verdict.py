"""What a scorer says about one text, as plain values that cross a process boundary."""

from __future__ import annotations

from typing import Any

SCORED, ERRORED, TIMED_OUT, NOT_SCORED = "scored", "errored", "timed_out", "not_scored"

# How often a job has been tried: the second try runs alone on the machine, with larger limits.
FIRST_TRY, ALONE = "first", "alone"


def verdict(
    scorer: str,
    metric: str,
    value: float | None,
    *,
    status: str = SCORED,
    detail: str = "",
    extracted: str = "",
) -> dict[str, Any]:
    """One row's worth of a score. A wrong answer is ``scored`` with 0; a time-out counts as 0 and says so."""
    return {
        "scorer": scorer,
        "metric": metric,
        "value": value,
        "status": status,
        "detail": detail,
        "extracted": extracted,
    }
