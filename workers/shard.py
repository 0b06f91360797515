"""One committed Parquet file of the store: what its manifest line says, and how that is read from the file itself."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dlmgrid.workers.cell import digest
from dlmgrid.workers.tables import GENERATIONS, SCHEMA_VERSION
from dlmgrid.workers.units import Key

_KEY_COLUMNS = ["cell_key", "item_id", "repeat"]
_KEY_LISTS = ("keys", "failed", "inexact")
_TEXTS = ("unit_key", "cell_key", "sha256", "runtime_fingerprint", "run_id")
_COUNTS = ("num_bytes", "num_unchecked", "num_tokens", "attempt")
_VERDICTS = ("exact_tokens", "exact_path", "exact_bits")
_SUMMARY_COLUMNS = [
    *_KEY_COLUMNS,
    *_VERDICTS,
    "error",
    "generated_tokens",
    "runtime_fingerprint",
    "run_id",
    "attempt",
]


class RejectedShardError(Exception):
    """A staged file is not what the actor reported: absent, torn, or of other keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A committed file of one unit, as its manifest line says.

    ``failed`` are the keys whose row holds an error, ``inexact`` those with a false verdict at any level.
    """

    unit_key: str
    cell_key: str
    keys: tuple[Key, ...]
    num_bytes: int
    sha256: str
    failed: tuple[Key, ...]
    inexact: tuple[Key, ...]
    num_unchecked: int
    num_tokens: int
    runtime_fingerprint: str
    run_id: str
    attempt: int

    def to_line(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        for name in _KEY_LISTS:
            values[name] = [[key.item_id, key.repeat] for key in values[name]]
        values["schema_version"] = SCHEMA_VERSION
        values["committed_at"] = datetime.now(UTC).isoformat()
        return json.dumps(values, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, values: dict[str, Any]) -> Shard:
        """What :meth:`to_line` wrote. Raises KeyError, TypeError or ValueError for a line that is damaged."""
        values = {name: values[name] for name in cls.__slots__}
        for name in _KEY_LISTS:
            values[name] = tuple(_key(item_id, repeat) for item_id, repeat in values[name])
        for name in _TEXTS:
            if not isinstance(values[name], str):
                raise TypeError(f"{name} is {values[name]!r}, not a text")
        for name in _COUNTS:
            if not isinstance(values[name], int):
                raise TypeError(f"{name} is {values[name]!r}, not a number")
        return cls(**values)


def _key(item_id: object, repeat: object) -> Key:
    if not isinstance(item_id, str) or not isinstance(repeat, int):
        raise TypeError(f"[{item_id!r}, {repeat!r}] is no key")
    return Key(item_id, repeat)


def read_shard(path: Path, *, sync: bool = True) -> Shard:
    """What a Parquet file of one unit holds, read from the file itself; ``sync`` it to disk first.

    Raises RejectedShardError when it is absent, torn, of another schema version, or of more than one cell.
    """
    try:
        with path.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            content = file.read()
    except FileNotFoundError as error:
        raise RejectedShardError(f"{path.name} is not there") from error
    except OSError as error:
        raise RejectedShardError(f"{path.name} cannot be read ({error.strerror})") from error
    try:
        parquet = pq.ParquetFile(pa.BufferReader(content))
        found = parquet.schema_arrow
        if found.metadata != GENERATIONS.metadata or found.names != GENERATIONS.names:
            raise RejectedShardError(f"{path.name} has another schema")
        table = parquet.read(columns=_SUMMARY_COLUMNS, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise RejectedShardError(f"{path.name} is not a whole Parquet file ({error})") from error
    columns = table.to_pydict()
    cell_keys, fingerprints = set(columns["cell_key"]), set(columns["runtime_fingerprint"])
    keys = tuple(map(Key, columns["item_id"], columns["repeat"]))
    if len(cell_keys) != 1 or len(fingerprints) != 1 or len(set(keys)) != len(keys):
        raise RejectedShardError(f"{path.name} does not hold distinct keys of one cell and one runtime")
    cell_key = cell_keys.pop()
    verdicts = list(zip(*(columns[name] for name in _VERDICTS), strict=True))
    return Shard(
        unit_key=digest([cell_key, [[key.item_id, key.repeat] for key in sorted(keys)]]),
        cell_key=cell_key,
        keys=keys,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        failed=tuple(key for key, error in zip(keys, columns["error"], strict=True) if error is not None),
        inexact=tuple(key for key, verdict in zip(keys, verdicts, strict=True) if False in verdict),
        num_unchecked=sum(None in verdict for verdict in verdicts),
        num_tokens=sum(count or 0 for count in columns["generated_tokens"]),
        runtime_fingerprint=fingerprints.pop() or "",
        run_id=columns["run_id"][0] or "",
        attempt=columns["attempt"][0] or 0,
    )
