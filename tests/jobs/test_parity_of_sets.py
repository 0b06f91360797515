"""The other sets that lm-eval and EvalPlus score, on the items kept with the tests: our values are the tools' own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.report import load_scores
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.testing.answered_run import store_answers

pytest.importorskip("evalplus")
pytest.importorskip("lm_eval")
pytest.importorskip("math_verify")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the imports of lm-eval warn of is not ours
    from dlmgrid.jobs import parity

DATA = Path(__file__).resolve().parents[1] / "golden/data"

ODD_TEXTS = [
    "", "\\boxed{", "\\boxed{}", "I get $\\frac{1}{2}$.", "The answer is 7.", "\\boxed{7} or \\boxed{8}",
    "Final Answer: The final answer is $12$. I hope it is correct.", "5\\%", "{}[]<>*" * 200, "```\n{}\n```",
]  # fmt: skip


def gold(document: dict[str, Any]) -> str:
    """The gold answer as a model would write it, where the document has one."""
    if "solution" in document:
        return str(document["solution"])
    answer = document.get("answer", document.get("Answer"))
    return "words, more words" if answer is None else f"So it is $\\boxed{{{answer}}}$."


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLMGRID_CACHE", str(tmp_path / "cache"))


def test_math_and_instructions_are_scored_as_by_the_evaluator_of_lm_eval(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("math500", "aime24", "aime25", "ifeval"):
        items = get_benchmark(name).load(DATA, None, 0)
        texts = {item.item_id: [gold(item.document), *ODD_TEXTS] for item in items}
        store_answers(out, DATA, name, texts)
    compared = parity.compare_run(out, workers=1)
    assert compared.differences == ()
    assert compared.num_compared >= 4 * 11
    values: dict[tuple[str, str], list[float]] = {}
    for row in load_scores(out).to_pylist():
        values.setdefault((row["benchmark"], row["metric"]), []).append(row["value"])
    assert None not in [value for found in values.values() for value in found]
    for metric in (("math500", "math_verify,none"), ("aime24", "exact_match,none")):
        assert 0 < sum(values[metric]) < len(values[metric])


def test_mbpp_plus_is_scored_as_by_the_command_line_of_evalplus(tmp_path: Path) -> None:
    out = tmp_path / "out"
    texts: dict[str, list[str]] = {}
    for item in get_benchmark("mbpp_plus").load(DATA, None, 0):
        document = item.document
        right = str(document["canonical_solution"])
        texts[item.item_id] = [
            f"{right}\n```\nDone.",
            f"def {document['entry_point']}(*values):\n    return None\n```",
            "no code",
        ]
    store_answers(out, DATA, "mbpp_plus", texts)
    compared = parity.compare_run(out, confirm_run_unsafe_code=True, workers=1)
    assert compared.differences == ()
    assert compared.num_compared == 6 * len(texts)
    plus = [row for row in load_scores(out).to_pylist() if row["metric"] == "pass@1,plus"]
    assert {row["value"] for row in plus if row["repeat"] == 0} == {1.0}
    assert {row["value"] for row in plus if row["repeat"] > 0} == {0.0}
