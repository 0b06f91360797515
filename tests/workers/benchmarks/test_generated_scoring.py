"""``words`` and ``functions`` from item to score: gold 1, perturbed gold 0, hostile answers bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.scoring import score_run
from dlmgrid.workers.tables import SCORES, read_table

NUM_ITEMS = 12
MakeRun = Callable[..., Path]
Generation = Callable[..., dict[str, Any]]


def scored(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Score rows by (cell, item)."""
    score_run(out, confirm_run_unsafe_code=True)
    rows = read_table(sorted(str(path) for path in (out / "scores").iterdir()), SCORES).to_pylist()
    return {(row["cell_key"], row["item_id"]): row for row in rows}


def test_words(make_run: MakeRun, generation: Generation) -> None:
    items = get_benchmark("words").load(None, NUM_ITEMS)
    assert len({item.item_id for item in items}) == NUM_ITEMS
    rows = []
    for item in items:
        answer = item.document["answer"]
        texts = {
            "gold": f"Some steps.\n#### {answer}",
            "wrong": f"Some steps.\n#### {answer + 1}",
            "no mark": f"It is {answer}.",
            "endless number": "#### " + "7" * 100_000,
        }
        rows += [generation("words", item.item_id, text, cell_key=cell) for cell, text in texts.items()]
    found = scored(make_run({"words": items}, rows))
    assert {(cell, row["value"], row["status"]) for (cell, _), row in found.items()} == {
        ("gold", 1.0, "scored"),
        ("wrong", 0.0, "scored"),
        ("no mark", 0.0, "scored"),
        ("endless number", 0.0, "scored"),
    }
    assert {row["metric"] for row in found.values()} == {"exact_match"}


def test_functions(make_run: MakeRun, generation: Generation) -> None:
    items = get_benchmark("functions").load(None, NUM_ITEMS)
    rows = []
    for item in items:
        gold = item.document["canonical_solution"]
        texts = {
            "gold": gold,
            "prose": f"Certainly! Here it is:\n\n{gold}\n\nHope this helps.",
            "wrong": gold.replace("return ", "return None and "),
            "nothing": "",
        }
        rows += [generation("functions", item.item_id, text, cell_key=cell) for cell, text in texts.items()]
    found = scored(make_run({"functions": items}, rows))
    assert {(cell, row["value"], row["status"]) for (cell, _), row in found.items()} == {
        ("gold", 1.0, "scored"),
        ("prose", 1.0, "scored"),
        ("wrong", 0.0, "scored"),
        ("nothing", 0.0, "scored"),
    }
    assert {row["metric"] for row in found.values()} == {"pass@1"}


@pytest.mark.parametrize("name", ["words", "functions"])
def test_items_are_stable_and_a_smaller_limit_is_a_prefix(name: str) -> None:
    benchmark = get_benchmark(name)
    assert benchmark.load(None, 5) == benchmark.load(None, 9)[:5]
    assert benchmark.prompt_version(0).startswith(name)
