"""Matrix products whose row results do not depend on what else is packed."""

from dlmgrid.kernels.gemm.reference import (
    CHUNK_WIDTH,
    PANEL_ROWS,
    column_major,
    linear,
    linear_vendor,
    pad_rows,
)

__all__ = ["CHUNK_WIDTH", "PANEL_ROWS", "column_major", "linear", "linear_vendor", "pad_rows"]
