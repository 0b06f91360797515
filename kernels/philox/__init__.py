"""Counter-based random numbers: Philox 4×32-10 words, uniforms and Gumbel values of a virtual noise table."""

from dlmgrid.kernels.philox.reference import gumbel_at, gumbel_rows, philox, uniform, uniform_at

__all__ = ["gumbel_at", "gumbel_rows", "philox", "uniform", "uniform_at"]
