"""Small sets in the layout of the public ones, and output folders that hold given answers to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.cell import Cell, digest
from dlmgrid.workers.rows import Provenance, blank_row
from dlmgrid.workers.testing.stored_rows import commit_items, commit_rows
from dlmgrid.workers.units import Key

NUM_QUESTIONS = 30

GSM8K_DOCUMENTS = [
    {
        "question": f"A crate holds {count} jars of {price} dollars each. What is the crate worth?",
        "answer": f"It is worth {count}*{price}=<<{count}*{price}={count * price}>>{count * price} dollars.\n"
        f"#### {count * price:,}",
    }
    for count, price in zip(range(40, 40 + NUM_QUESTIONS), range(7, 7 + NUM_QUESTIONS), strict=True)
]

HUMANEVAL_DOCUMENTS: list[dict[str, Any]] = [
    {
        "task_id": "HumanEval/700",
        "prompt": "import math\n\n\ndef distance(x: float, y: float) -> float:\n"
        '    """ Distance of (x, y) from the origin.\n    >>> distance(3.0, 4.0)\n    5.0\n    """\n',
        "entry_point": "distance",
        "canonical_solution": "    return math.hypot(x, y)\n",
        "base_input": [[3.0, 4.0], [0.0, 0.0]],
        "plus_input": [[-3.0, 4.0], [1e-3, 1e3]],
        "atol": 1e-6,
        "contract": "",
    },
    {
        "task_id": "HumanEval/701",
        "prompt": 'def widest(words: list) -> str:\n    """ The longest word, the first of equals; "" if none. """\n',
        "entry_point": "widest",
        "canonical_solution": '    return max(words, key=len, default="")\n',
        "base_input": [[["a", "bb", "cc"]], [["xyz"]]],
        "plus_input": [[[]], [["", ""]]],
        "atol": 0,
        "contract": "",
    },
]


def write_data(folder: Path) -> Path:
    """A data folder in the documented layout, with a manifest that declares how many rows it has."""
    files = {
        "gsm8k/test.jsonl": GSM8K_DOCUMENTS,
        "evalplus/HumanEvalPlus-v0.1.10.jsonl": HUMANEVAL_DOCUMENTS,
    }
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    declared = {name: {"rows": len(rows)} for name, rows in files.items()}
    (folder / "manifest.json").write_text(json.dumps(declared), encoding="utf-8")
    return folder


def store_answers(
    out: Path,
    data: Path,
    benchmark: str,
    texts: Mapping[str, Sequence[str | None]],
    **settings: Any,
) -> Cell:
    """Store ``texts`` (by item, one a repeat; None is a failed row) as a cell with ``settings``; returns it."""
    known = get_benchmark(benchmark)
    values: dict[str, Any] = {
        "model": "someone/model", "method": "ssd", "budget": 8, "temperature": 0.0, "block_length": 32,
        "gen_length": 64,
    }  # fmt: skip
    cell = Cell(benchmark=benchmark, prompt_version=known.prompt_version(0), **(values | settings))
    for name in ("generations", "inputs", "staging"):
        (out / name).mkdir(parents=True, exist_ok=True)
    form = digest([benchmark, cell.prompt_version, 0])[:12]
    commit_items(out, f"{benchmark}-{form}.jsonl", known.load(data, None, 0))
    provenance = Provenance(
        run_id="testing", actor="", attempt=1, device="cpu", runtime_fingerprint="testing"
    )
    rows = [
        {
            **blank_row(cell, Key(item_id, repeat), provenance),
            "text": text,
            "error": "it broke" if text is None else None,
        }
        for item_id, repeats in texts.items()
        for repeat, text in enumerate(repeats)
    ]
    commit_rows(out, rows)
    return cell
