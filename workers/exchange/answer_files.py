"""Answers made elsewhere, read from JSON lines of one of three shapes, told apart by their keys.

    plain      {"item_id": "gsm8k/0", "text": "…"}, also with "repeat"
    EvalPlus   {"task_id": "HumanEval/0", "solution": "…"} or {…, "completion": "…"}
    lm-eval    a row of samples_<task>_….jsonl: {"doc_id": 0, "doc": {…}, "resps": [["…"]], "filter": "…", …}

Everything that is odd about a line is an error that names the file and the line: a wrong answer file must not
become a score.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item
from dlmgrid.workers.units import Key

SHAPES = "item_id and text; or task_id and solution or completion (EvalPlus); or doc_id and resps (lm-eval)"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFile:
    """The texts of a file by key, in the order of the file, its shape, and the items it has no answer for."""

    shape: str
    texts: dict[Key, str]
    missing: tuple[str, ...]


def read_answers(path: Path, items: Sequence[Item], num_repeats: int = 1) -> AnswerFile:
    """Read the answers to ``items``, at most ``num_repeats`` for each.

    Raises InputError for a file that cannot be read or is of no known shape, an unknown item, a document of
    lm-eval that is not the item's, more answers than ``num_repeats``, and a text that is no text.
    """
    shape, reader = "", None
    texts: dict[Key, str] = {}
    num_seen: dict[str, int] = {}
    by_id = {item.item_id: item for item in items}
    filters: dict[str, dict[str, Sequence[str]]] = {}
    for place, row in _lines(path):
        if reader is None:
            shape = _shape(place, row)
            reader = {"plain": _plain, "evalplus": _evalplus, "lm-eval": _lm_eval}[shape]
        item_id, found, repeat = reader(place, row, items, by_id)
        if shape == "lm-eval":
            seen = filters.setdefault(item_id, {})
            name = str(row.get("filter"))
            if name in seen:
                raise InputError(f"{place}: {item_id} is given twice for the filter {name!r}; remove one")
            if seen and found not in seen.values():
                raise InputError(f"{place}: the answers to {item_id} differ between filters; export it again")
            seen[name] = found
            if len(seen) > 1:  # the same answers under another filter
                continue
        for text in found:
            key = Key(item_id, num_seen.get(item_id, 0) if repeat is None else repeat)
            num_seen[item_id] = num_seen.get(item_id, 0) + 1
            if key in texts:
                raise InputError(f"{place}: {item_id} repeat {key.repeat} is given twice; remove one")
            if key.repeat >= num_repeats:
                raise InputError(
                    f"{place}: {item_id} has more than {num_repeats} answers; remove the duplicate, or pass "
                    f"--repeats {key.repeat + 1} if several are meant"
                )
            texts[key] = _text(place, text)
    if not texts:
        raise InputError(f"{path}: no answers in it; give a file with one JSON object a line")
    answered = {key.item_id for key in texts}
    return AnswerFile(
        shape=shape,
        texts=texts,
        missing=tuple(item.item_id for item in items if item.item_id not in answered),
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON-lines file, each with its place; blank lines are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a JSON-lines file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: not JSON ({error}); give one object a line") from error
        if not isinstance(row, dict):
            raise InputError(f"{place}: a {type(row).__name__}, not an object; each line has {SHAPES}")
        yield place, row


def _shape(place: str, row: Mapping[str, Any]) -> str:
    if "item_id" in row and "text" in row:
        return "plain"
    if "task_id" in row and ("solution" in row or "completion" in row):
        return "evalplus"
    if "doc_id" in row and "resps" in row:
        return "lm-eval"
    raise InputError(
        f"{place}: keys {', '.join(map(str, row))} are of no known shape; each line has {SHAPES}"
    )


_Found = tuple[str, Sequence[str], int | None]
_Items = Sequence[Item]


def _plain(place: str, row: Mapping[str, Any], items: _Items, by_id: Mapping[str, Item]) -> _Found:
    item = _known(place, row.get("item_id"), by_id)
    repeat = row.get("repeat")
    if repeat is not None and (type(repeat) is not int or repeat < 0):
        raise InputError(f"{place}: repeat is {repeat!r}; give a number from 0")
    return item.item_id, (row.get("text"),), repeat  # type: ignore[return-value]  # checked by _text


def _evalplus(place: str, row: Mapping[str, Any], items: _Items, by_id: Mapping[str, Item]) -> _Found:
    item = _known(place, row.get("task_id"), by_id)
    if "solution" in row:
        return item.item_id, (row["solution"],), None
    if "prompt" not in item.document:
        raise InputError(
            f"{place}: a completion, but {item.item_id} has no prompt to complete; give solution"
        )
    return item.item_id, (item.document["prompt"] + _text(place, row.get("completion")),), None


def _lm_eval(place: str, row: Mapping[str, Any], items: _Items, by_id: Mapping[str, Item]) -> _Found:
    number, document, answers = row.get("doc_id"), row.get("doc"), row.get("resps")
    if type(number) is not int or not 0 <= number < len(items):
        raise InputError(f"{place}: no item has doc_id {number!r}; the benchmark has 0 to {len(items) - 1}")
    item = items[number]
    shared = document.keys() & item.document.keys() if isinstance(document, dict) else set()
    if not shared or any(
        _without_nulls(document[name]) != _without_nulls(item.document[name])  # type: ignore[index]
        for name in shared
    ):
        raise InputError(
            f"{place}: doc {number} is another document than {item.item_id}; name the benchmark and data that "
            "the answers belong to"
        )
    if not (isinstance(answers, list) and len(answers) == 1 and isinstance(answers[0], list) and answers[0]):
        raise InputError(
            f"{place}: resps is not a list that holds one list of texts; was this a generation task?"
        )
    return item.item_id, answers[0], None


def _without_nulls(value: Any) -> Any:
    """``value`` without the empty fields that a table of documents fills in for each other's columns."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _known(place: str, item_id: Any, by_id: Mapping[str, Item]) -> Item:
    if not isinstance(item_id, str) or item_id not in by_id:
        first = next(iter(by_id))
        raise InputError(f"{place}: no item {item_id!r} in this benchmark; its ids look like {first!r}")
    return by_id[item_id]


def _text(place: str, text: Any) -> str:
    if not isinstance(text, str):
        raise InputError(f"{place}: the answer is a {type(text).__name__}, not a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: the answer is not valid Unicode ({error.reason})") from error
    return text
