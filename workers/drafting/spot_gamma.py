"""SPOT-γ (arXiv 2610.22543): SPOT's tree without the states whose mass is below γ.

The number of verified states follows the drafter's confidence; where nothing survives the round is a plain step.
The paper gives no value for γ: ``dlmgrid calibrate --method spot_gamma`` chooses one on calibration items.
"""

from __future__ import annotations

import math
from pathlib import Path

from dlmgrid.workers.drafting.drafter import Drafter
from dlmgrid.workers.drafting.order_checkpoint import load_order_model
from dlmgrid.workers.drafting.spot import make_drafter


def build(checkpoint: Path, gamma: float) -> Drafter:
    """SPOT-γ with 0 < γ ≤ 1. Raises InputError for a file that holds no order model, ValueError for another γ."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma is {gamma}, it must lie in (0, 1]")
    return make_drafter(load_order_model(checkpoint), min_log_mass=math.log(gamma))
