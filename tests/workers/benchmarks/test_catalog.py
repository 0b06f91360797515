"""The catalog names every benchmark, needs no heavy package, and its prompts are frozen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.errors import InputError


def test_lists_the_benchmarks_of_the_first_milestone() -> None:
    assert {"words", "functions", "gsm8k", "humaneval", "humaneval_plus"} <= set(benchmark_names())


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(InputError, match="'humaneval_plus'"):
        get_benchmark("humanevalplus")


def test_loading_the_catalog_and_prompts_imports_no_heavy_package(data_folder: Path) -> None:
    program = (
        "import sys\n"
        "from dlmgrid.workers.benchmarks.catalog import get_benchmark\n"
        "for name in ('gsm8k', 'humaneval_plus'):\n"
        f"    get_benchmark(name).load({str(data_folder)!r}, 1, 0)\n"
        "heavy = {'torch', 'ray', 'lm_eval', 'evalplus', 'datasets', 'typer'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_gsm8k_prompt_bytes(data_folder: Path) -> None:
    item = get_benchmark("gsm8k").load(data_folder, 1)[0]
    question = "Tom has 1 boxes of 1000 pens and 1 loose pens. How many pens has he?"
    assert item.messages == [{"role": "user", "content": f"Question: {question}\nAnswer:"}]
    assert item.assistant_prefix == ""
    bare = get_benchmark("gsm8k_question").load(data_folder, 1)[0]
    assert bare.messages == [{"role": "user", "content": question}]
    assert bare.item_id == item.item_id == "gsm8k/0"


def test_humaneval_prompt_bytes(data_folder: Path) -> None:
    for name in ("humaneval", "humaneval_plus"):
        item = get_benchmark(name).load(data_folder)[1]
        assert item.messages == [
            {
                "role": "user",
                "content": (
                    "Please provide a self-contained Python script that solves the following problem in a "
                    "markdown code block:\n```\ndef repeat(text: str, times: int) -> str:\n"
                    '    """ Repeat text. """\n```\n'
                ),
            }
        ]
        assert item.assistant_prefix == (
            "Below is a Python script with a self-contained function that solves the problem and passes "
            "corresponding tests:\n```python\n"
        )


def test_prompt_version_tells_shots_and_styles_apart() -> None:
    gsm8k = get_benchmark("gsm8k")
    versions = {
        gsm8k.prompt_version(0),
        gsm8k.prompt_version(5),
        get_benchmark("gsm8k_question").prompt_version(0),
    }
    assert len(versions) == 3


@pytest.mark.parametrize("num_fewshot", [-1, 1])
def test_impossible_number_of_shots(num_fewshot: int, data_folder: Path) -> None:
    benchmark = get_benchmark("humaneval")
    with pytest.raises(InputError, match="num_fewshot is"):
        benchmark.prompt_version(num_fewshot)
    with pytest.raises(InputError, match="it takes 0 to 0"):
        benchmark.load(data_folder, None, num_fewshot)


def test_limit_takes_the_first_items_and_must_be_positive(data_folder: Path) -> None:
    gsm8k = get_benchmark("gsm8k")
    assert [item.item_id for item in gsm8k.load(data_folder, 3)] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]
    with pytest.raises(InputError, match="limit is 0"):
        gsm8k.load(data_folder, 0)


def test_training_sets_hold_no_scored_item() -> None:
    golden = Path(__file__).resolve().parents[2] / "golden" / "data"
    names = ("gsm8k_train", "math_train", "mbpp_train", "chat_train")
    sets = {name: get_benchmark(name).load(golden) for name in names}
    assert all(get_benchmark(name).calibration for name in sets)
    ids = {name: [item.item_id for item in items] for name, items in sets.items()}
    assert ids["mbpp_train"] == ["mbpp-train/810", "mbpp-train/811"]
    assert ids["math_train"] == ["math/train/algebra/2.json", "math/train/algebra/3.json"]
    assert ids["chat_train"] == ["chat-train/0", "chat-train/1"]  # the repeated request is asked once
    for train, test in (("gsm8k_train", "gsm8k"), ("math_train", "math500"), ("mbpp_train", "mbpp")):
        scored = {item.messages[-1]["content"] for item in get_benchmark(test).load(golden)}
        assert not scored & {item.messages[-1]["content"] for item in sets[train]}
