"""The benchmarks by name. Free of torch and of every scoring package."""

from __future__ import annotations

from difflib import get_close_matches

from dlmgrid.workers.benchmarks.aime import AIME24, AIME25
from dlmgrid.workers.benchmarks.alpaca import ALPACA
from dlmgrid.workers.benchmarks.benchmark import Benchmark
from dlmgrid.workers.benchmarks.generated_benchmarks import FUNCTIONS, FUNCTIONS_TRAIN, WORDS, WORDS_TRAIN
from dlmgrid.workers.benchmarks.gsm8k import GSM8K, GSM8K_QUESTION
from dlmgrid.workers.benchmarks.humaneval import HUMANEVAL, HUMANEVAL_PLUS_BENCHMARK
from dlmgrid.workers.benchmarks.ifeval import IFEVAL
from dlmgrid.workers.benchmarks.livecodebench import LIVECODEBENCH
from dlmgrid.workers.benchmarks.math500 import MATH500
from dlmgrid.workers.benchmarks.mbpp import MBPP, MBPP_PLUS_BENCHMARK
from dlmgrid.workers.benchmarks.mt_bench import MT_BENCH
from dlmgrid.workers.benchmarks.swe_bench_lite import SWE_BENCH_LITE
from dlmgrid.workers.benchmarks.training_sets import (
    CHAT_TRAIN_SET,
    GSM8K_TRAIN_SET,
    MATH_TRAIN_SET,
    MBPP_TRAIN_SET,
)
from dlmgrid.workers.errors import InputError

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        WORDS,
        FUNCTIONS,
        WORDS_TRAIN,
        FUNCTIONS_TRAIN,
        GSM8K,
        GSM8K_QUESTION,
        MATH500,
        AIME24,
        AIME25,
        IFEVAL,
        HUMANEVAL,
        HUMANEVAL_PLUS_BENCHMARK,
        MBPP,
        MBPP_PLUS_BENCHMARK,
        LIVECODEBENCH,
        SWE_BENCH_LITE,
        MT_BENCH,
        ALPACA,
        GSM8K_TRAIN_SET,
        MATH_TRAIN_SET,
        MBPP_TRAIN_SET,
        CHAT_TRAIN_SET,
    )
}


def benchmark_names() -> tuple[str, ...]:
    """Names of all benchmarks, in the order in which they are listed."""
    return tuple(BENCHMARKS)


def get_benchmark(name: str) -> Benchmark:
    """The benchmark called ``name``. Raises InputError naming the nearest one."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    nearest = get_close_matches(name, BENCHMARKS, n=1, cutoff=0.0)
    hint = f"did you mean {nearest[0]!r}?" if nearest else ""
    raise InputError(f"unknown benchmark {name!r}: {hint} Known: {', '.join(BENCHMARKS)}")
