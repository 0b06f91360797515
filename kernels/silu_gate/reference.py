"""Torch twin of the SwiGLU activation (Shazeer 2020): silu(gate) * up.

The vendor's own SiLU gives a value other bits in the tail of a vector than in its body, so it is spelled out
in operations that do not: negation, exponential, addition, division, product.
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_gate(gate_up: Tensor) -> Tensor:
    """``gate_up`` [R, 2I], the gate in the first half of a row and the input in the second: [R, I], same
    dtype.

    Computed in fp32, rounded once.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_gate: want [R, 2 * I], got {tuple(gate_up.shape)}")
    gate, up = gate_up.float().chunk(2, dim=1)
    denominator = gate.neg().exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up).to(gate_up.dtype)
