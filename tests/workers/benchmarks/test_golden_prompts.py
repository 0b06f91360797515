"""Every prompt is frozen byte for byte, and lm-eval's are the ones that lm-eval itself renders."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.lm_eval_catalog import TASKS
from dlmgrid.workers.benchmarks.math500 import fewshot_examples

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
PROMPTS = runpy.run_path(str(GOLDEN / "prompts.py"))
NAMES: list[tuple[str, int]] = PROMPTS["golden_names"]()


@pytest.mark.parametrize(("name", "num_fewshot"), NAMES)
def test_prompts_are_the_frozen_bytes(name: str, num_fewshot: int) -> None:
    """A wanted change: raise the prompt version and run ``make golden``."""
    frozen: Path = PROMPTS["golden_path"](name, num_fewshot)
    assert PROMPTS["rendered_prompts"](name, num_fewshot) == frozen.read_bytes()


def test_every_benchmark_and_nothing_else_is_frozen() -> None:
    wanted = {PROMPTS["golden_path"](name, shots) for name, shots in NAMES}
    assert set((GOLDEN / "prompts").iterdir()) == wanted
    assert {name for name, _ in NAMES} == set(benchmark_names())


def _lm_evals_messages(name: str, num_fewshot: int) -> list[Any]:
    """What lm-eval's packaged task hands to a chat template for our rows."""
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    from dlmgrid.workers.benchmarks.lm_eval_task import build_task

    task = TASKS[name]
    build_task(task)  # puts what the task's import needs in its place
    rows = [item.document for item in get_benchmark(name).load(GOLDEN / "data")]
    splits = {"test": datasets.Dataset.from_list(rows)}
    splits["train"] = splits["test"]
    if name == "gsm8k":
        train = load_rows(get_benchmark(name).files[1], GOLDEN / "data")
        splits["train"] = datasets.Dataset.from_list(train)
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / task.folder / f"{task.name}.yaml")
    config |= {"custom_dataset": lambda **_: splits, "num_fewshot": num_fewshot}
    built = ConfigurableTask(config=config)
    built.set_fewshot_seed(1234)
    rendered: list[Any] = []
    built.build_all_requests(
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        chat_template=lambda messages, add_generation_prompt: rendered.append(messages) or "",
    )
    return rendered


@pytest.mark.parametrize(
    ("name", "num_fewshot"),
    [
        ("gsm8k", 5),
        ("math500", 0),
        ("math500", 3),
        ("math500", 4),
        ("aime24", 0),
        ("aime25", 0),
        ("ifeval", 0),
    ],
)
def test_prompts_are_lm_evals(name: str, num_fewshot: int) -> None:
    pytest.importorskip("lm_eval")
    items = get_benchmark(name).load(GOLDEN / "data", None, num_fewshot)
    assert [item.messages for item in items] == _lm_evals_messages(name, num_fewshot)


def test_worked_examples_of_math500_are_four_and_end_with_minervas_sentence() -> None:
    examples = fewshot_examples()
    assert len(examples) == get_benchmark("math500").max_fewshot == 4
    assert all(example["solution"].endswith("I hope it is correct.") for example in examples)


def test_wrapping_of_the_source_is_taken_off(tmp_path: Path) -> None:
    (question,) = get_benchmark("livecodebench").load(GOLDEN / "data", 1)[0].messages or []
    assert "<|im_" not in question["content"]
    assert "<think>" not in question["content"]
    (problem,) = get_benchmark("aime25").load(GOLDEN / "data", 1)[0].messages or []
    assert "step by step" not in problem["content"]


def test_mt_bench_asks_the_first_turn_only() -> None:
    benchmark = get_benchmark("mt_bench")
    (item,) = benchmark.load(GOLDEN / "data")
    assert item.messages == [{"role": "user", "content": "Write a letter to a lighthouse."}]
    assert "first turn" in benchmark.title
