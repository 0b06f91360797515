"""What the benchmarks that lm-eval scores share: chat prompts, their versions, stopping, and the scorer."""

from __future__ import annotations

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Loader
from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.benchmarks.lm_eval_catalog import SCORING, LmEvalTask, lm_eval_scorer

LENGTH_OR_STOP_TOKEN = "the model's stop token or the generation length"


def stop_policy(strings: str) -> str:
    """The words about a task whose own stop strings are applied to the decoded text."""
    return (
        f"{LENGTH_OR_STOP_TOKEN}. lm-eval's own stop strings ({strings}) are not applied while decoding: the text "
        "is cut at the first of them before it is scored, as lm-eval's models do"
    )


def lm_eval_benchmark(
    task: LmEvalTask,
    *,
    name: str,
    title: str,
    source: str,
    prompt: str,
    gen_length: int,
    stop: str,
    extraction: str,
    scores: str,
    loader: Loader,
    files: tuple[DataFile, ...],
    postprocessing: str = "none",
    max_fewshot: int = 0,
    prompt_version: str = "",
    also: tuple[str, ...] = (),
    exceptions: str = "none known",
) -> Benchmark:
    """A benchmark over ``files`` that ``task`` scores.

    ``prompt_version`` names a prompt that is not the task's own. ``scores`` says what the scorer does; ``also``
    names the packages whose version decides scores.
    """
    version = prompt_version or f"lm-eval-{task.name}-{task.version}"
    return Benchmark(
        name=name,
        title=title,
        source=source,
        chat=True,
        prompt=prompt,
        default_gen_length=gen_length,
        max_fewshot=max_fewshot,
        stop=stop,
        extraction=extraction,
        postprocessing=postprocessing,
        scorers=(lm_eval_scorer(task, f"lm-eval's task {task.name}: {scores}", also),),
        scoring=SCORING,
        versions=lambda num_fewshot: f"{version}/chat/{num_fewshot}-shot",
        loader=loader,
        files=files,
        exceptions=exceptions,
    )
