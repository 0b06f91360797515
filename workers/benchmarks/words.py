"""``words``: arithmetic word problems that the project writes itself, with worked steps and a last line
``#### N``.

Fifteen forms of one to three steps, with distractors and many wordings. The reference model is trained on
examples from here; a benchmark item is a problem whose form and numbers together never occur in training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from dlmgrid.workers.benchmarks.generated import Example, is_held_out
from dlmgrid.workers.benchmarks.remarks import remark
from dlmgrid.workers.benchmarks.word_problem_forms import FORMS, Draw, Problem, Step
from dlmgrid.workers.items import Item

PROMPT_VERSION = "words-1"
HELD_OUT_SEED = 20_260_001
CALIBRATION_SEED = 20_260_011
MAX_ITEMS = 2000


def _question(problem: Problem, d: Draw) -> str:
    sentences = list(problem.sentences)
    if d.rng.random() < 0.35:
        number = d.number(3, 60)
        distractor = d.pick(
            f"{d.other} is {number} years old.",
            f"The shop is {number} minutes away.",
            f"It is day {number} of the school year.",
            f"There are {number} chairs in the room.",
        )
        sentences.insert(d.number(0, len(sentences)), distractor)
    return " ".join((*sentences, problem.ask))


def _sentence(d: Draw) -> str:
    text = remark(d.rng)
    return text[0].upper() + text[1:]


def _line(step: Step, d: Draw) -> str:
    left, right = step.left, step.right
    if step.operator in "+*" and d.rng.random() < 0.5:
        left, right = right, left
    sum_text = f"{left} {step.operator} {right} = {step.value}"
    about = d.rng.choice(step.about)
    return d.pick(
        f"{_sentence(d)}: {sum_text}.",
        f"{_sentence(d)}, {sum_text} {step.unit}.",
        f"{about[0].upper()}{about[1:]}: {sum_text}, {remark(d.rng)}.",
        f"{sum_text}, {remark(d.rng)}.",
    )


def _solution(problem: Problem, d: Draw) -> str:
    lines = [_line(step, d) for step in problem.steps]
    if d.rng.random() < 0.25:
        lines.append(d.rng.choice(problem.closing).format(n=problem.answer))
    else:
        lines.append(f"{_sentence(d)}.")
    return "\n".join((*lines, f"#### {problem.answer}"))


def _problems(seed: int) -> Iterator[tuple[Problem, str, str]]:
    """Endless (problem, question, solution) from ``seed``."""
    rng = random.Random(seed)
    while True:
        d = Draw(rng)
        problem = rng.choice(FORMS)(d)
        yield problem, _question(problem, d), _solution(problem, d)


def train_examples(seed: int, count: int) -> list[Example]:
    """``count`` training examples drawn from ``seed``; none of them is a held-out problem."""
    examples: list[Example] = []
    for problem, question, solution in _problems(seed):
        if len(examples) == count:
            break
        if not is_held_out(*problem.identity):
            examples.append(Example(prompt=question, answer=solution))
    return examples


def held_out_items(count: int) -> list[Item]:
    """The first ``count`` benchmark items, ``MAX_ITEMS`` at most; a smaller count gives a prefix of a larger.

    ``document`` holds ``question``, ``solution`` (worked steps), ``answer`` (int) and ``form``.
    """
    return _items(min(count, MAX_ITEMS), seed=HELD_OUT_SEED, held_out=True, prefix="words")


def calibration_items(count: int) -> list[Item]:
    """The first ``count`` items of the training range, from a seed of their own: none of them is a benchmark item."""
    return _items(count, seed=CALIBRATION_SEED, held_out=False, prefix="words-train")


def _items(count: int, *, seed: int, held_out: bool, prefix: str) -> list[Item]:
    items: list[Item] = []
    seen: set[tuple[object, ...]] = set()
    for problem, question, solution in _problems(seed):
        if len(items) >= count:
            break
        if problem.identity in seen or is_held_out(*problem.identity) != held_out:
            continue
        seen.add(problem.identity)
        items.append(
            Item(
                item_id=f"{prefix}-{len(items):04d}",
                messages=[{"role": "user", "content": question}],
                document={
                    "question": question,
                    "solution": solution,
                    "answer": problem.answer,
                    "form": problem.form,
                },
            )
        )
    return items


_FINAL = re.compile(r"^####[ ]*(-?[0-9][0-9,]*)[ ]*$", re.MULTILINE)


def score(text: str, document: dict[str, Any]) -> tuple[int, str]:
    """1 if the last line of the form ``#### N`` gives the answer, else 0; and what was extracted ("" if
    nothing)."""
    found = _FINAL.findall(text)
    extracted = found[-1].replace(",", "") if found else ""
    return int(extracted != "" and int(extracted) == int(document["answer"])), extracted
