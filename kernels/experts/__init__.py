"""The routed experts' sum: products by expert, and the weighted sum in rank order."""

from dlmgrid.kernels.experts.reference import run_routed

__all__ = ["run_routed"]
