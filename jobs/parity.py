"""``python -m dlmgrid.jobs.parity OUT``: are the scores of a run those of lm-eval and EvalPlus themselves?

Scores the run, then gives the same texts to lm-eval's evaluator, through a model that replays them, and the
exported samples to EvalPlus' command line, and prints every item whose value differs. Exit code 0: none does; 1:
some do; 2: bad input; 5: a tool failed or took too long. EvalPlus' command line runs generated code under its own
guard, so ``--confirm-run-unsafe-code`` is needed where the run has such answers. It is given the time limit of our
second try, alone on the machine: its default of one second a test makes verdicts depend on what else the machine
does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from dlmgrid.cluster.export import CellAnswers, export_run, read_cells
from dlmgrid.cluster.report import load_scores
from dlmgrid.workers.benchmarks.evalplus_check import MIN_TIME_LIMIT_SECONDS
from dlmgrid.workers.benchmarks.lm_eval_catalog import SCORER_NAME, TASKS
from dlmgrid.workers.benchmarks.lm_eval_task import cut_at_stop_strings
from dlmgrid.workers.benchmarks.scoring import score_run
from dlmgrid.workers.benchmarks.verdict import ALONE
from dlmgrid.workers.errors import DlmgridError, InputError, TransientError
from dlmgrid.workers.exchange.evalplus_samples import DATASETS, PROBLEM_VARIABLES, evaluate_words
from dlmgrid.workers.exchange.lm_eval_samples import load_task, stop_strings

# EvalPlus' own bound on one program's two sets of tests, and on starting and on the reference solutions.
SECONDS_PER_PROGRAM = 150
SECONDS_TO_START = 600
# EvalPlus' watchdog thread sleeps on for 20 s after the results are written; as a daemon it ends with the program.
_EVALPLUS = (
    "import functools, threading, evalplus.evaluate\n"
    "threading.Thread = functools.partial(threading.Thread, daemon=True)\n"
    "evalplus.evaluate.main()"
)

# (cell, item, repeat, metric)
ValueKey = tuple[str, str, int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A value that differs. None: there is no value on that side."""

    scorer: str
    key: ValueKey
    ours: float | None
    theirs: float | None

    def __str__(self) -> str:
        cell_key, item_id, repeat, metric = self.key
        place = f"{item_id} repeat {repeat} cell {cell_key}"
        return f"{self.scorer} {metric} {place}: {self.ours} here, {self.theirs} there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """``num_compared`` values of metrics were compared, over all cells, items and repeats."""

    num_compared: int
    differences: tuple[Difference, ...]


class ReplayLM(LM):
    """A model of lm-eval that answers from a list: document ``i`` gets ``texts[i]``, cut as models cut."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._texts = list(texts)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [
            cut_at_stop_strings(self._texts[request.doc_id], stop_strings(request.args[1]))
            for request in requests
        ]

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        raise InputError("a replayed run has texts only, no log-likelihoods")

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> NoReturn:
        raise InputError("a replayed run has texts only, no log-likelihoods")


def compare_run(run_dir: Path, *, confirm_run_unsafe_code: bool = False, workers: int = 2) -> Parity:
    """Score a run here and by both tools, and compare value by value.

    Raises InputError for a run without answers that one of them scores, and for answers that are code without
    the opt-in.
    """
    cells = [cell for cell in read_cells(run_dir, [*TASKS, *DATASETS]) if cell.texts]
    names = sorted({cell.first["benchmark"] for cell in cells})
    if not names:
        raise InputError(
            f"{run_dir} has no answers that lm-eval or EvalPlus score: {', '.join([*TASKS, *DATASETS])}"
        )
    if not confirm_run_unsafe_code and set(names) & set(DATASETS):
        raise InputError("the run has answers that are code; pass --confirm-run-unsafe-code to run them")
    score_run(run_dir, benchmarks=names, confirm_run_unsafe_code=confirm_run_unsafe_code, workers=workers)
    theirs: dict[str, dict[ValueKey, float]] = {
        SCORER_NAME: {},
        "evalplus": evalplus_values(run_dir, cells, workers),
    }
    for cell in cells:
        if cell.first["benchmark"] in TASKS:
            theirs[SCORER_NAME] |= lm_eval_values(cell)
    differences: list[Difference] = []
    num_compared = 0
    for scorer, values in theirs.items():
        ours = _our_values(run_dir, scorer, {cell.first["cell_key"] for cell in cells})
        num_compared += len(values.keys() | ours.keys())
        differences += [
            Difference(scorer=scorer, key=key, ours=ours.get(key), theirs=values.get(key))
            for key in sorted(values.keys() | ours.keys())
            if ours.get(key) != values.get(key)
        ]
    return Parity(num_compared=num_compared, differences=tuple(differences))


def _our_values(run_dir: Path, scorer: str, cell_keys: set[str]) -> dict[ValueKey, float]:
    """Stored values of a scorer, the last version's."""
    rows = [row for row in load_scores(run_dir).to_pylist() if row["scorer"] == scorer]
    return {
        (row["cell_key"], row["item_id"], row["repeat"], row["metric"]): row["value"]
        for row in sorted(rows, key=lambda row: (row["scored_at"] is not None, row["scored_at"]))
        if row["value"] is not None and row["cell_key"] in cell_keys
    }


def lm_eval_values(cell: CellAnswers) -> dict[ValueKey, float]:
    """What lm-eval's evaluator gives each answer of a cell, one evaluation for each repeat."""
    values: dict[ValueKey, float] = {}
    benchmark, cell_key = cell.first["benchmark"], cell.first["cell_key"]
    for repeat in sorted({repeat for texts in cell.texts.values() for repeat in texts}):
        item_ids = [item_id for item_id, texts in cell.texts.items() if repeat in texts]
        task = load_task(benchmark, [cell.items[item_id].document for item_id in item_ids])
        model = ReplayLM([cell.texts[item_id][repeat] for item_id in item_ids])
        name = task.config.task
        task.process_results = _reseeded(task.process_results)
        results = evaluate(
            lm=model, task_dict={"tasks": {name: task}, "groups": {}}, bootstrap_iters=0, log_samples=True
        )
        for sample in results["samples"][name]:
            for metric in sample["metrics"]:
                value, label = sample[metric], metric
                if isinstance(value, list):  # IFEval's truth values, one an instruction; ours is their share
                    value, label = sum(value) / len(value), f"{metric.removesuffix('_acc')}_share"
                key = (cell_key, item_ids[sample["doc_id"]], repeat, f"{label},{sample['filter']}")
                values[key] = float(value)
    return values


def _reseeded(process_results: Callable[..., Any]) -> Callable[..., Any]:
    """IFEval's checker draws what a document leaves open: as in our scorer, the same for each answer."""

    def process(document: Any, results: Any) -> Any:
        random.seed(0)
        return process_results(document, results)

    return process


def evalplus_values(run_dir: Path, cells: Sequence[CellAnswers], workers: int) -> dict[ValueKey, float]:
    """What EvalPlus' command line gives the exported samples of each cell."""
    values: dict[ValueKey, float] = {}
    with tempfile.TemporaryDirectory(prefix="dlmgrid-parity-") as folder:
        for cell in cells:
            if cell.first["benchmark"] in DATASETS:
                results = _run_evalplus(run_dir, cell, Path(folder), workers)
                values |= _values_of_results(cell, results)
    return values


def _run_evalplus(run_dir: Path, cell: CellAnswers, folder: Path, workers: int) -> dict[str, Any]:
    benchmark = cell.first["benchmark"]
    exported = {file.path.name: file for file in export_run(run_dir, "evalplus", folder, [benchmark])}
    (file,) = (file for name, file in exported.items() if cell.name in name)
    environment = {
        **os.environ,
        PROBLEM_VARIABLES[DATASETS[benchmark][0]]: str(file.problems),
        "XDG_CACHE_HOME": str(folder / "cache"),  # where EvalPlus keeps expected outputs, by the problem file
    }
    words = [*evaluate_words(benchmark, str(file.path)), "--parallel", str(workers)]
    words += ["--min_time_limit", str(MIN_TIME_LIMIT_SECONDS[ALONE])]
    process = subprocess.run(
        [sys.executable, "-c", _EVALPLUS, *words],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=SECONDS_TO_START + SECONDS_PER_PROGRAM * file.num_answers,
    )  # fmt: skip
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or ["no output"]
        raise TransientError(f"evalplus.evaluate ended with status {process.returncode}: {lines[-1]}")
    path = file.path.with_name(file.path.name.replace(".jsonl", "_eval_results.json"))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _values_of_results(cell: CellAnswers, results: dict[str, Any]) -> dict[ValueKey, float]:
    values: dict[ValueKey, float] = {}
    for item_id, texts in cell.texts.items():
        for repeat, result in zip(texts, results["eval"][item_id], strict=True):
            key = (cell.first["cell_key"], item_id, repeat)
            base = result["base_status"] == "pass"
            values[*key, "pass@1,base"] = float(base)
            if not DATASETS[cell.first["benchmark"]][1]:
                values[*key, "pass@1,plus"] = float(base and result["plus_status"] == "pass")
    return values


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module docstring; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dlmgrid.jobs.parity", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--confirm-run-unsafe-code", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)
    try:
        parity = compare_run(
            given.out, confirm_run_unsafe_code=given.confirm_run_unsafe_code, workers=given.workers
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DlmgridError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}; nothing was compared", file=sys.stderr)
        return 5
    for difference in parity.differences:
        print(difference)
    print(f"{parity.num_compared} values compared, {len(parity.differences)} differ")
    return 1 if parity.differences else 0


if __name__ == "__main__":
    sys.exit(main())
