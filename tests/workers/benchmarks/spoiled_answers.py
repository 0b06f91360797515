"""Gold answers with one thing changed, so that they are wrong and otherwise as they were.

Code gives another value of the same kind from the very same computation; mathematics has another number in
its last box; an answer to IFEval breaks its first instruction and is left alone otherwise. No checker is
asked.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any

# A value of the same type that equals no other: bigger, longer, or the other truth value.
_OTHER = """
def other_value(value):
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1 + abs(value)
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, (list, tuple)):
        return type(value)((*value, "?"))
    if isinstance(value, dict):
        return {**value, "?": "?"}
    if isinstance(value, (set, frozenset)):
        return value | {"?"}
    return None
"""


def spoil_program(program: str, entry_point: str) -> str:
    """``program`` whose ``entry_point`` runs to its end and then returns another value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gold answers have invalid escapes
        tree = ast.parse(program)
    inner = f"right_{entry_point}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            node.name = inner
        elif isinstance(node, ast.Name) and node.id == entry_point:
            node.id = inner
    wrapper = f"def {entry_point}(*given):\n    return other_value({inner}(*given))\n"
    return f"{ast.unparse(tree)}\n{_OTHER}\n{wrapper}"


def spoil_box(solution: str) -> str:
    """``solution`` with another content in its last box: a digit more, or another word or term."""
    start = solution.rindex("\\boxed{") + len("\\boxed{")
    end, depth = start, 1
    while depth:
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        end += 1
    content = solution[start : end - 1]
    if re.search(r"\d", content):
        changed = re.sub(r"\d", r"7\g<0>", content, count=1)
    elif "\\text{" in content:
        changed = "\\text{Z}"
    else:
        changed = f"{content} + 7"
    return f"{solution[:start]}{changed}{solution[end - 1 :]}"


Settings = dict[str, Any]
_GERMAN = "heute ist ein schöner Tag und wir sind alle sehr glücklich hier"
_ENGLISH = "this is what we have to say about it and that is all there is"


def break_instruction(answer: str, instruction: str, settings: Settings) -> str:
    """``answer`` changed so that it no longer follows ``instruction``, by IFEval's name of it."""
    return _BREAKS[instruction.partition(":")[2]](answer, settings)


def _without(answer: str, part: str) -> str:
    return re.sub(re.escape(part), "", answer, flags=re.IGNORECASE)


def _miscounted(part: Callable[[Settings], str], count: str, relation: str) -> Callable[..., str]:
    """Leaves a part out that is wanted often enough, or repeats one that is wanted seldom enough."""

    def change(answer: str, settings: Settings) -> str:
        if settings[relation] == "less than":
            return f"{answer} " + " ".join([part(settings)] * settings[count])
        return _without(answer, part(settings))

    return change


def _shortened(part: str, count: str) -> Callable[..., str]:
    """Too short where length is wanted, too long where it is not."""

    def change(answer: str, settings: Settings) -> str:
        is_short = settings["relation"] == "less than"
        return f"{answer} " + " ".join([part] * settings[count]) if is_short else "go"

    return change


def _other_language(answer: str, settings: Settings) -> str:
    return _ENGLISH if settings["language"] != "en" else _GERMAN


def _miscapitalised(answer: str, settings: Settings) -> str:
    if settings["capital_relation"] == "less than":
        return f"{answer} " + " ".join(["SO"] * settings["capital_frequency"])
    return answer.lower()


_BREAKS: dict[str, Callable[[str, Settings], str]] = {
    "existence": lambda answer, settings: _without(answer, settings["keywords"][0]),
    "frequency": _miscounted(lambda settings: str(settings["keyword"]), "frequency", "relation"),
    "forbidden_words": lambda answer, settings: f"{answer} {settings['forbidden_words'][0]}",
    "letter_frequency": _miscounted(
        lambda settings: str(settings["letter"]), "let_frequency", "let_relation"
    ),
    "response_language": _other_language,
    "number_sentences": _shortened("Go on.", "num_sentences"),
    "number_words": _shortened("go", "num_words"),
    "number_paragraphs": lambda answer, settings: f"{answer}\n***\ngo on",
    "nth_paragraph_first_word": lambda answer, settings: f"{answer}\n\ngo on",
    "number_placeholders": lambda answer, settings: answer.replace("[", "("),
    "postscript": lambda answer, settings: _without(answer, settings["postscript_marker"]),
    "number_bullet_lists": lambda answer, settings: f"{answer}\n- so",
    "number_highlighted_sections": lambda answer, settings: answer.replace("*", ""),
    "multiple_sections": lambda answer, settings: answer.replace(settings["section_spliter"], ""),
    "constrained_response": lambda answer, settings: "Perhaps.",
    "json_format": lambda answer, settings: f"{answer}}}",
    "title": lambda answer, settings: answer.replace("<<", ""),
    "two_responses": lambda answer, settings: answer.replace("******", ""),
    "repeat_prompt": lambda answer, settings: f"so {answer}",
    "end_checker": lambda answer, settings: f"{answer} so",
    "quotation": lambda answer, settings: f"{answer} so",
    "no_comma": lambda answer, settings: f"{answer}, so",
    "english_capital": lambda answer, settings: f"{answer} so",
    "english_lowercase": lambda answer, settings: f"{answer} SO",
    "capital_word_frequency": _miscapitalised,
}
