"""GSM8K through lm-eval: prompts and scores are lm-eval's own, item by item."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.workers.benchmarks import lm_eval_task
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.data import load_rows
from dlmgrid.workers.benchmarks.gsm8k import GSM8K_TEST, GSM8K_TRAIN
from dlmgrid.workers.benchmarks.lm_eval_catalog import GSM8K_TASK
from dlmgrid.workers.errors import InputError

pytest.importorskip("lm_eval")

OPTIONS = {"attempt": "first", "benchmark": "gsm8k"}
STRICT, FLEXIBLE = "exact_match,strict-match", "exact_match,flexible-extract"


def scores(text: str, answer: str = "Worked steps.\n#### 29") -> tuple[float, float]:
    """(strict-match, flexible-extract) of ``text`` against the gold ``answer``."""
    verdicts = lm_eval_task.score(text, {"question": "?", "answer": answer}, OPTIONS)
    values = {entry["metric"]: entry["value"] for entry in verdicts}
    assert set(values) == {STRICT, FLEXIBLE}
    return values[STRICT], values[FLEXIBLE]


def lm_eval_gsm8k(data_folder: Path, num_fewshot: int) -> Any:
    """lm-eval's packaged task over our rows, as its own evaluator would hold it."""
    import datasets
    import lm_eval
    import yaml
    from lm_eval.api.task import ConfigurableTask

    path = Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml"
    splits = {
        "test": datasets.Dataset.from_list(load_rows(GSM8K_TEST, data_folder)),
        "train": datasets.Dataset.from_list(load_rows(GSM8K_TRAIN, data_folder)),
    }
    config = yaml.safe_load(path.read_text()) | {
        "custom_dataset": lambda **_: splits,
        "num_fewshot": num_fewshot,
    }
    return ConfigurableTask(config=config)


@pytest.mark.parametrize("num_fewshot", [0, 1, 5])
def test_prompts_are_those_of_lm_eval_under_a_chat_template(data_folder: Path, num_fewshot: int) -> None:
    task = lm_eval_gsm8k(data_folder, num_fewshot)
    task.set_fewshot_seed(1234)
    rendered: list[Any] = []
    task.build_all_requests(
        limit=10,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        chat_template=lambda messages, add_generation_prompt: rendered.append(messages) or "",
    )
    items = get_benchmark("gsm8k").load(data_folder, 10, num_fewshot)
    assert [item.messages for item in items] == rendered
    assert len(rendered[0]) == 2 * num_fewshot + 1


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 29", 1, 1),
        ("The sum is 29.\n#### 29", 1, 1),
        ("#### 29.", 1, 1),  # the final dot is ignored
        ("#### $29", 0, 1),  # strict-match takes digits only right after `#### `
        ("#### 29.0", 0, 0),  # lm-eval compares text: 29.0 is not 29
        ("The answer is $29.00", 0, 0),
        ("The answer is $29", 0, 1),
        ("The answer is 29.", 0, 1),
        ("The answer is 29", 0, 1),
        ("####29", 0, 1),
        ("#### 30", 0, 0),
        ("#### -29", 0, 0),  # a sign counts
        ("#### 29\nSo she has 30 left.", 1, 0),  # the last number is another
        ("She has 29 of 30.\n#### 30", 0, 0),
        ("no number at all", 0, 0),
        ("", 0, 0),
        ("#### 29\n\nQuestion: How many are 2 and 2?\nAnswer: 4\n#### 4", 1, 1),  # run-on text is cut
        ("9" * 20_000, 0, 0),
    ],
)
def test_verdicts_are_lm_evals(text: str, strict: int, flexible: int) -> None:
    assert scores(text) == (strict, flexible)


@pytest.mark.parametrize(
    ("gold", "text", "strict", "flexible"),
    [
        ("#### 29,000", "#### 29000", 1, 1),
        ("#### 29000", "#### 29,000", 1, 1),
        ("#### -3", "#### -3", 1, 1),
        ("#### -3", "#### 3", 0, 0),
        ("#### -3", "#### +3", 0, 0),
        ("#### -3", "#### \N{MINUS SIGN}3", 0, 0),
        ("step #### 1\n#### 29", "#### 29", 1, 1),  # the gold is what follows the last `#### `
    ],
)
def test_commas_signs_and_several_marks(gold: str, text: str, strict: int, flexible: int) -> None:
    assert scores(text, gold) == (strict, flexible)


def test_replayed_generations_score_as_in_lm_evals_own_evaluator(data_folder: Path) -> None:
    """The same texts through ``lm_eval.evaluate`` with a model that replays them: equal item by item."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    documents = load_rows(GSM8K_TEST, data_folder)
    texts = []
    for index, document in enumerate(documents):
        gold = document["answer"].rsplit("#### ", 1)[1]
        forms = [
            document["answer"], f"So it is {gold}.", f"#### {gold} pens", f"${gold}.00", f"#### {gold}1", "?",
            f"#### {gold}\n\nQuestion: and 7?\nAnswer: 7", f"{gold} of 7", f"####{gold}.",
        ]  # fmt: skip
        texts.append(forms[index % len(forms)])

    class Replay(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: Any) -> Any:
            raise NotImplementedError

        def generate_until(self, requests: Any) -> list[str]:
            """A model's duty: stop at the request's stop strings."""
            replies = []
            for request in requests:
                text = texts[request.doc_id]
                for stop in request.args[1]["until"]:
                    text = text.split(stop)[0]
                replies.append(text)
            return replies

    task = lm_eval_gsm8k(data_folder, 0)
    result = evaluate(lm=Replay(), task_dict={"gsm8k": task}, log_samples=True, bootstrap_iters=0)
    theirs = {
        (s["doc_id"], f"exact_match,{s['filter']}"): s["exact_match"] for s in result["samples"]["gsm8k"]
    }
    ours = {
        (index, entry["metric"]): entry["value"]
        for index, document in enumerate(documents)
        for entry in lm_eval_task.score(texts[index], document, OPTIONS)
    }
    assert len(ours) == 2 * len(documents) >= 40
    assert ours == theirs
    assert 0 < sum(ours.values()) < len(ours)


def test_other_version_of_the_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(GSM8K_TASK, version="2.0")
    monkeypatch.setitem(lm_eval_task.TASKS, "gsm8k", other)
    lm_eval_task._build.cache_clear()
    with pytest.raises(InputError, match=r"task gsm8k is version 3.0, this release scores with 2.0"):
        lm_eval_task.build_task(other)
