"""Where benchmark rows come from: a local folder, or a pinned revision of the public source.

A local folder is given by ``--data DIR`` or the environment variable DLMGRID_DATA. Its layout::

    DIR/gsm8k/test.jsonl                             question, answer
    DIR/gsm8k/train.jsonl                            question, answer (few-shot examples only)
    DIR/evalplus/HumanEvalPlus-v0.1.10.jsonl         EvalPlus' release file, unchanged
    DIR/manifest.json                                optional, see below

Each file may be compressed (``.gz`` added to its name). Rows are counted and their content is hashed and
compared with the published set, whatever the order of keys or the white space. A folder that holds a subset,
or rows of its own, says so in ``manifest.json``: ``{"gsm8k/test.jsonl": {"rows": 20, "sha256": "…"}}``, where
the optional sha256 is that of the uncompressed file.

Without a folder, GSM8K comes from the Hugging Face hub through ``datasets`` (configuration and revision are
explicit; HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are respected by it), and HumanEval+ from EvalPlus' own
release: the hub's copy of HumanEval+ lacks the test inputs that EvalPlus scores with.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError

DATA_VARIABLE = "DLMGRID_DATA"
MANIFEST = "manifest.json"

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file of the layout: its path in the folder, its columns, and what the published set holds.

    ``content_digest`` is :func:`content_digest` of the published rows. ``hub`` is (repository, configuration,
    split, revision) for the hub, None where the source is a release file.
    """

    path: str
    columns: tuple[str, ...]
    num_rows: int
    content_digest: str
    hub: tuple[str, str, str, str] | None = None

    @property
    def remedy(self) -> str:
        return f"expected DIR/{self.path} or DIR/{self.path}.gz with columns {', '.join(self.columns)}"


GSM8K_REVISION = "e53f048856ff4f594e959d75785d2c2d37b678ee"

GSM8K_TEST = DataFile(
    path="gsm8k/test.jsonl",
    columns=("question", "answer"),
    num_rows=1319,
    content_digest="bcf98c509c975fc0fa0c7c615c6a1a6611b85b92385534672a1d6bc3a0b3faf4",
    hub=("openai/gsm8k", "main", "test", GSM8K_REVISION),
)
GSM8K_TRAIN = DataFile(
    path="gsm8k/train.jsonl",
    columns=("question", "answer"),
    num_rows=7473,
    content_digest="7872d7430bd1f3904adfb70339181a42888060d417bec111f8475c7e5ff838a1",
    hub=("openai/gsm8k", "main", "train", GSM8K_REVISION),
)
HUMANEVAL_PLUS = DataFile(
    path="evalplus/HumanEvalPlus-v0.1.10.jsonl",
    columns=("task_id", "prompt", "entry_point", "canonical_solution", "base_input", "plus_input", "atol"),
    num_rows=164,
    content_digest="156ebb4ef9ef10bc4b5ba5ee90127c5beac220a61581fd75e26cbe28fe68694a",
)


def data_folder(data: str | Path | None) -> Path | None:
    """The local folder to use: ``data``, else DLMGRID_DATA, else None. Raises InputError for no folder."""
    given, origin = (data, "--data") if data else (os.environ.get(DATA_VARIABLE), DATA_VARIABLE)
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise InputError(f"{origin}: {given} is not a folder; give the folder that holds the benchmark data")
    return folder


def load_rows(source: DataFile, data: str | Path | None = None) -> list[Row]:
    """All rows of ``source``, restricted to its columns.

    Raises InputError naming the file or the repository, what was expected and the remedy, when it is missing,
    truncated, altered, or cannot be fetched.
    """
    folder = data_folder(data)
    if folder is not None:
        return _from_folder(source, folder)
    rows = _from_hub(source) if source.hub else _from_evalplus_release(source)
    if len(rows) != source.num_rows:
        raise InputError(
            f"{_origin(source)}: {len(rows)} rows where {source.num_rows} were expected; use --data DIR"
        )
    return rows


def content_digest(rows: list[Row]) -> str:
    """SHA-256 of the rows' canonical JSON: independent of key order and white space, not of row order."""
    text = "\n".join(json.dumps(row, sort_keys=True, separators=(",", ":")) for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json_lines(path: Path, columns: tuple[str, ...]) -> list[Row]:
    """Rows of a JSON-lines file (``.gz`` accepted), ``columns`` only. Raises InputError naming the line."""
    rows: list[Row] = []
    try:
        text = _read_text(path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: truncated or damaged archive ({error}); fetch the file again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}); fetch the file again") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{path}:{number}: not a JSON object ({error}); the file is damaged or cut"
            ) from error
        missing = [name for name in columns if not isinstance(row, dict) or name not in row]
        if missing:
            raise InputError(
                f"{path}:{number}: no column {', '.join(missing)}; expected {', '.join(columns)}"
            )
        rows.append({name: row[name] for name in columns})
    return rows


def _from_folder(source: DataFile, folder: Path) -> list[Row]:
    candidates = (folder / source.path, folder / f"{source.path}.gz")
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise InputError(
            f"{folder}: benchmark data is missing: {source.remedy}; or give another folder by --data DIR"
        )
    rows = read_json_lines(path, source.columns)
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
        return rows
    if len(rows) != declared.get("rows"):
        raise InputError(f"{path}: {len(rows)} rows where {MANIFEST} declares {declared.get('rows')}")
    wanted = declared.get("sha256")
    if wanted is not None and hashlib.sha256(_read_text(path).encode()).hexdigest() != wanted:
        raise InputError(f"{path}: its sha256 is not the one that {MANIFEST} declares; fetch the file again")
    return rows


def _declared(folder: Path, source: DataFile) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    entry = manifest.get(source.path) if isinstance(manifest, dict) else None
    if entry is not None and (not isinstance(entry, dict) or not isinstance(entry.get("rows"), int)):
        raise InputError(f"{path}: the entry of {source.path} needs an integer 'rows'")
    return entry


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")


def _from_hub(source: DataFile) -> list[Row]:
    assert source.hub is not None
    repository, configuration, split, revision = source.hub
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(
            "loading from the hub needs the package datasets: pip install datasets, or give --data DIR"
        ) from error
    try:
        dataset = load_dataset(repository, configuration, split=split, revision=revision)
    except Exception as error:  # every failure of the hub client has the same remedy
        cause = str(error).split("\n", 1)[0]
        raise InputError(
            f"{_origin(source)} cannot be loaded ({type(error).__name__}: {cause}); give a local copy by "
            f"--data DIR ({source.remedy}), or load it once with a network and HF_HUB_OFFLINE unset"
        ) from error
    missing = [name for name in source.columns if name not in dataset.column_names]
    if missing:
        raise InputError(f"{_origin(source)}: no column {', '.join(missing)}; use --data DIR")
    return [{name: row[name] for name in source.columns} for row in dataset]


def _from_evalplus_release(source: DataFile) -> list[Row]:
    try:
        from evalplus.data.humaneval import HUMANEVAL_PLUS_VERSION
        from evalplus.data.utils import get_dataset_metadata, make_cache
    except ImportError as error:
        raise InputError(
            f"fetching {source.path} needs the package evalplus: pip install evalplus, or give --data DIR"
        ) from error
    if HUMANEVAL_PLUS_VERSION not in source.path:
        raise InputError(
            f"the installed EvalPlus uses HumanEval+ {HUMANEVAL_PLUS_VERSION}, not {source.path}; "
            "give --data DIR"
        )
    url, cached = get_dataset_metadata("HumanEvalPlus", HUMANEVAL_PLUS_VERSION, False, False)
    if not Path(cached).is_file() and os.environ.get("HF_HUB_OFFLINE", "0").upper() in {
        "1",
        "ON",
        "YES",
        "TRUE",
    }:
        raise InputError(
            f"{url} is not in EvalPlus' cache and HF_HUB_OFFLINE is set; give --data DIR ({source.remedy})"
        )
    try:
        make_cache(url, cached)
    except OSError as error:
        raise InputError(f"{url} cannot be fetched ({error}); give --data DIR ({source.remedy})") from error
    rows = read_json_lines(Path(cached), source.columns)
    if content_digest(rows) != source.content_digest:
        raise InputError(f"{cached}: content differs from the release; delete the file and fetch it again")
    return rows


def _origin(source: DataFile) -> str:
    return " ".join(source.hub) if source.hub else source.path
