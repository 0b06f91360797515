"""Work units: what the driver sends to an actor and what comes back. Plain values, so they pickle and print."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlmgrid.workers.cell import Cell, digest

DRAFT_PLACES = ("host", "device")
"""Where the trees of a drafter may grow that can grow them beside the target."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One thing to generate: an item and a repeat, within a cell."""

    item_id: str
    repeat: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkUnit:
    """A handful of keys of one cell.

    ``checkpoint`` is the folder of the model, ``inputs`` the JSON-lines file of the benchmark's items, ``output``
    the staging file to write (made whole or not at all). ``reference_shards`` are committed Parquet files that
    hold the reference rows of these keys; empty for a reference unit. ``max_in_flight`` bounds the samples
    decoded together (a retry after running out of memory lowers it). ``drafter_path`` is the file of the drafter's
    learned or calibrated part, identified in the cell by ``drafter_fingerprint``; "" where it has none.
    ``trajectories`` is the folder that the steps of a draft-free unit are recorded in, as ``<unit_key>.parquet``; ""
    records nothing. ``records`` names what is recorded beyond the steps: ``window``, ``hidden``.
    ``drafts`` says where trees grow that can grow beside the target: on the ``host``, or on the target's ``device``.
    ``num_compared`` is how many keys of a draft-free unit are decoded
    serialized too and compared; None: all. The others' rows have no verdict, and count as unchecked.
    """

    cell: Cell
    keys: tuple[Key, ...]
    checkpoint: str
    inputs: str
    output: str
    reference_shards: tuple[str, ...] = ()
    attempt: int = 1
    max_in_flight: int = 8
    profiled: bool = False
    device: str = "cpu"
    run_id: str = ""
    drafter_path: str = ""
    trajectories: str = ""
    records: tuple[str, ...] = ()
    drafts: str = "host"
    num_compared: int | None = None

    @property
    def unit_key(self) -> str:
        keys = sorted(self.keys)
        return digest([self.cell.cell_key, [[key.item_id, key.repeat] for key in keys]])


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """What an actor reports: the rows themselves are in the file at ``output``."""

    unit_key: str
    output: str
    num_rows: int
    num_bytes: int
    sha256: str
    num_errors: int
    num_inexact: int
    num_unchecked: int
    num_tokens: int
    seconds: float
    runtime_fingerprint: str
    failures: dict[str, str] = field(default_factory=dict)
