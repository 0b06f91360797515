"""The word problems: right arithmetic, a strict score, and nothing held out in training."""

from __future__ import annotations

import re

import pytest

from dlmgrid.workers.benchmarks import words
from dlmgrid.workers.benchmarks.generated import Example
from dlmgrid.workers.benchmarks.word_problem_forms import FORMS
from dlmgrid.workers.items import Item

_SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def _value(left: int, operator: str, right: int) -> float:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[operator]


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return words.held_out_items(500)


def test_every_worked_step_is_right_and_leads_to_the_answer() -> None:
    for example in words.train_examples(7, 4000):
        steps = _SUM.findall(example.answer)
        assert 1 <= len(steps) <= 3
        for left, operator, right, value in steps:
            assert _value(int(left), operator, int(right)) == int(value), example
        assert example.answer.split("\n")[-1] == f"#### {steps[-1][3]}"


def test_the_numbers_of_the_first_step_are_in_the_question() -> None:
    for example in words.train_examples(8, 2000):
        left, _, right, _ = _SUM.findall(example.answer)[0]
        assert {left, right} <= set(re.findall(r"\d+", example.prompt)), example


def test_every_form_occurs_among_the_items(items: list[Item]) -> None:
    assert len({item.document["form"] for item in items}) == len(FORMS) >= 8


def test_the_gold_solution_scores_and_a_wrong_number_does_not(items: list[Item]) -> None:
    for item in items:
        answer = item.document["answer"]
        assert words.score(item.document["solution"], item.document) == (1, str(answer))
        wrong = item.document["solution"].replace(f"#### {answer}", f"#### {answer + 1}")
        assert words.score(wrong, item.document) == (0, str(answer + 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 12", (1, "12")),
        ("#### 7\nno:\n#### 12", (1, "12")),
        ("#### 12\nno:\n#### 7", (0, "7")),
        ("The answer is 12.", (0, "")),
        ("so #### 12", (0, "")),
        ("#### 12 pens", (0, "")),
        ("#### -12", (0, "-12")),
        ("", (0, "")),
    ],
)
def test_only_the_last_answer_line_counts(text: str, expected: tuple[int, str]) -> None:
    assert words.score(text, {"answer": 12}) == expected


def test_thousands_separators_are_read() -> None:
    assert words.score("#### 1,200", {"answer": 1200}) == (1, "1200")


@pytest.fixture(scope="module")
def training() -> list[Example]:
    return words.train_examples(1_000_003, 20_000)


def test_no_held_out_prompt_is_trained_on(items: list[Item], training: list[Example]) -> None:
    prompts = {_prompt(item) for item in items}
    assert len(prompts) == len(items)
    assert not prompts & {example.prompt for example in training}


def test_held_out_numbers_are_not_trained_on_in_the_same_form_under_any_wording(
    training: list[Example],
) -> None:
    """Only the form ``groups`` has a single product, and few enough numbers that training covers the rest."""
    trained = {
        _numbers(example.prompt)
        for example in training
        if [operator for _, operator, _, _ in _SUM.findall(example.answer)] == ["*"]
    }
    all_items = words.held_out_items(10**20)
    assert len(all_items) == words.MAX_ITEMS
    held_out = {_numbers(_prompt(item)) for item in all_items if item.document["form"] == "groups"}
    pairs = {(n, m) for n in map(str, range(2, 13)) for m in map(str, range(3, 26))}
    assert len(held_out & pairs) >= 15
    assert not held_out & pairs & trained
    assert len(pairs - held_out - trained) < len(pairs) / 10


def _prompt(item: Item) -> str:
    assert item.messages is not None
    return item.messages[0]["content"]


def _numbers(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", text))


def test_examples_and_items_depend_on_the_seed_and_count_only() -> None:
    assert words.train_examples(5, 50) == words.train_examples(5, 80)[:50]
    assert words.train_examples(5, 50) != words.train_examples(6, 50)
    assert words.held_out_items(20) == words.held_out_items(60)[:20]
