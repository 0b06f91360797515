"""A run's output folder as its readers see it: what the manifest names, each file verified before it is read.

``manifest.jsonl`` decides what exists. Its lines are a committed file of ``generations/`` (see
:class:`~dlmgrid.workers.shard.Shard`), ``{"dropped": unit_key}``, and a file of ``inputs/``; of several lines
about one file the last counts. A file of another size or SHA-256 than its line says is never read, and a file
without a line is no part of the run: it is being committed, was left by a crash, or is foreign.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item, parse_items
from dlmgrid.workers.shard import Shard
from dlmgrid.workers.tables import GENERATIONS, SCHEMA_VERSION, read_table

MANIFEST = "manifest.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputsFile:
    """A file of ``inputs/``: its first ``num_bytes`` bytes have this SHA-256. What follows them was written by a
    run that died before it could record it, and is not read."""

    name: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, content: bytes) -> InputsFile:
        return cls(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    def to_line(self) -> str:
        values = {"inputs": self.name, "num_bytes": self.num_bytes, "sha256": self.sha256}
        return json.dumps({**values, "schema_version": SCHEMA_VERSION}, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, values: dict[str, Any]) -> InputsFile:
        """What :meth:`to_line` wrote. Raises KeyError or TypeError for a line that is damaged."""
        name, num_bytes, sha256 = values["inputs"], values["num_bytes"], values["sha256"]
        if not (isinstance(name, str) and isinstance(num_bytes, int) and isinstance(sha256, str)):
            raise TypeError("inputs, num_bytes and sha256 are not a text, a number and a text")
        return cls(name=name, num_bytes=num_bytes, sha256=sha256)

    def fault(self, content: bytes) -> str:
        """How the file's content differs from what is recorded; "" when it does not."""
        if len(content) < self.num_bytes:
            return f"has {len(content)} bytes, the manifest says {self.num_bytes}"
        found = hashlib.sha256(content[: self.num_bytes]).hexdigest()
        return "" if found == self.sha256 else f"has sha256 {found}, the manifest says {self.sha256}"


@dataclass(kw_only=True, slots=True)
class Manifest:
    """What a manifest says: committed files by unit key, input files by name, and the length in bytes of a last
    line that a crash tore."""

    shards: dict[str, Shard] = field(default_factory=dict)
    inputs: dict[str, InputsFile] = field(default_factory=dict)
    num_torn: int = 0


def read_manifest(out: Path) -> Manifest:
    """The manifest of a folder, empty where there is none. A torn last line is left out.

    Raises InputError, naming the line, for a manifest that cannot be read, is damaged, or of another version.
    """
    path = out / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Manifest()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); restore the file from a backup"
        ) from error
    whole, _, torn = content.rpartition(b"\n")
    manifest = Manifest(num_torn=len(torn))
    for number, line in enumerate(whole.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            version = _take(manifest, json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"{path}:{number}: damaged ({type(error).__name__}: {error}); restore it from a backup, or move "
                "the files of generations/ into staging/ and delete it, and they are adopted"
            ) from error
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{out} was written with schema version {version}, this is {SCHEMA_VERSION}; use a new --out"
            )
    return manifest


def _take(manifest: Manifest, values: dict[str, Any]) -> object:
    """Apply one line; returns the schema version it was written with."""
    if "dropped" in values:
        if not isinstance(values["dropped"], str):
            raise TypeError(f"dropped is {values['dropped']!r}, not a unit key")
        manifest.shards.pop(values["dropped"], None)
        return SCHEMA_VERSION
    version = values["schema_version"]
    if version != SCHEMA_VERSION:
        return version
    if "inputs" in values:
        file = InputsFile.from_line(values)
        manifest.inputs[file.name] = file
    else:
        shard = Shard.from_line(values)
        manifest.shards[shard.unit_key] = shard
    return version


def open_run(out: Path) -> Manifest:
    """The manifest of a run's folder. Raises InputError for a folder that is none, or has lost its manifest."""
    if not (out / "generations").is_dir():
        replays = (out / "replays").is_dir()
        what = f"; it holds replays, which dlmgrid study {shlex.quote(str(out))} shows" if replays else ""
        raise InputError(f"{out} holds no generations/ folder; give the --out folder of a run{what}")
    manifest = read_manifest(out)
    if not (out / MANIFEST).exists() and (files := unlisted(out, manifest)):
        raise InputError(
            f"{out} holds {len(files)} files in generations/ and no {MANIFEST}, which says what is committed; "
            "restore it, or run the same grid again, which adopts whole files"
        )
    return manifest


def unlisted(out: Path, manifest: Manifest) -> list[Path]:
    """Parquet files of ``generations/`` that the manifest does not name; no reader takes them."""
    return sorted(
        path for path in (out / "generations").glob("*.parquet") if path.stem not in manifest.shards
    )


def shard_path(out: Path, unit_key: str) -> Path:
    return out / "generations" / f"{unit_key}.parquet"


def shard_fault(out: Path, shard: Shard) -> str:
    """How a committed file differs from what the manifest says of it; "" when it does not."""
    try:
        with shard_path(out, shard.unit_key).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            num_bytes = file.tell()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if num_bytes != shard.num_bytes:
        return f"has {num_bytes} bytes, the manifest says {shard.num_bytes}"
    return "" if found == shard.sha256 else f"has sha256 {found}, the manifest says {shard.sha256}"


def inputs_fault(out: Path, file: InputsFile) -> str:
    """How a file of ``inputs/`` differs from what the manifest says of it; "" when it does not."""
    try:
        return file.fault((out / "inputs" / file.name).read_bytes())
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def read_generations(out: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The committed rows of a run, every file verified.

    Raises InputError for a folder that is not a run's and for the first file that is not the committed one.
    """
    manifest = open_run(out)
    paths = []
    for unit_key, shard in sorted(manifest.shards.items()):
        path = shard_path(out, unit_key)
        if fault := shard_fault(out, shard):
            raise InputError(
                f"{path} {fault}; restore it from a backup, or run the same grid again, which decodes its "
                f"{len(shard.keys)} keys again"
            )
        paths.append(str(path))
    return read_table(paths, GENERATIONS, columns)


def read_inputs(out: Path, file: InputsFile) -> list[Item]:
    """The recorded items of a file of ``inputs/``. Raises InputError when it is not the recorded one."""
    path = out / "inputs" / file.name
    if fault := inputs_fault(out, file):
        raise InputError(f"{path} {fault}; restore it from a backup, or run the grid into a new --out")
    return list(parse_items(path.read_bytes()[: file.num_bytes], path))
