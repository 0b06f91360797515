"""Which engine a model's family runs on: blocks after a cached prefix, or branches of one canvas."""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.cell import Cell
from dlmgrid.workers.engine.canvas import CanvasEngine, load_canvas_engine
from dlmgrid.workers.engine.engine import Engine, load_engine
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.families import get_family

FamilyEngine = Engine | CanvasEngine


def is_bidirectional(config: ModelConfig) -> bool:
    """Whether every position of the model sees the whole canvas."""
    return get_family(config.family).attention == "bidirectional"


def open_engine(
    folder: Path, cell: Cell, config: ModelConfig, *, num_slots: int, max_length: int, device: str
) -> FamilyEngine:
    """Load the checkpoint of ``cell``. Raises InputError for a faulty checkpoint or setting, and where it does not fit
    the device."""
    if is_bidirectional(config):
        if cell.kernels != "torch":
            raise InputError(f"kernels: {cell.kernels} has no attention over a canvas; use kernels: torch")
        return load_canvas_engine(
            folder,
            cache=cell.cache,
            num_slots=num_slots,
            max_length=max_length,
            block_length=cell.block_length,
            device=device,
            dtype=cell.dtype,
            numerics=cell.numerics,
        )
    return load_engine(
        folder,
        num_slots=num_slots,
        max_length=max_length,
        block_length=cell.block_length,
        device=device,
        dtype=cell.dtype,
        numerics=cell.numerics,
        kernels=cell.kernels,
    )


def with_room(engine: FamilyEngine, cache: str, num_slots: int, max_length: int) -> FamilyEngine:
    """The same weights behind buffers that are large enough, and of that cache; those of ``engine`` are given up where
    they are not. Raises InputError where the new ones do not fit."""
    has_cache = not isinstance(engine, CanvasEngine) or engine.cache == cache
    if has_cache and num_slots <= engine.num_slots and max_length <= engine.max_length:
        return engine
    num_slots, max_length = max(num_slots, engine.num_slots), max(max_length, engine.max_length)
    device, dtype, numerics = str(engine.device), engine.dtype, engine.numerics
    engine.release()
    if isinstance(engine, CanvasEngine):
        return CanvasEngine(
            engine.config,
            engine.weights,
            cache=cache,
            num_slots=num_slots,
            max_length=max_length,
            device=device,
            dtype=dtype,
            numerics=numerics,
        )
    return Engine(
        engine.config,
        engine.weights,
        num_slots=num_slots,
        max_length=max_length,
        device=device,
        dtype=dtype,
        numerics=numerics,
        kernels=engine.kernels,
    )
