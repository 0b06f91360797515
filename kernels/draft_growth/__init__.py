"""Growing draft trees level by level on a device: fixed shapes, no question to the host, one commit a step."""

from dlmgrid.kernels.draft_growth.layout import (
    ENTROPY,
    FIRST_MARGIN,
    HEAD_WORDS,
    TEMPERED,
    Answer,
    Given,
    GrowthPlan,
    GrowthState,
)

__all__ = [
    "ENTROPY",
    "FIRST_MARGIN",
    "HEAD_WORDS",
    "TEMPERED",
    "Answer",
    "Given",
    "GrowthPlan",
    "GrowthState",
]
