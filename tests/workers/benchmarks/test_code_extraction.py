"""From an answer to a program: code comes in fences, in prose, as a bare body, without its imports."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from dlmgrid.workers.benchmarks.code_extraction import extract_program

pytest.importorskip("evalplus")

PROMPT = '''import math
from typing import List


def halve(x):
    """ Half of x. """
    return x / 2


def total(values: List[float], start: float = 0) -> float:
    """ Sum of the halves of values, from start. """
'''
BODY = """    result = start
    for value in values:
        result += halve(value)
    return result
"""
FUNCTION = f"def total(values: List[float], start: float = 0) -> float:\n{BODY}"
HELPED = (
    "from functools import reduce\n\n\ndef add(a, b):\n    return a + halve(b)\n\n\n"
    "def total(values: List[float], start: float = 0) -> float:\n    return reduce(add, values, start)\n"
)

ANSWERS = {
    "whole prompt again": PROMPT + BODY,
    "closed fence": PROMPT + BODY + "```\n\nThis adds up the halves.",
    "function without the prompt's imports and helper": FUNCTION,
    "indented body": BODY,
    "newline and indented body": "\n" + BODY,
    "body that lost its first indent": BODY.lstrip(),
    "body without any indent": textwrap.dedent(BODY),
    "body and closed fence": BODY + "```\nDone.",
    "tabs": BODY.replace("    ", "\t"),
    "windows line ends": FUNCTION.replace("\n", "\r\n"),
    "own fence": f"```python\n{FUNCTION}```\n",
    "fence without language": f"```\n{FUNCTION}```\n",
    "prose then fence": f"```\n\nHere is the function:\n\n```python\n{FUNCTION}```\nIt runs in O(n).",
    "prose on the fence's line": f"Sure! ```python\n{FUNCTION}```",
    "prose without fence": f"Here is the solution.\n\n{FUNCTION}\nThat's all, folks: it's O(n).",
    "unclosed fence": f"Of course:\n```python\n{FUNCTION}",
    "imports and helpers": f"```python\n{HELPED}```",
    "indented in a list": "1. Code:\n\n   ```python\n"
    + "".join(f"   {x}\n" for x in FUNCTION.splitlines())
    + "   ```",
    "example call after it": f"{FUNCTION}\nprint(total([1, 2]))\nassert total([2]) == 1\n",
    "main block after it": f'{FUNCTION}\nif __name__ == "__main__":\n    print(total([1]))\n',
    "run-on cut in the middle": f"{FUNCTION}\ndef other(values):\n    return [value for",
    "end of text strings": f"{FUNCTION}<|endoftext|>def total(values):\n    return 0\n",
    "future import": f"from __future__ import annotations\n\n{FUNCTION}",
    "second fence has tests": f"{FUNCTION}```\nTests:\n```python\ndef test():\n    return total([])\n```",
}


def names_of(program: str) -> dict[str, Any]:
    """What a program defines. The programs here are written above, not by a model."""
    names: dict[str, Any] = {}
    exec(compile(program, "answer", "exec"), names)  # noqa: S102  running it is the point of the test
    return names


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
def test_right_answer_in_any_wrapping(text: str) -> None:
    program = extract_program(text, PROMPT, "total").program
    names = names_of(program)
    assert names["total"]([2, 4], 1) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "I cannot do that.",
        "```python\n```",
        "def total(values, start):\n    '''Sum.'''\n",
        "\x00",
        "def total(" * 500,
    ],
    ids=["empty", "blank", "prose", "empty fence", "docstring only", "null byte", "unclosed"],
)
def test_no_answer_gives_no_working_function(text: str) -> None:
    program = extract_program(text, PROMPT, "total").program
    try:
        names = names_of(program)
        assert names["total"]([2, 4], 1) != 4
    except (SyntaxError, ValueError, KeyError, NameError):
        return


def test_tells_how_the_program_was_found() -> None:
    assert extract_program(FUNCTION, PROMPT, "total").found == "function"
    assert extract_program(BODY, PROMPT, "total").found == "body"
    assert extract_program("x = 1", PROMPT, "total").found == "longest"


def test_wrong_code_stays_wrong() -> None:
    program = extract_program(FUNCTION.replace("+=", "-="), PROMPT, "total").program
    names = names_of(program)
    assert names["total"]([2, 4], 1) == -2


DROPPED_BY_SANITIZE = {
    "generator": "def halves(values):\n    for value in values:\n        yield value / 2\n",
    "decorated": "import functools\n\n@functools.cache\ndef half(x):\n    return x / 2\n\n"
    "def halves(values):\n    return [half(x) for x in values]\n",
    "procedure": "def put(x, into):\n    into.append(x / 2)\n\n"
    "def halves(values):\n    found = []\n    for x in values:\n        put(x, found)\n    return found\n",
    "several names": "ONE, TWO = 1, 2\nHALF: float = ONE / TWO\n\n"
    "def halves(values):\n    return [x * HALF for x in values]\n",
    "after its use": "def halves(values):\n    yield from split(values)\n\n"
    "def split(values):\n    for x in values:\n        yield x / 2\n",
}


@pytest.mark.parametrize("case", DROPPED_BY_SANITIZE)
def test_definitions_that_sanitize_drops_are_kept_where_they_are_used(case: str) -> None:
    answer = (
        f"Here:\n```python\n{DROPPED_BY_SANITIZE[case]}\ndef unused():\n    yield 1\n\n\n"
        "def total(values, start=0):\n    return start + sum(halves(values))\n\nprint(total([1]))\n```\nDone."
    )
    program = extract_program(answer, PROMPT, "total").program
    names = names_of(program)
    assert names["total"]([2, 4], 1) == 4.0
    assert "unused" not in program
    assert "print" not in program


def test_decorated_function_that_is_asked_for_is_found() -> None:
    answer = (
        "from functools import cache\n@cache\ndef total(n):\n    return n and n + total(n - 1)\n```\nDone."
    )
    names = names_of(extract_program(answer, PROMPT, "total").program)
    assert names["total"](4) == 10


def test_invalid_escapes_change_nothing_where_warnings_are_errors() -> None:
    answer = "def total(values, start=0):\n    return helper(values)\n\ndef helper(v):\n    yield '\\W'\n"
    assert "helper(v)" in extract_program(answer, PROMPT, "total").program
