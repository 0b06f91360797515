"""Answer files of three shapes are read as the same answers, and whatever is odd about one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.exchange.answer_files import read_answers
from dlmgrid.workers.items import Item
from dlmgrid.workers.units import Key

ITEMS = [
    Item(item_id=f"Set/{number}", prompt="?", document={"prompt": f"def f{number}():\n", "answer": number})
    for number in range(3)
]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_plain_lines(path: Path) -> None:
    write(path, {"item_id": "Set/1", "text": "b", "note": 1}, {"item_id": "Set/0", "text": "a\u2028\n"})
    path.write_text(path.read_text() + "\n  \n")
    found = read_answers(path, ITEMS)
    assert found.shape == "plain"
    assert found.texts == {Key("Set/1", 0): "b", Key("Set/0", 0): "a\u2028\n"}
    assert found.missing == ("Set/2",)


def test_plain_lines_with_repeats(path: Path) -> None:
    write(
        path, {"item_id": "Set/1", "text": "b", "repeat": 1}, {"item_id": "Set/1", "text": "a", "repeat": 0}
    )
    assert read_answers(path, ITEMS, 2).texts == {Key("Set/1", 1): "b", Key("Set/1", 0): "a"}


def test_solutions_and_completions_of_evalplus(path: Path) -> None:
    write(path, {"task_id": "Set/0", "solution": "x = 1"}, {"task_id": "Set/2", "completion": "    pass"})
    found = read_answers(path, ITEMS)
    assert found.shape == "evalplus"
    assert found.texts == {Key("Set/0", 0): "x = 1", Key("Set/2", 0): "def f2():\n    pass"}


def test_samples_of_lm_eval_are_one_answer_whatever_the_number_of_filters(path: Path) -> None:
    rows = [
        {"doc_id": number, "doc": {"answer": number, "more": 1}, "resps": [["a", "b"]], "filter": name}
        for name in ("strict", "flexible")
        for number in (0, 2)
    ]
    found = read_answers(write(path, *rows), ITEMS, 2)
    assert found.shape == "lm-eval"
    assert found.texts == {
        Key("Set/0", 0): "a", Key("Set/0", 1): "b", Key("Set/2", 0): "a", Key("Set/2", 1): "b",
    }  # fmt: skip
    assert found.missing == ("Set/1",)


SAMPLE = {"doc_id": 0, "doc": {"answer": 0}, "resps": [["a"]], "filter": "x"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no answers in it"),
        ([[1]], ":1: a list, not an object"),
        ([{"id": "Set/0", "text": "a"}], ":1: keys id, text are of no known shape"),
        ([{"item_id": "Set/9", "text": "a"}], r":1: no item 'Set/9' in this benchmark; .* 'Set/0'"),
        ([{"item_id": 0, "text": "a"}], ":1: no item 0"),
        ([{"item_id": "Set/0", "text": None}], ":1: the answer is a NoneType"),
        ([{"item_id": "Set/0", "text": "\ud800"}], ":1: the answer is not valid Unicode"),
        ([{"item_id": "Set/0", "text": "a"}] * 2, ":2: Set/0 has more than 1 answers; .*--repeats 2"),
        ([{"item_id": "Set/0", "text": "a", "repeat": 0}] * 2, ":2: Set/0 repeat 0 is given twice"),
        ([{"item_id": "Set/0", "text": "a", "repeat": -1}], ":1: repeat is -1"),
        ([{"item_id": "Set/0", "text": "a", "repeat": True}], ":1: repeat is True"),
        ([{"item_id": "Set/0", "text": "a"}, {"task_id": "Set/1", "solution": "b"}], ":2: no item None"),
        ([{"task_id": "Set/0", "solution": ["a"]}], ":1: the answer is a list"),
        ([{**SAMPLE, "doc_id": 3}], ":1: no item has doc_id 3; the benchmark has 0 to 2"),
        ([{**SAMPLE, "doc_id": 1}], ":1: doc 1 is another document than Set/1"),
        ([{**SAMPLE, "doc": {"other": 0}}], ":1: doc 0 is another document"),
        ([{**SAMPLE, "resps": [[["-1.5", "False"]], [["-2", "False"]]]}], ":1: resps is not a list"),
        ([SAMPLE, SAMPLE], ":2: Set/0 is given twice for the filter 'x'"),
        ([SAMPLE, {**SAMPLE, "filter": "y", "resps": [["b"]]}], ":2: the answers to Set/0 differ"),
        ([{**SAMPLE, "resps": [["a", "b"]]}], ":1: Set/0 has more than 1 answers"),
    ],
)
def test_what_is_odd_is_named_with_its_line(path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_answers(write(path, *rows), ITEMS)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"item_id": "Set/0", "text": "a"'])
def test_a_file_that_is_no_json_lines_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"answers\.jsonl"):
        read_answers(path, ITEMS)


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_answers(path, ITEMS)
