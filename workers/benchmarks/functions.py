"""``functions``: short Python functions that the project writes itself, each with tests that execute.

The prompt is a signature with a docstring; the answer is the whole function in a code fence. A benchmark
item is a prompt that never occurs in training. Running programs is the scorer's business, not this
module's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from string import Template
from typing import Any

from dlmgrid.workers.benchmarks.function_families import FAMILIES, Family
from dlmgrid.workers.benchmarks.generated import Example, is_held_out
from dlmgrid.workers.benchmarks.remarks import remark
from dlmgrid.workers.items import Item

PROMPT_VERSION = "functions-1"
HELD_OUT_SEED = 20_260_002
CALIBRATION_SEED = 20_260_012
MAX_ITEMS = 400
NUM_TESTS = 5

_ELEMENTS = ("x", "v", "item", "element", "entry", "one")
_RESULTS = ("result", "out", "answer", "res", "found", "output")
_LETTERS = "abcdeilmnorstu"
_INSTRUCTION = "Complete this function.\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """One drawn function, before its body is. ``prompt`` ends after the docstring."""

    family: Family
    constant: int
    entry_point: str
    params: tuple[str, ...]
    prompt: str

    @property
    def signature(self) -> str:
        return f"def {self.entry_point}({', '.join(self.params)}):"

    def fill(self, template: str, **values: str) -> str:
        return Template(template).substitute(
            a=self.params[0], b=self.params[-1], k=str(self.constant), f=self.entry_point, **values
        )


def _draw(rng: random.Random, families: tuple[Family, ...] = FAMILIES) -> Function:
    family = rng.choice(families)
    constant = rng.randint(*family.constants) if family.constants else 0
    params = tuple(rng.choice(names) for names in family.params)
    # A name is an identifier around its constant ("add_$k_to_all"), which Template would read as one word.
    entry_point = rng.choice(family.names).replace("$k", str(constant))
    bare = Function(family=family, constant=constant, entry_point=entry_point, params=params, prompt="")
    doc = bare.fill(rng.choice(family.docs))
    return replace(bare, prompt=f'{bare.signature}\n    """{doc}"""\n')


def _answer(function: Function, rng: random.Random) -> str:
    element = rng.choice([name for name in _ELEMENTS if name not in function.params])
    body = function.fill(rng.choice(function.family.bodies), x=element, r=rng.choice(_RESULTS))
    lines = [function.signature, *("    " + line for line in body.split("\n"))]
    if rng.random() < 0.6:
        lines.insert(1, "    # " + remark(rng))
    text = "```python\n" + "\n".join(lines) + "\n```"
    if rng.random() < 0.8:
        lead_in = remark(rng)
        text = f"{lead_in[0].upper()}{lead_in[1:]}.\n{text}"
    return text


def _user_turn(function: Function) -> str:
    return _INSTRUCTION + function.prompt


def train_examples(seed: int, count: int) -> list[Example]:
    """``count`` training examples drawn from ``seed``; none of them is a held-out prompt."""
    rng = random.Random(seed)
    examples: list[Example] = []
    while len(examples) < count:
        function = _draw(rng)
        answer = _answer(function, rng)
        if not is_held_out(function.prompt):
            examples.append(Example(prompt=_user_turn(function), answer=answer))
    return examples


def _argument(kind: str, rng: random.Random) -> Any:
    if kind == "int":
        return rng.randint(0, 40)
    if kind == "small":
        return rng.randint(1, 9)
    if kind == "ints":
        return [rng.randint(0, 40) for _ in range(rng.randint(1, 12))]
    length = rng.randint(1, 9)
    text = "".join(rng.choice(_LETTERS) for _ in range(length))
    if kind == "text":
        return text + text[::-1] if rng.random() < 0.4 else text
    if kind == "words":
        return [
            "".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(1, 6))
        ]
    raise AssertionError(f"unknown kind of argument {kind!r}")


def _tests(function: Function, rng: random.Random) -> str:
    """Python source of assertions whose expected values come from the family's specification."""
    lines = []
    for _ in range(NUM_TESTS):
        arguments = [_argument(kind, rng) for kind in function.family.inputs]
        if function.family.name in ("contains", "count_equal") and rng.random() < 0.5:
            arguments[1] = rng.choice(arguments[0])
        if function.family.name == "is_multiple" and rng.random() < 0.5:
            arguments[0] = function.constant * rng.randint(1, 9)
        expected = function.family.expected(*arguments, function.constant)
        call = f"{function.entry_point}({', '.join(map(repr, arguments))})"
        lines.append(f"assert {call} == {expected!r}")
    return "\n".join(lines) + "\n"


def _functions(seed: int, *, held_out: bool) -> Iterator[tuple[Function, random.Random]]:
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        function = _draw(rng)
        if function.prompt not in seen and is_held_out(function.prompt) == held_out:
            seen.add(function.prompt)
            yield function, rng


def held_out_items(count: int) -> list[Item]:
    """The first ``count`` benchmark items, ``MAX_ITEMS`` at most; a smaller count gives a prefix of a larger.

    ``document`` holds ``entry_point``, ``prompt`` (signature and docstring), ``tests`` (assertions),
    ``canonical_solution`` (a fenced answer) and ``family``.
    """
    return _items(min(count, MAX_ITEMS), seed=HELD_OUT_SEED, held_out=True, prefix="functions")


def calibration_items(count: int) -> list[Item]:
    """The first ``count`` items of the training range, from a seed of their own: none of them is a benchmark item."""
    return _items(min(count, MAX_ITEMS), seed=CALIBRATION_SEED, held_out=False, prefix="functions-train")


def _items(count: int, *, seed: int, held_out: bool, prefix: str) -> list[Item]:
    items: list[Item] = []
    for function, rng in _functions(seed, held_out=held_out):
        if len(items) >= count:
            break
        items.append(
            Item(
                item_id=f"{prefix}-{len(items):04d}",
                messages=[{"role": "user", "content": _user_turn(function)}],
                document={
                    "entry_point": function.entry_point,
                    "prompt": function.prompt,
                    "tests": _tests(function, rng),
                    "canonical_solution": _answer(function, rng),
                    "family": function.family.name,
                },
            )
        )
    return items


_FENCE = re.compile(r"^[ ]*```[A-Za-z0-9_+-]*[ ]*\n(.*?)(?:^[ ]*```|\Z)", re.DOTALL | re.MULTILINE)


def extract(text: str, document: dict[str, Any]) -> str:
    """The function that ``text`` proposes, as source that defines the entry point if at all possible.

    Looks, in this order, for a code fence (closed or cut off) that defines the function, for a bare
    definition in prose, and for a completion of the prompt (a fence without a definition, or indented
    lines).
    """
    entry_point = str(document["entry_point"])
    definition = re.compile(rf"^([ ]*)def[ ]+{re.escape(entry_point)}[ ]*\(", re.MULTILINE)
    fences = _FENCE.findall(text)
    for fence in fences:
        if definition.search(fence):
            return _dedented(fence)
    if found := definition.search(text):
        return _block(text[found.start() :])
    completion = fences[0] if fences else text
    lines = completion.strip("\n").split("\n")
    if not lines[0].startswith(" "):
        lines = ["    " + line for line in lines]
    kept: list[str] = []
    for line in lines:
        if line.strip() and not line.startswith(" "):
            break
        kept.append(line)
    return str(document["prompt"]) + "\n".join(kept) + "\n"


def _dedented(code: str) -> str:
    lines = code.rstrip().split("\n")
    margin = min((len(line) - len(line.lstrip(" ")) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines) + "\n"


def _block(text: str) -> str:
    """The definition that ``text`` starts with, up to the first line that belongs to prose again."""
    lines = text.split("\n")
    margin = len(lines[0]) - len(lines[0].lstrip(" "))
    kept = [lines[0]]
    for line in lines[1:]:
        if line.strip() and len(line) - len(line.lstrip(" ")) <= margin:
            break
        kept.append(line)
    return _dedented("\n".join(kept))


def program(text: str, document: dict[str, Any]) -> str:
    """The complete program to execute: the proposed function, then the tests. It exits with 0 if all of
    them hold.

    The text may be anything, so the program may well not parse; that is a failed item, not an error here.
    """
    return f"{extract(text, document)}\n\n{document['tests']}"
