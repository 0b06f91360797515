"""One file of benchmark data: its place in a data folder, its columns, its published content, how it is read."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A file's path in the data folder, its columns, and what the published set holds.

    ``content_digest`` is :func:`content_digest` of the published rows. At most one of ``hub`` (repository,
    configuration, split, revision) and ``github`` (repository, commit, path there) is given; a file with
    neither is a release of EvalPlus. A name that ends in ``.json`` holds one list, any other JSON lines.
    """

    path: str
    columns: tuple[str, ...]
    num_rows: int
    content_digest: str
    hub: tuple[str, str, str, str] | None = None
    github: tuple[str, str, str] | None = None

    @property
    def remedy(self) -> str:
        return f"expected DIR/{self.path} or DIR/{self.path}.gz with columns {', '.join(self.columns)}"

    @property
    def origin(self) -> str:
        """The public source in words."""
        if self.hub is not None:
            return " ".join(self.hub)
        if self.github is not None:
            repository, commit, path = self.github
            return f"github.com/{repository}, {path}, commit {commit}"
        return f"EvalPlus' release {Path(self.path).stem}"


def content_digest(rows: list[Row]) -> str:
    """SHA-256 of the rows' canonical JSON: independent of key order and white space, not of row order."""
    text = "\n".join(json.dumps(row, sort_keys=True, separators=(",", ":")) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def read_rows(path: Path, source: DataFile) -> tuple[list[Row], str]:
    """The file's rows, and the sha256 of its uncompressed content. Raises InputError as :func:`parse_rows`."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = unpacked(content, str(path))
    return parse_rows(content, source, str(path)), hashlib.sha256(content).hexdigest()


def unpacked(content: bytes, where: str) -> bytes:
    """``content`` without its gzip wrapping, if ``where`` ends in ``.gz``. Raises InputError for a bad one."""
    if not where.endswith(".gz"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{where}: truncated or damaged archive ({error}); fetch the file again") from error


def parse_rows(content: bytes, source: DataFile, where: str) -> list[Row]:
    """Rows of a file's content, the columns of ``source`` only.

    Raises InputError naming ``where`` and the line (in a list: the entry) that is cut or lacks a column.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text ({error}); fetch the file again") from error
    if source.path.endswith(".json"):
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise InputError(f"{where}: not a JSON list ({error}); the file is damaged or cut") from error
        if not isinstance(listed, list):
            raise InputError(f"{where}: not a JSON list; {source.remedy}")
        return [_row(row, source, f"{where}, entry {number}") for number, row in enumerate(listed, 1)]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{where}:{number}: not a JSON object ({error}); the file is damaged or cut"
            ) from error
        rows.append(_row(row, source, f"{where}:{number}"))
    return rows


def _row(row: Any, source: DataFile, where: str) -> Row:
    missing = [name for name in source.columns if not isinstance(row, dict) or name not in row]
    if missing:
        raise InputError(f"{where}: no column {', '.join(missing)}; expected {', '.join(source.columns)}")
    return {name: row[name] for name in source.columns}
