"""Small data folders in the documented layout, and output folders as a run leaves them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dlmgrid.workers.items import Item
from dlmgrid.workers.tables import GENERATIONS
from dlmgrid.workers.testing.stored_rows import commit_items, commit_rows

GSM8K_ROWS = [
    {
        "question": f"Tom has {n} boxes of 1000 pens and {n} loose pens. How many pens has he?",
        "answer": f"Boxes hold {n}*1000=<<{n}*1000={n * 1000}>>{n * 1000} pens.\n#### {n * 1001:,}",
    }
    for n in range(1, 26)
]

ADD = '''import math
from typing import List


def halve(x):
    """ Half of x. """
    return x / 2


def total(values: List[int], start: int = 0) -> int:
    """ Sum of values, from start.
    >>> total([1, 2])
    3
    """
'''
HUMANEVAL_ROWS = [
    {
        "task_id": "HumanEval/900",
        "prompt": ADD,
        "entry_point": "total",
        "canonical_solution": (
            "\n    result = start\n    for value in values:\n        result += value\n    return result\n"
        ),
        "base_input": [[[1, 2, 3]], [[]], [[5], 2]],
        "plus_input": [[[10**9, 1], 7], [[-1, 1]]],
        "atol": 0,
        "contract": "",  # not read here, but EvalPlus wants it
    },
    {
        "task_id": "HumanEval/901",
        "prompt": 'def repeat(text: str, times: int) -> str:\n    """ Repeat text. """\n',
        "entry_point": "repeat",
        "canonical_solution": "    return text * times\n",
        "base_input": [["ab", 2], ["", 3]],
        "plus_input": [["x", 0]],
        "atol": 0,
        "contract": "",  # not read here, but EvalPlus wants it
    },
]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder in the documented layout that declares its subsets in its manifest."""
    folder = tmp_path / "data"
    write_lines(folder / "gsm8k/test.jsonl", GSM8K_ROWS)
    write_lines(folder / "gsm8k/train.jsonl.gz", GSM8K_ROWS)
    write_lines(folder / "evalplus/HumanEvalPlus-v0.1.10.jsonl.gz", HUMANEVAL_ROWS)
    declared = {
        "gsm8k/test.jsonl": {"rows": len(GSM8K_ROWS)},
        "gsm8k/train.jsonl": {"rows": len(GSM8K_ROWS)},
        "evalplus/HumanEvalPlus-v0.1.10.jsonl": {"rows": len(HUMANEVAL_ROWS)},
    }
    (folder / "manifest.json").write_text(json.dumps(declared))
    return folder


@pytest.fixture
def shared_data() -> Path:
    """The public data sets, where the machine has them."""
    given = os.environ.get("DLMGRID_SHARED")
    folder = (Path(given) if given else Path(__file__).resolve().parents[3].parent / "shared") / "data"
    if not (folder / "gsm8k").is_dir():
        pytest.skip("the shared data sets are not on this machine (set DLMGRID_SHARED)")
    return folder


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DLMGRID_DATA", raising=False)
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)


@pytest.fixture
def generation() -> Callable[..., dict[str, Any]]:
    """Makes a row of ``generations`` with every column; what scoring does not read is empty."""
    return _generation


def _generation(benchmark: str, item_id: str, text: str | None, **columns: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field in GENERATIONS:
        if field.nullable:
            row[field.name] = None
        else:
            row[field.name] = {pa.string(): "", pa.int32(): 0, pa.float64(): 0.0, pa.bool_(): False}[
                field.type
            ]
    return {**row, "cell_key": "cell", "benchmark": benchmark, "item_id": item_id, "text": text, **columns}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write an output folder with these items and these generations, in as many files as lists are given."""

    def make(items: dict[str, list[Item]], *shards: list[dict[str, Any]]) -> Path:
        out = tmp_path / "out"
        for name in ("generations", "inputs", "staging"):
            (out / name).mkdir(parents=True, exist_ok=True)
        for name, listed in items.items():
            commit_items(out, f"{name}-0123abcd.jsonl", listed)
        for rows in shards:
            commit_rows(out, rows)
        return out

    return make
