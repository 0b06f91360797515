"""lm-eval's own task over stored documents, and sample rows in the shape of its ``samples_<task>_….jsonl``.

The shape is that of lm-eval 0.4.13 (``evaluator.evaluate`` and ``EvaluationTracker.save_results_samples``): one
row for each document and filter, with ``doc_id doc target arguments resps filtered_resps filter metrics doc_hash
prompt_hash target_hash`` and one key for each metric.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlmgrid.workers.benchmarks.lm_eval_catalog import TASKS
from dlmgrid.workers.benchmarks.lm_eval_task import build_task, cut_at_stop_strings, prepared
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One document with its answers, a text for each repeat, and the prompt that they continue.

    ``doc_id`` is the document's place in the data set. ``values`` are metric values by ``(metric, filter)``.
    """

    doc_id: int
    item: Item
    texts: tuple[str, ...]
    values: Mapping[tuple[str, str], float] = field(default_factory=dict)


def load_task(benchmark: str, documents: Sequence[dict[str, Any]]) -> Any:
    """lm-eval's task behind ``benchmark`` with ``documents`` as its test split, without few-shot examples.

    Raises InputError for a benchmark that lm-eval does not score, and where lm-eval is missing or of another
    version.
    """
    if benchmark not in TASKS:
        raise InputError(f"benchmark {benchmark!r} is no task of lm-eval; those that are: {', '.join(TASKS)}")
    shipped = TASKS[benchmark]
    build_task(shipped)  # checks that lm-eval is there and its version of the task, and readies what it needs
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / shipped.folder / f"{shipped.name}.yaml")
    splits = {config.get(name) for name in ("test_split", "validation_split")} - {None}
    examples = {config.get(name) for name in ("training_split", "fewshot_split")} - {None} - splits

    def stored(**_: Any) -> Any:
        rows = datasets.Dataset.from_list(list(documents))
        return dict.fromkeys(splits, rows) | dict.fromkeys(examples, rows.select([0]))

    return ConfigurableTask(config={**config, "custom_dataset": stored, "num_fewshot": 0})


def stop_strings(settings: Mapping[str, Any]) -> list[str]:
    """The strings of a task's generation settings at which a model of lm-eval cuts its answers."""
    until = settings.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def sample_rows(
    task: Any, answered: Sequence[Answered], *, gen_length: int, temperature: float
) -> list[dict[str, Any]]:
    """Rows of a samples file, filters in the task's order, documents in the given one within each.

    Texts are cut at the task's stop strings, as a model of lm-eval returns them.
    """
    from lm_eval.api.instance import Instance

    until = stop_strings(task.config.generation_kwargs)
    settings = {
        **task.config.generation_kwargs,
        "max_gen_toks": gen_length,
        "do_sample": temperature > 0,
        "temperature": temperature,
    }
    instances = [
        Instance(
            "generate_until",
            prepared(task, one.item.document),
            (prompt_text(one.item), settings),
            0,
            metadata=(task.config.task, one.doc_id, len(one.texts)),
            resps=[cut_at_stop_strings(text, until) for text in one.texts],
        )
        for one in answered
    ]
    if not instances:
        return []
    task._instances = instances
    task.apply_filters()
    return [
        _row(task, one, instance, name)
        for name in instances[0].filtered_resps
        for one, instance in zip(answered, instances, strict=True)
    ]


def _row(task: Any, one: Answered, instance: Any, filter_name: str) -> dict[str, Any]:
    from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

    target = task.doc_to_target(instance.doc)
    document = json.dumps(instance.doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
    prompt, settings = instance.arguments
    values = {metric: value for (metric, name), value in one.values.items() if name == filter_name}
    return {
        "doc_id": one.doc_id,
        "doc": instance.doc,
        "target": str(target),
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": settings}},
        "resps": sanitize_list([instance.resps]),
        "filtered_resps": sanitize_list([instance.filtered_resps[filter_name]]),
        "filter": filter_name,
        "metrics": list(values),
        "doc_hash": hash_string(document),
        "prompt_hash": hash_string(prompt),
        "target_hash": hash_string(str(target)),
        **values,
    }


def prompt_text(item: Item) -> str:
    """A prompt as one text: raw, or the messages as JSON, as lm-eval writes them for chat interfaces."""
    if item.messages is None:
        return (item.prompt or "") + item.assistant_prefix
    messages = list(item.messages)
    if item.assistant_prefix:
        messages.append({"role": "assistant", "content": item.assistant_prefix})
    return json.dumps(messages, ensure_ascii=False)
