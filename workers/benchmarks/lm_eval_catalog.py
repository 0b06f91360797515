"""Which of lm-eval's packaged tasks scores which benchmark. Free of lm-eval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlmgrid.workers.benchmarks.benchmark import Scorer, package_version


@dataclass(frozen=True, kw_only=True, slots=True)
class LmEvalTask:
    """A task as lm-eval ships it: ``tasks/<folder>/<name>.yaml`` at ``version``.

    ``metrics`` are ``metric,filter`` as lm-eval prints them. ``placeholder`` is a document with the task's
    columns that its own preparation of documents accepts; the task is built over it and never scores it.
    """

    folder: str
    name: str
    version: str
    metrics: tuple[str, ...]
    placeholder: dict[str, Any]


GSM8K_TASK = LmEvalTask(
    folder="gsm8k",
    name="gsm8k",
    version="3.0",
    metrics=("exact_match,strict-match", "exact_match,flexible-extract"),
    placeholder={"question": "0", "answer": "0"},
)
MATH500_TASK = LmEvalTask(
    folder="minerva_math",
    name="minerva_math500",
    version="3.1",
    metrics=("math_verify,none", "exact_match,none"),
    placeholder={"problem": "0", "solution": "\\boxed{0}"},
)
AIME24_TASK = LmEvalTask(
    folder="aime",
    name="aime24",
    version="0.0",
    metrics=("exact_match,none",),
    placeholder={"Problem": "0", "Answer": "0"},
)
AIME25_TASK = LmEvalTask(
    folder="aime",
    name="aime25",
    version="0.0",
    metrics=("exact_match,none",),
    placeholder={"problem": "0", "answer": "0"},
)
IFEVAL_TASK = LmEvalTask(
    folder="ifeval",
    name="ifeval",
    version="4.0",
    metrics=(
        "prompt_level_strict_acc,none",
        "inst_level_strict_share,none",
        "prompt_level_loose_acc,none",
        "inst_level_loose_share,none",
    ),
    placeholder={"key": 0, "prompt": "0", "instruction_id_list": ["0"], "kwargs": [{"0": "0"}]},
)

TASKS = {
    "gsm8k": GSM8K_TASK,
    "gsm8k_question": GSM8K_TASK,
    "math500": MATH500_TASK,
    "aime24": AIME24_TASK,
    "aime25": AIME25_TASK,
    "ifeval": IFEVAL_TASK,
}
SCORING = "dlmgrid.workers.benchmarks.lm_eval_task"
SCORER_NAME = "lm-eval"


def lm_eval_scorer(task: LmEvalTask, summary: str, also: tuple[str, ...] = ()) -> Scorer:
    """The scorer of a benchmark that ``task`` scores. ``also`` names packages whose version decides scores."""

    def version() -> str:
        packages = "".join(f", {name} {package_version(name)}" for name in also)
        return f"lm_eval {package_version('lm_eval')}{packages}, task {task.name} {task.version}"

    return Scorer(name=SCORER_NAME, metrics=task.metrics, runs_code=False, summary=summary, version=version)
