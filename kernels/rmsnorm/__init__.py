"""Root-mean-square normalisation of rows and of heads."""

from dlmgrid.kernels.rmsnorm.reference import head_rms_norm, rms_norm

__all__ = ["head_rms_norm", "rms_norm"]
