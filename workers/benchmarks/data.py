"""Where benchmark rows come from: a local folder, or a pinned revision of the public source.

A local folder is given by ``--data DIR`` or the environment variable DLMGRID_DATA; without either it is the
one that ``dlmgrid prefetch`` fills. Each benchmark names its files (``dlmgrid benchmarks NAME``), for example
``DIR/gsm8k/test.jsonl``; each may be compressed (``.gz`` added to its name). Rows are counted and their
content is hashed and compared with the published set, whatever the order of keys or the white space. A folder
that holds a subset, or rows of its own, says so in ``DIR/manifest.json``: ``{"gsm8k/test.jsonl": {"rows": 20,
"sha256": "…"}}``, where the optional sha256 is that of the uncompressed file. ``prefetch`` writes that file.

Without a folder the source is asked: the Hugging Face hub through ``datasets`` (configuration and revision
are explicit; HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are respected by it), a file on GitHub at a commit, or
EvalPlus' own release: the hub's copies of HumanEval+ and MBPP+ lack the test inputs that EvalPlus scores with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.data_file import DataFile, Row, content_digest, parse_rows, read_rows
from dlmgrid.workers.cache import cache_folder
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole

DATA_VARIABLE = "DLMGRID_DATA"
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What a data folder holds of one file after :func:`prefetch`. ``sha256`` is of the uncompressed file."""

    path: Path
    num_rows: int
    sha256: str
    is_new: bool


def prefetched_folder() -> Path:
    """The data folder that is used when none is named: ``data`` in the cache folder."""
    return cache_folder() / "data"


def data_folder(data: str | Path | None) -> Path | None:
    """The local folder to use: ``data``, else DLMGRID_DATA, else None. Raises InputError for no folder."""
    given, origin = (data, "--data") if data else (os.environ.get(DATA_VARIABLE), DATA_VARIABLE)
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise InputError(f"{origin}: {given} is not a folder; give the folder that holds the benchmark data")
    return folder


def is_at_hand(sources: Sequence[DataFile], data: str | Path | None = None) -> bool:
    """Whether :func:`load_rows` would read local files: a folder is named, or all of them were prefetched."""
    return data_folder(data) is not None or all(
        _existing(source, prefetched_folder()) is not None for source in sources
    )


def load_rows(source: DataFile, data: str | Path | None = None) -> list[Row]:
    """All rows of ``source``, restricted to its columns.

    Raises InputError naming the file or the repository, what was expected and the remedy, when it is missing,
    truncated, altered, or cannot be fetched.
    """
    folder = data_folder(data)
    if folder is None and _existing(source, prefetched_folder()) is not None:
        folder = prefetched_folder()
    if folder is None:
        return _fetched(source)[0]
    path = _existing(source, folder)
    if path is None:
        raise InputError(
            f"{folder}: benchmark data is missing; fetch it with dlmgrid prefetch --data {shlex.quote(str(folder))}, "
            f"or give another folder by --data DIR ({source.remedy})"
        )
    return _checked(source, folder, path)[0]


def prefetch(source: DataFile, folder: Path) -> Fetched:
    """See that ``folder`` holds ``source``: a file that is there is checked, one that is not is fetched.

    Its row count and sha256 go into the folder's manifest, which every later load is held against. Raises
    InputError when the file that is there is not the published set, when it cannot be fetched, or when the
    folder cannot be written.
    """
    path = _existing(source, folder)
    is_new = path is None
    if path is not None:
        rows, sha256 = _checked(source, folder, path)
    else:
        rows, content = _fetched(source)
        sha256 = hashlib.sha256(content).hexdigest()
        path = folder / source.path
        _write_whole(path, content)
    manifest = _manifest(folder)
    entry = {**(manifest.get(source.path) or {}), "rows": len(rows), "sha256": sha256}
    if manifest.get(source.path) != entry:
        text = json.dumps({**manifest, source.path: entry}, indent=1, sort_keys=True) + "\n"
        _write_whole(folder / MANIFEST, text.encode())
    return Fetched(path=path, num_rows=len(rows), sha256=sha256, is_new=is_new)


def _existing(source: DataFile, folder: Path) -> Path | None:
    candidates = (folder / source.path, folder / f"{source.path}.gz")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _checked(source: DataFile, folder: Path, path: Path) -> tuple[list[Row], str]:
    """Rows and sha256 of a file that the manifest declares, or else is the published set."""
    rows, sha256 = read_rows(path, source)
    declared = _declared(folder, source)
    if declared is None:
        if len(rows) != source.num_rows:
            raise InputError(
                f"{path}: {len(rows)} rows where the published set has {source.num_rows}: truncated? Fetch "
                f"it again, or declare a subset in {MANIFEST} beside it"
            )
        if content_digest(rows) != source.content_digest:
            raise InputError(
                f"{path}: content differs from the published set; fetch it again, or declare it in {MANIFEST}"
            )
        return rows, sha256
    if len(rows) != declared.get("rows"):
        raise InputError(f"{path}: {len(rows)} rows where {MANIFEST} declares {declared.get('rows')}")
    if declared.get("sha256") not in (None, sha256):
        raise InputError(f"{path}: its sha256 is not the one that {MANIFEST} declares; fetch the file again")
    return rows, sha256


def _fetched(source: DataFile) -> tuple[list[Row], bytes]:
    """Rows and content from the public source, held against the published set.

    The hub's rows are pinned by their revision, and counted; the others are compared by content.
    """
    from dlmgrid.workers.benchmarks.fetching import fetch

    content = fetch(source)
    rows = parse_rows(content, source, source.origin)
    if len(rows) != source.num_rows:
        raise InputError(
            f"{source.origin}: {len(rows)} rows where {source.num_rows} were expected; use --data DIR"
        )
    if source.hub is None and content_digest(rows) != source.content_digest:
        raise InputError(f"{source.origin}: content differs from the published set; use --data DIR")
    return rows, content


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    return manifest if isinstance(manifest, dict) else {}


def _declared(folder: Path, source: DataFile) -> dict[str, Any] | None:
    entry = _manifest(folder).get(source.path)
    if entry is not None and (not isinstance(entry, dict) or not isinstance(entry.get("rows"), int)):
        raise InputError(f"{folder / MANIFEST}: the entry of {source.path} needs an integer 'rows'")
    return entry


def _write_whole(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}); give another folder by --data DIR") from error
