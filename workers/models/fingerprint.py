"""The fingerprint of a checkpoint: what identifies the numbers that its forward pass computes. No torch
here.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from dlmgrid.workers.cache import cache_folder
from dlmgrid.workers.cell import digest
from dlmgrid.workers.models.checkpoint import ModelConfig, read_config
from dlmgrid.workers.models.shards import TensorEntry, read_entries
from dlmgrid.workers.partial_files import write_whole

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
_READ_BYTES = 1 << 24


def weight_fingerprint(folder: Path | str, *, read_at_most: int | None = None) -> str:
    """24 hexadecimal digits from the bytes of every tensor, the model's settings and the tokenizer's files.

    How tensors are cut into shards does not matter, nor where the folder lies. The weights are read once; the
    answer is kept in the user's cache folder (DLMGRID_CACHE, else XDG_CACHE_HOME/dlmgrid) under the paths,
    sizes and times of all files. Where it is not there yet and the tensors take more than ``read_at_most`` bytes,
    nothing is read and the answer is "". Raises InputError for a faulty checkpoint.
    """
    folder = Path(folder).resolve()
    config = read_config(folder)
    entries = read_entries(folder)
    tokenizer_files = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
    files = sorted({entry.file for entry in entries}) + tokenizer_files
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    record = cache_folder() / "fingerprints" / f"{digest({'files': states, 'config': _settings(config)})}.txt"
    if record.exists():
        return record.read_text(encoding="ascii").strip()
    if read_at_most is not None and sum(entry.stop - entry.start for entry in entries) > read_at_most:
        return ""
    fingerprint = _compute(config, entries, tokenizer_files)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(record, fingerprint + "\n")
    return fingerprint


def _compute(config: ModelConfig, entries: list[TensorEntry], tokenizer_files: list[Path]) -> str:
    whole = hashlib.sha256(json.dumps(_settings(config), sort_keys=True).encode())
    for entry in entries:
        whole.update(f"{entry.name} {entry.dtype} {list(entry.shape)}\n".encode())
        whole.update(_digest_range(entry.file, entry.start, entry.stop))
    for file in tokenizer_files:
        whole.update(f"{file.name}\n".encode())
        whole.update(_digest_range(file, 0, file.stat().st_size))
    return whole.hexdigest()[:24]


def _settings(config: ModelConfig) -> dict[str, object]:
    """Settings that change what is computed. The block length is a setting of the cell, not of the
    weights. A setting that has a default counts where it differs from it.
    """
    values = asdict(config)
    for name in ("block_length", "torch_dtype", "max_position_embeddings"):
        del values[name]
    for field in fields(config):
        if field.default is not MISSING and values[field.name] == field.default:
            del values[field.name]
    return values


def _digest_range(path: Path, start: int, stop: int) -> bytes:
    digest_of_bytes = hashlib.sha256()
    if stop > start:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for position in range(start, stop, _READ_BYTES):
                digest_of_bytes.update(view[position : min(position + _READ_BYTES, stop)])
    return digest_of_bytes.digest()
