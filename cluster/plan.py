"""From cells to work units: the keys still missing, in chunks, each chunk's reference before what needs
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlmgrid.cluster.cells import CellWork
from dlmgrid.cluster.store import Store
from dlmgrid.workers.units import Key, WorkUnit

MAX_ITEMS_PER_UNIT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The units of one ``reference_key`` × chunk of items: they run on one actor, ``reference`` first.

    ``reference`` is None where its rows are stored already. ``output`` of the units is filled in at dispatch.
    """

    checkpoint: str
    reference: WorkUnit | None
    dependents: tuple[WorkUnit, ...]

    @property
    def units(self) -> tuple[WorkUnit, ...]:
        return (*([] if self.reference is None else [self.reference]), *self.dependents)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSettings:
    """What every unit of a run shares. ``trajectories`` is the folder to record in, "" for none,
    ``records`` what to keep there beyond the steps, ``drafts`` where trees grow: ``host`` or ``device``."""

    run_id: str
    device: str
    num_actors: int = 1
    items_per_unit: int | None = None
    trajectories: str = ""
    records: tuple[str, ...] = ()
    drafts: str = "host"


def plan_chains(works: Sequence[CellWork], store: Store | None, settings: UnitSettings) -> list[Chain]:
    """Units for the keys that ``store`` lacks (None: for all of them).

    Chunks are cut from the whole list of keys, not from the missing ones, so a resumed run plans the same
    units.
    """
    groups: dict[str, list[CellWork]] = {}
    for work in works:
        groups.setdefault(work.cell.reference().cell_key, []).append(work)
    num_keys = sum(max(len(work.keys) for work in group) for group in groups.values())
    size = settings.items_per_unit or unit_size(num_keys, settings.num_actors)
    chains = []
    for reference_cell_key, group in groups.items():
        longest = max(group, key=lambda work: len(work.keys))
        missing = {id(work): _missing(work, store) for work in group}
        for start in range(0, len(longest.keys), size):
            chunk = longest.keys[start : start + size]
            reference: WorkUnit | None = None
            dependents: list[WorkUnit] = []
            for work in group:
                keys = tuple(key for key in chunk if key in missing[id(work)])
                if not keys:
                    continue
                unit = _unit(work, keys, settings)
                if work.cell.cell_key == reference_cell_key:
                    reference = unit
                else:
                    dependents.append(unit)
            if reference or dependents:
                chains.append(
                    Chain(checkpoint=longest.checkpoint, reference=reference, dependents=tuple(dependents))
                )
    return chains


def unit_size(num_keys: int, num_actors: int) -> int:
    """Keys per unit: tens, so that a death loses little and files stay few; fewer where actors would be
    idle."""
    return max(1, min(MAX_ITEMS_PER_UNIT, -(-num_keys // (2 * num_actors))))


def split_unit(unit: WorkUnit) -> list[WorkUnit]:
    """One unit per key, as the next attempt."""
    return [replace(unit, keys=(key,), attempt=unit.attempt + 1) for key in unit.keys]


def _missing(work: CellWork, store: Store | None) -> set[Key]:
    return set(work.keys if store is None else store.missing(work.cell.cell_key, work.keys))


def _unit(work: CellWork, keys: tuple[Key, ...], settings: UnitSettings) -> WorkUnit:
    return WorkUnit(
        cell=work.cell,
        keys=keys,
        checkpoint=work.checkpoint,
        inputs=work.inputs,
        output="",
        max_in_flight=work.cell.max_in_flight,
        device=settings.device,
        run_id=settings.run_id,
        drafter_path=work.drafter_path,
        trajectories=settings.trajectories,
        records=settings.records,
        drafts=settings.drafts,
    )
