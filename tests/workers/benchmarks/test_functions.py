"""The function problems: gold answers pass, wrong ones fail, every shape of answer is understood."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dlmgrid.workers.benchmarks import functions
from dlmgrid.workers.benchmarks.function_families import FAMILIES
from dlmgrid.workers.items import Item


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return functions.held_out_items(functions.MAX_ITEMS)


def _passes(text: str, document: dict[str, Any]) -> bool:
    # Only answers written in this file or by the generator are executed here.
    try:
        exec(functions.program(text, document), {})  # noqa: S102
    except (AssertionError, AttributeError, SyntaxError, NameError, TypeError):
        return False
    return True


DOCUMENT: dict[str, Any] = {
    "entry_point": "double",
    "prompt": 'def double(x):\n    """Return x twice."""\n',
    "tests": "assert double(4) == 8\nassert double(0) == 0\n",
}


def test_many_families_occur_and_every_gold_answer_passes(items: list[Item]) -> None:
    assert len(items) >= 200
    assert len({item.document["family"] for item in items}) >= 30
    for item in items:
        assert _passes(item.document["canonical_solution"], item.document), item


def test_every_body_of_every_family_passes_its_tests() -> None:
    rng = random.Random(3)
    seen: set[tuple[str, str]] = set()
    wanted = {(family.name, body) for family in FAMILIES for body in family.bodies}
    for family in FAMILIES:
        for body in family.bodies:
            one = functions._draw(rng, (replace(family, bodies=(body,)),))
            document = {
                "entry_point": one.entry_point,
                "prompt": one.prompt,
                "tests": functions._tests(one, rng),
            }
            assert _passes(functions._answer(one, rng), document), (family.name, body)
            seen.add((family.name, body))
    assert seen == wanted


def test_the_tests_of_an_item_reject_a_function_that_returns_nothing(items: list[Item]) -> None:
    for item in items:
        signature = item.document["prompt"].split("\n")[0]
        assert not _passes(f"```python\n{signature}\n    return None\n```", item.document), item


def test_the_tests_of_an_item_reject_the_answers_of_other_families(items: list[Item]) -> None:
    rejected = total = 0
    for item, other in pairwise(items):
        if item.document["family"] == other.document["family"]:
            continue
        total += 1
        text = other.document["canonical_solution"].replace(
            f"def {other.document['entry_point']}(", f"def {item.document['entry_point']}("
        )
        rejected += not _passes(text, item.document)
    assert rejected > 0.95 * total


@pytest.mark.parametrize(
    "text",
    [
        "```python\ndef double(x):\n    return 2 * x\n```",
        "Sure.\n```python\ndef double(x):\n    return 2 * x\n```\nThat is all.",
        "```\ndef double(x):\n    return 2 * x\n",
        "Here:\n\ndef double(x):\n    return 2 * x\n\nIt returns twice x.",
        "    return 2 * x\n",
        "return 2 * x",
        "```python\n    return 2 * x\n```",
        "```python\nprint('no')\n```\n```python\ndef double(x):\n    return 2 * x\n```",
        "    def double(x):\n        return 2 * x\n",
        "    # twice\n    y = x + x\n    return y\nThat was it.",
    ],
    ids=[
        "fence", "prose around a fence", "cut off fence", "bare definition", "completion", "flat completion",
        "completion in a fence", "second fence", "indented definition", "completion then prose",
    ],
)  # fmt: skip
def test_every_shape_of_a_right_answer_passes(text: str) -> None:
    assert _passes(text, DOCUMENT)


@pytest.mark.parametrize(
    "text",
    ["", "```python\ndef double(x):\n    return x\n```", "I do not know.", "```python\ndef double(x:\n```"],
    ids=["empty", "wrong", "prose", "does not parse"],
)
def test_a_wrong_answer_fails(text: str) -> None:
    assert not _passes(text, DOCUMENT)


def test_no_held_out_prompt_is_trained_on(items: list[Item]) -> None:
    prompts = {item.messages[0]["content"] for item in items if item.messages}
    assert len(prompts) == len(items)
    assert not prompts & {example.prompt for example in functions.train_examples(1_000_003, 20_000)}


def test_examples_and_items_depend_on_the_seed_and_count_only() -> None:
    assert functions.train_examples(5, 50) == functions.train_examples(5, 80)[:50]
    assert functions.train_examples(5, 50) != functions.train_examples(6, 50)
    assert functions.held_out_items(20) == functions.held_out_items(60)[:20]
    assert len(functions.held_out_items(10_000)) == functions.MAX_ITEMS
