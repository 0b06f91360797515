"""Sets whose prompts are decoded for throughput and acceptance, with no scorer here."""

from __future__ import annotations

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Loader, Scorer
from dlmgrid.workers.benchmarks.data_file import DataFile


def generation_set(
    *,
    name: str,
    title: str,
    prompt: str,
    prompt_version: str,
    gen_length: int,
    why_not_scored: str,
    loader: Loader,
    files: tuple[DataFile, ...],
    calibration: bool = False,
) -> Benchmark:
    """A zero-shot chat benchmark every row of which is stored as ``not_scored`` with the reason."""
    unscored = Scorer(
        name="none",
        metrics=("score",),
        runs_code=False,
        summary=f"not scored: {why_not_scored}",
        version=lambda: "1",
        why_not_scored=why_not_scored,
    )
    return Benchmark(
        name=name,
        title=title,
        source="; ".join(file.origin for file in files),
        chat=True,
        prompt=prompt,
        default_gen_length=gen_length,
        max_fewshot=0,
        stop="the model's stop token or the generation length",
        extraction="none",
        postprocessing="none",
        scorers=(unscored,),
        scoring="",
        versions=lambda num_fewshot: f"{prompt_version}/chat/0-shot",
        loader=loader,
        calibration=calibration,
        files=files,
        exceptions="not applicable: there is no scorer",
    )
