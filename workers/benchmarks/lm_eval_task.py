"""Scoring with lm-eval's own task: its filters, then its ``process_results``, one document at a time.

The task is built from the YAML file that lm-eval ships, without a TaskManager (which takes seconds) and
without any data set cache: the only document it holds is the one that is scored. The text is cut at the
task's ``until`` strings first, which in lm-eval is the duty of the model class.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.gsm8k import LM_EVAL_SCORER, TASK_NAME, TASK_VERSION
from dlmgrid.workers.benchmarks.verdict import ALONE, verdict
from dlmgrid.workers.errors import InputError


def wall_seconds(attempt: str) -> float:
    """Wall limit of one :func:`score` call, the import of lm-eval included."""
    return 180.0 if attempt == ALONE else 60.0


def score(text: str, document: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts of the task on ``text``: one per filter, named ``metric,filter`` as lm-eval names them."""
    task = build_task(TASK_NAME, TASK_VERSION, tuple(sorted(document)))
    filtered = apply_filters(
        task, document, cut_at_stop_strings(text, task.config.generation_kwargs["until"])
    )
    verdicts = []
    for name, answer in filtered.items():
        for metric, value in task.process_results(document, [answer]).items():
            verdicts.append(
                verdict(LM_EVAL_SCORER.name, f"{metric},{name}", float(value), extracted=str(answer))
            )
    return verdicts


def cut_at_stop_strings(text: str, until: list[str]) -> str:
    """``text`` up to the first of the stop strings."""
    for stop in until:
        text = text.split(stop, 1)[0]
    return text


def apply_filters(task: Any, document: dict[str, Any], text: str) -> dict[str, Any]:
    """What each filter of the task extracts from ``text``."""
    from lm_eval.api.instance import Instance

    instance = Instance(
        "generate_until", document, ("", {}), 0, metadata=(task.config.task, 0, 1), resps=[text]
    )
    task._instances = [instance]
    task.apply_filters()
    return dict(instance.filtered_resps)


@cache
def build_task(name: str, version: str, columns: tuple[str, ...]) -> Any:
    """lm-eval's packaged task ``name`` over documents with ``columns``.

    Raises InputError when lm-eval is missing or ships another version of the task.
    """
    try:
        import datasets
        import lm_eval
        import yaml
        from lm_eval.api.task import ConfigurableTask
    except ImportError as error:
        raise InputError(
            f"scoring with lm-eval: {error.name} is missing: pip install 'lm-eval[math,ifeval]'"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    path = Path(lm_eval.__file__).parent / "tasks" / name / f"{name}.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = str(config["metadata"]["version"])
    if found != version:
        raise InputError(
            f"lm-eval's task {name} is version {found}, this release scores with {version}: install the "
            "lm-eval of constraints.txt"
        )

    def one_document(**_: Any) -> Any:
        rows = datasets.Dataset.from_dict({column: ["0"] for column in columns})
        return dict.fromkeys(("train", "test"), rows)

    return ConfigurableTask(config={**config, "custom_dataset": one_document})
