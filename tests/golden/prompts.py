"""The frozen prompts: what every benchmark asks of the rows in ``data/``, rendered to text, byte for byte.

``make golden`` writes the files in ``prompts/`` again, one for each benchmark and number of worked examples. A
change of them is a change of what models are asked, so it needs another prompt version.
"""

from __future__ import annotations

from pathlib import Path

from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.models.catalog import resolve_checkpoint
from dlmgrid.workers.tokenization import load_tokenizer

FOLDER = Path(__file__).resolve().parent
NUM_ITEMS = 2


def golden_names() -> list[tuple[str, int]]:
    """(benchmark, worked examples): zero-shot for all, and one more for those that take examples."""
    names = [(name, 0) for name in benchmark_names()]
    return names + [
        (name, min(5, get_benchmark(name).max_fewshot))
        for name in benchmark_names()
        if get_benchmark(name).max_fewshot
    ]


def golden_path(name: str, num_fewshot: int) -> Path:
    return FOLDER / "prompts" / f"{name}-{num_fewshot}-shot.txt"


def rendered_prompts(name: str, num_fewshot: int) -> bytes:
    """The prompts under ChatML with the reference model's tokenizer, each after its item and prompt version."""
    encoder = load_tokenizer(resolve_checkpoint("reference"), "chatml")
    benchmark = get_benchmark(name)
    version = benchmark.prompt_version(num_fewshot)
    items = benchmark.load(FOLDER / "data", NUM_ITEMS, num_fewshot)
    parts = [f"=== {item.item_id} {version}\n{encoder.render(item)}" for item in items]
    return "\n".join(parts).encode() + b"\n"


if __name__ == "__main__":
    (FOLDER / "prompts").mkdir(exist_ok=True)
    for benchmark_name, shots in golden_names():
        golden_path(benchmark_name, shots).write_bytes(rendered_prompts(benchmark_name, shots))
