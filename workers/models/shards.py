"""The tensors of a checkpoint folder as its safetensors headers describe them: one file or many shards.

No torch here, and no weights are read. The layout is the published one: 8 bytes of header length, a JSON
header of names, types, shapes and offsets, then the data.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_BYTES_OF = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a safetensors header describes it, ``start`` and ``stop`` in bytes of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(folder: Path | str) -> list[TensorEntry]:
    """Every tensor of the folder as its safetensors headers describe it, in order of name.

    Raises InputError for a missing or truncated shard, a broken header, and an index that disagrees with it.
    """
    folder = existing_folder(folder)
    by_file: dict[str, list[str]] = {}
    for name, file in tensor_files(folder).items():
        by_file.setdefault(file, []).append(name)
    entries: list[TensorEntry] = []
    for file, names in sorted(by_file.items()):
        in_file = {entry.name: entry for entry in _read_header(folder / file)}
        for name in names:
            if name not in in_file:
                raise InputError(f"{folder / file}: tensor {name} is missing, {INDEX_FILE} expected it here")
        unlisted = sorted(in_file.keys() - set(names))
        if unlisted:
            raise InputError(f"{folder / file}: tensor {unlisted[0]} is not listed in {INDEX_FILE}")
        entries.extend(in_file.values())
    return sorted(entries, key=lambda entry: entry.name)


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name to the shard's file name, from the index or the single file's header.

    Raises InputError where neither is there, or a shard of the index is missing.
    """
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise InputError(
                f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is here; download the weights"
            )
        return {entry.name: SINGLE_FILE for entry in _read_header(folder / SINGLE_FILE)}
    files = read_json(index_path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise InputError(f"{index_path}: weight_map is missing or not a table of tensor names to files")
    for file in sorted(set(files.values())):
        if not (folder / file).exists():
            raise InputError(
                f"{folder / file}: shard is missing, {INDEX_FILE} expected it; download it again"
            )
    return files


def _read_header(path: Path) -> list[TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise InputError(
                f"{path}: not a whole safetensors file ({size} bytes, header of {length}); download it again"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}: its safetensors header is broken ({error}); download it again"
            ) from error
    if not isinstance(header, dict):
        raise InputError(f"{path}: its safetensors header is broken (no table); download it again")
    entries = []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        try:
            shape, (begin, end) = tuple(about["shape"]), about["data_offsets"]
            num_bytes = product(shape) * _BYTES_OF[about["dtype"]]
            entry = TensorEntry(name, path, about["dtype"], shape, 8 + length + begin, 8 + length + end)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}: tensor {name} has a header entry that cannot be read ({about})"
            ) from error
        if end - begin != num_bytes:
            raise InputError(
                f"{path}: tensor {name} has {end - begin} bytes, expected {num_bytes} for its shape"
            )
        entries.append(entry)
    expected = max((entry.stop for entry in entries), default=8 + length)
    if size != expected:
        raise InputError(f"{path}: file has {size} bytes, its header expected {expected}; download it again")
    return entries


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError for a missing file and for anything else in it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise InputError(f"{path}: file is missing; a checkpoint folder needs it") from error
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def existing_folder(folder: Path | str) -> Path:
    """The folder as a path. Raises InputError where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such checkpoint folder")
    return folder


def product(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    total = 1
    for size in shape:
        total *= size
    return total
