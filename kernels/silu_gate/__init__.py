"""The gated activation of the MLP."""

from dlmgrid.kernels.silu_gate.reference import silu_gate

__all__ = ["silu_gate"]
