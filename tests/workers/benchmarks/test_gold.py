"""Gold answers through the whole scoring pipeline score 1 and spoiled ones 0: some in every test run, all of
them with ``make gold``.
"""

from __future__ import annotations

import os
import runpy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks import lm_eval_task
from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.benchmarks.scoring import score_run
from dlmgrid.workers.items import Item
from dlmgrid.workers.tables import SCORES, read_table

pytest.importorskip("lm_eval")
pytest.importorskip("evalplus")

# Read before the tests' own settings clear it.
DATA_FOLDER = os.environ.get("DLMGRID_DATA")
GOLDEN_DATA = Path(__file__).resolve().parents[2] / "golden" / "data"
# What tells right from wrong in each set: (scorer, metric).
HEADLINE = {
    "gsm8k": ("lm-eval", "exact_match,strict-match"),
    "math500": ("lm-eval", "math_verify,none"),
    "aime24": ("lm-eval", "exact_match,none"),
    "aime25": ("lm-eval", "exact_match,none"),
    "ifeval": ("lm-eval", "prompt_level_strict_acc,none"),
    "humaneval": ("evalplus-repaired", "pass@1,base"),
    "humaneval_plus": ("evalplus-repaired", "pass@1,plus"),
    "mbpp": ("evalplus", "pass@1,base"),
    "mbpp_plus": ("evalplus", "pass@1,plus"),
}
GENERATION_SETS = ("livecodebench", "swe_bench_lite", "mt_bench", "alpaca")
# Gold answers that do not score, by the fault of the set or the scorer; README and `dlmgrid benchmarks` list them.
EXCEPTIONS: dict[str, set[str]] = {
    "ifeval": {f"ifeval/{key}" for key in (374, 1122, 1129, 1627, 3369, 3371, 3718)},
}
FOLLOW = runpy.run_path(str(Path(__file__).with_name("ifeval_answers.py")))["follow"]
SPOILED = runpy.run_path(str(Path(__file__).with_name("spoiled_answers.py")))
# IFEval has no gold answers: these follow the rows in tests/golden/data, others are made by ifeval_answers.
IFEVAL_ANSWERS = {
    "ifeval/1": "Rain falls from heavy clouds and it makes the fields green and the streets shine.",
    "ifeval/2": "dr. grey works at a hospital in the city. she helps people every day and they like her.",
    "ifeval/3": '"Red and blue."',
}

MakeRun = Callable[..., Path]
Generation = Callable[..., dict[str, Any]]


def gold(name: str, item: Item) -> str:
    """A right answer, as a model could have written it."""
    document = item.document
    if name == "gsm8k":
        return str(document["answer"])
    if name == "math500":
        return str(document["solution"])
    if name in ("aime24", "aime25"):
        return f"So the answer is $\\boxed{{{_aime_answer(document)}}}$."
    if name == "ifeval":
        made = IFEVAL_ANSWERS.get(item.item_id)
        return made or FOLLOW(document, lambda text: _is_followed(text, document))
    if name in ("mbpp", "mbpp_plus"):
        return f"{document['canonical_solution'].strip()}\n```\nIt passes the tests."
    return f"{document['prompt']}{document['canonical_solution']}\n```\nIt passes the tests."


def spoiled(name: str, item: Item, right: str) -> str:
    """``right`` with one thing changed that makes it wrong."""
    document = item.document
    if name == "gsm8k":
        return f"{right}1"
    if name == "math500":
        return str(SPOILED["spoil_box"](right))
    if name in ("aime24", "aime25"):
        return f"So the answer is $\\boxed{{{int(_aime_answer(document)) + 1}}}$."
    if name == "ifeval":
        instruction, settings = document["instruction_id_list"][0], document["kwargs"][0]
        return str(SPOILED["break_instruction"](right, instruction, settings))
    program = right.partition("\n```\n")[0]
    return f"{SPOILED['spoil_program'](program, document['entry_point'])}```\nIt passes the tests."


def _is_followed(text: str, document: dict[str, Any]) -> bool:
    found = lm_eval_task.score(text, document, {"attempt": "first", "benchmark": "ifeval"})
    return bool(found[0]["value"])


def _aime_answer(document: dict[str, Any]) -> str:
    return str(document["Answer"] if "Answer" in document else document["answer"])


def scores(out: Path) -> dict[str, dict[tuple[str, str, str], dict[str, Any]]]:
    """Cell → (scorer, metric, item) → score row."""
    paths = [str(path) for path in (out / "scores").iterdir()]
    found: dict[str, dict[tuple[str, str, str], dict[str, Any]]] = defaultdict(dict)
    for row in read_table(paths, SCORES).to_pylist():
        found[row["cell_key"]][row["scorer"], row["metric"], row["item_id"]] = row
    return found


def check_gold(
    names: list[str], data: Path, limit: int | None, make_run: MakeRun, generation: Generation
) -> None:
    """Score gold and spoiled answers of ``names`` together; compare with what must come out."""
    items = {name: get_benchmark(name).load(data, limit) for name in names}
    rows = []
    for name in names:
        for item in items[name]:
            right = gold(name, item)
            rows.append(generation(name, item.item_id, right, cell_key=f"{name} gold"))
            wrong = spoiled(name, item, right)
            rows.append(generation(name, item.item_id, wrong, cell_key=f"{name} spoiled"))
    out = make_run(items, rows)
    score_run(out, confirm_run_unsafe_code=True, workers=int(os.environ.get("DLMGRID_SCORE_WORKERS", "1")))
    found = scores(out)
    for name in names:
        scorer, metric = HEADLINE[name]
        ids = [item.item_id for item in items[name]]
        right = [found[f"{name} gold"][scorer, metric, item_id] for item_id in ids]
        wrong = [found[f"{name} spoiled"][scorer, metric, item_id] for item_id in ids]
        failing = {row["item_id"]: row["detail"] for row in right if row["value"] != 1.0}
        assert failing.keys() == EXCEPTIONS.get(name, set()) & set(ids), failing
        assert {row["item_id"] for row in wrong if row["value"] != 0.0} == set()
        assert {row["status"] for row in wrong} == {"scored"}


def test_gold_scores_one_and_spoiled_gold_zero(make_run: MakeRun, generation: Generation) -> None:
    check_gold(sorted(HEADLINE), GOLDEN_DATA, 3, make_run, generation)


def test_sets_without_a_scorer_are_stored_as_not_scored_with_the_reason(
    make_run: MakeRun, generation: Generation
) -> None:
    items = {name: get_benchmark(name).load(GOLDEN_DATA, 1) for name in GENERATION_SETS}
    rows = [generation(name, items[name][0].item_id, "Some text.") for name in GENERATION_SETS]
    out = make_run(items, rows)
    summary = score_run(out)
    assert (summary.num_added, summary.num_texts_scored, summary.needs_opt_in) == (4, 0, False)
    (found,) = scores(out).values()
    assert {(row["status"], row["value"]) for row in found.values()} == {("not_scored", None)}
    details = {row["benchmark"]: row["detail"] for row in found.values()}
    assert details["livecodebench"] == "the source has the problems, not their tests"
    assert all(details[name] for name in GENERATION_SETS)
    assert score_run(out).num_added == 0


def test_every_benchmark_is_scored_or_says_that_it_is_not() -> None:
    public = {name for name in benchmark_names() if get_benchmark(name).files} - {"gsm8k_question"}
    public -= {name for name in public if get_benchmark(name).calibration}
    assert public == HEADLINE.keys() | set(GENERATION_SETS)
    for name in GENERATION_SETS:
        assert [scorer.why_not_scored != "" for scorer in get_benchmark(name).scorers] == [True]


@pytest.fixture
def public_data(request: pytest.FixtureRequest) -> Path:
    """The folder of DLMGRID_DATA, or else the data sets that this machine shares."""
    found: Path = Path(DATA_FOLDER) if DATA_FOLDER else request.getfixturevalue("shared_data")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HEADLINE))
def test_gold_of_every_item(
    name: str, make_run: MakeRun, generation: Generation, public_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected outputs of EvalPlus are kept in DLMGRID_GOLD_CACHE, where it is set."""
    kept = os.environ.get("DLMGRID_GOLD_CACHE")
    if kept:
        monkeypatch.setenv("DLMGRID_CACHE", kept)
    check_gold([name], public_data, None, make_run, generation)
