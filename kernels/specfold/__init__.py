"""SpecFold's row work: gate, provenance, packing of recomputed rows, and the fold that keeps a row's own residual."""

from dlmgrid.kernels.specfold.layout import FoldLayout, FoldTables
from dlmgrid.kernels.specfold.reference import (
    PackedRows,
    distances,
    fold_rows,
    pack_rows,
    resolve,
    row_sources,
)

__all__ = [
    "FoldLayout",
    "FoldTables",
    "PackedRows",
    "distances",
    "fold_rows",
    "pack_rows",
    "resolve",
    "row_sources",
]
