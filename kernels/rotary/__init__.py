"""Rotary position embedding."""

from dlmgrid.kernels.rotary.reference import apply_rotary, rotary_tables, yarn_frequencies

__all__ = ["apply_rotary", "rotary_tables", "yarn_frequencies"]
