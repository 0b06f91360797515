"""Scoring with lm-eval's own task: its filters, then its ``process_results``, one document at a time.

The task is built from the YAML file that lm-eval ships, without a TaskManager (which takes seconds) and
without any data set cache. The text is cut at the task's ``until`` strings first, which in lm-eval is the
duty of the model class.

The tasks bound their own work with alarms of some seconds. Here an alarm is put off while the process waits for a
processor, and an answer that got no point while one rang is ``timed_out``, so that it is tried again alone. An
alarm cannot interrupt one long operation of C code (a tower of powers in a box); the wall limit of the scoring
process can.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.lm_eval_catalog import SCORER_NAME, TASKS, LmEvalTask
from dlmgrid.workers.benchmarks.sentence_model import (
    make_language_detection_repeatable,
    use_installed_punkt,
)
from dlmgrid.workers.benchmarks.time_limit import Patience
from dlmgrid.workers.benchmarks.verdict import ALONE, ERRORED, SCORED, TIMED_OUT, verdict
from dlmgrid.workers.errors import InputError


def wall_seconds(attempt: str) -> float:
    """Wall limit of one :func:`score` call. The tasks' own alarms, of 5 s each, add up to less."""
    return 60.0 if attempt == ALONE else 30.0


def prepare(document: dict[str, Any], options: dict[str, Any]) -> None:
    """Import lm-eval and build the task of ``options["benchmark"]``. Raises InputError as :func:`build_task`."""
    build_task(TASKS[options["benchmark"]])


def score(text: str, document: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts of the task of ``options["benchmark"]`` on ``text``: one per metric and filter, named
    ``metric,filter`` as lm-eval names them. IFEval's ``inst_level_…_acc`` has a value per instruction, and its
    mean counts instructions, not prompts; here it is the share of the prompt's instructions that hold, so it
    is called ``inst_level_…_share``.
    """
    task = build_task(TASKS[options["benchmark"]])
    random.seed(0)  # IFEval's checker draws what a document leaves open
    document = prepared(task, document)
    filtered = apply_filters(
        task, document, cut_at_stop_strings(text, task.config.generation_kwargs["until"])
    )
    verdicts = []
    for name, answer in filtered.items():
        with _observed_alarms() as alarms:
            results = task.process_results(document, [answer])
        for metric, value in results.items():
            if metric == "math_verify" and not value and not _is_gold_understood(document):
                detail = f"math_verify finds no answer in the gold solution of {document['problem'][:80]!r}"
                verdicts.append(verdict(SCORER_NAME, f"{metric},{name}", None, status=ERRORED, detail=detail))
                continue
            parts = [bool(part) for part in value] if isinstance(value, list) else None
            number = float(value) if parts is None else sum(parts) / len(parts)
            label = metric if parts is None else f"{metric.removesuffix('_acc')}_share"
            verdicts.append(
                verdict(
                    SCORER_NAME,
                    f"{label},{name}",
                    number,
                    status=TIMED_OUT if alarms and not number else SCORED,
                    detail="" if parts is None else f"{sum(parts)} of {len(parts)} instructions",
                    extracted=str(answer),
                )
            )
    return verdicts


def _is_gold_understood(document: dict[str, Any]) -> bool:
    """Whether math_verify finds anything to compare with: else every answer would count as wrong."""
    from math_verify import parse

    return bool(parse(document["solution"]))


def cut_at_stop_strings(text: str, until: list[str]) -> str:
    """``text`` up to the first of the stop strings."""
    for stop in until:
        text = text.split(stop, 1)[0]
    return text


def prepared(task: Any, document: dict[str, Any]) -> dict[str, Any]:
    """``document`` after the task's own preparation of documents, where it has one."""
    if task.config.process_docs is None:
        return document
    import datasets

    rows = task.config.process_docs(datasets.Dataset.from_list([document]))
    result: dict[str, Any] = rows[0]
    return result


def apply_filters(task: Any, document: dict[str, Any], text: str) -> dict[str, Any]:
    """What each filter of the task extracts from ``text``."""
    from lm_eval.api.instance import Instance

    instance = Instance(
        "generate_until", document, ("", {}), 0, metadata=(task.config.task, 0, 1), resps=[text]
    )
    task._instances = [instance]
    task.apply_filters()
    return dict(instance.filtered_resps)


@contextlib.contextmanager
def _observed_alarms() -> Iterator[list[int]]:
    """A list that grows whenever a handler of SIGALRM that is set meanwhile is called."""
    rung: list[int] = []
    original_signal, original_alarm = signal.signal, signal.alarm
    patience = Patience(0.0)

    def observed(number: int, handler: Any) -> Any:
        def ring(caught: int, frame: Any) -> Any:
            if owed := patience.owed():
                signal.setitimer(signal.ITIMER_REAL, owed)
                return None
            rung.append(caught)
            return handler(caught, frame)

        return original_signal(number, ring if number == signal.SIGALRM and callable(handler) else handler)

    def alarm(seconds: int) -> int:
        nonlocal patience
        patience = Patience(seconds)
        return original_alarm(seconds)

    signal.signal, signal.alarm = observed, alarm  # type: ignore[assignment]  # theirs are overloaded
    try:
        yield rung
    finally:
        signal.signal, signal.alarm = original_signal, original_alarm


def build_task(task: LmEvalTask) -> Any:
    """lm-eval's packaged task over its placeholder document, ready to score others.

    Raises InputError when lm-eval is missing or ships another version of the task.
    """
    return _build(task.folder, task.name)


@cache
def _build(folder: str, name: str) -> Any:
    task = next(task for task in TASKS.values() if (task.folder, task.name) == (folder, name))
    if folder == "ifeval":
        use_installed_punkt(Path(tempfile.gettempdir()) / "nltk_data")
        make_language_detection_repeatable()
    try:
        import datasets
        import lm_eval
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks._yaml_loader import load_yaml
    except ImportError as error:
        raise InputError(
            f"scoring with lm-eval: {error.name} is missing: pip install 'lm-eval[math,ifeval]'"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / folder / f"{name}.yaml")
    found = str(config["metadata"]["version"])
    if found != task.version:
        raise InputError(
            f"lm-eval's task {name} is version {found}, this release scores with {task.version}: install the "
            "lm-eval of constraints.txt"
        )

    def one_document(**_: Any) -> Any:
        return dict.fromkeys(("train", "test"), datasets.Dataset.from_list([task.placeholder]))

    return ConfigurableTask(config={**config, "custom_dataset": one_document})
