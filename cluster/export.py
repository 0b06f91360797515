"""A run's answers as files that lm-eval or EvalPlus read: one for each cell, with a name that says the cell."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmgrid.cluster.report import load_generations, load_scores
from dlmgrid.workers.benchmarks.catalog import get_benchmark
from dlmgrid.workers.benchmarks.lm_eval_catalog import SCORER_NAME, TASKS
from dlmgrid.workers.cell import digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.exchange import evalplus_samples, lm_eval_samples
from dlmgrid.workers.exchange.lm_eval_samples import Answered
from dlmgrid.workers.items import Item, inputs_file_name, read_items
from dlmgrid.workers.partial_files import partial_path

FORMATS: dict[str, Mapping[str, Any]] = {
    "lm-eval": TASKS,
    "evalplus": evalplus_samples.DATASETS,
}
_COLUMNS = (
    "cell_key", "model", "benchmark", "prompt_version", "num_fewshot", "method", "budget", "temperature",
    "temperature_text", "gen_length", "item_id", "repeat", "text", "error",
)  # fmt: skip
_MAX_MODEL_CHARACTERS = 60

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellAnswers:
    """The stored answers of one cell: ``texts`` by item in the data set's order, then by repeat.

    ``first`` is a row of the cell, for its settings; ``num_left_out`` counts rows that hold an error and no text.
    """

    first: Row
    items: dict[str, Item]
    doc_ids: dict[str, int]
    texts: dict[str, dict[int, str]]
    num_left_out: int

    @property
    def name(self) -> str:
        """What sets the cell apart, as a part of a file name."""
        first = self.first
        model = re.sub(r"[^\w.-]+", "_", first["model"])[-_MAX_MODEL_CHARACTERS:].strip("_.")
        temperature = first["temperature_text"]
        return f"{model}_{first['method']}-D{first['budget']}_T{temperature}_{first['cell_key'][:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFile:
    """A file of answers. ``problems`` is EvalPlus' problem file that goes with it."""

    path: Path
    benchmark: str
    num_answers: int
    num_left_out: int
    num_without_program: int = 0
    problems: Path | None = None


def read_cells(run_dir: Path, wanted: Iterable[str]) -> list[CellAnswers]:
    """The answers of every cell of the wanted benchmarks, with their items.

    Raises InputError for a folder that is not a run's, and an item that its inputs lack.
    """
    names = set(wanted)
    rows_of_cell: dict[str, list[Row]] = defaultdict(list)
    for row in load_generations(run_dir, _COLUMNS).to_pylist():
        if row["benchmark"] in names:
            rows_of_cell[row["cell_key"]].append(row)
    items_of_file: dict[Path, dict[str, Item]] = {}
    cells = []
    for _, rows in sorted(rows_of_cell.items()):
        first = rows[0]
        file_name = inputs_file_name(first["benchmark"], first["prompt_version"], first["num_fewshot"])
        path = run_dir / "inputs" / file_name
        if path not in items_of_file:
            if not path.is_file():
                raise InputError(f"{path} is missing; put it back, it holds the documents of these answers")
            items_of_file[path] = {item.item_id: item for item in read_items(path)}
        cells.append(_cell_answers(rows, items_of_file[path], path))
    return cells


def _cell_answers(rows: Sequence[Row], items: dict[str, Item], path: Path) -> CellAnswers:
    doc_ids = {item_id: number for number, item_id in enumerate(items)}
    texts: dict[str, dict[int, str]] = defaultdict(dict)
    num_left_out = 0
    for row in rows:
        if row["item_id"] not in doc_ids:
            raise InputError(f"{path}: no item {row['item_id']!r}; its generations cannot be exported")
        if row["text"] is None or row["error"] is not None:
            num_left_out += 1
        else:
            texts[row["item_id"]][row["repeat"]] = row["text"]
    return CellAnswers(
        first=rows[0],
        items=items,
        doc_ids=doc_ids,
        texts={
            item_id: dict(sorted(texts[item_id].items()))
            for item_id in sorted(texts, key=doc_ids.__getitem__)
        },
        num_left_out=num_left_out,
    )


def export_run(
    run_dir: Path, file_format: str, to: Path, benchmarks: Sequence[str] | None = None
) -> list[ExportedFile]:
    """Write the files of one format; a file that is there is replaced whole.

    Raises InputError for an unknown format or benchmark, a run without answers of that format, and a folder that
    cannot be written or holds EvalPlus' results of other samples under the same name.
    """
    if file_format not in FORMATS:
        raise InputError(f"--format {file_format} is not one of {', '.join(FORMATS)}")
    readable = FORMATS[file_format]
    names = list(readable) if benchmarks is None else [get_benchmark(name).name for name in benchmarks]
    for name in names:
        if name not in readable:
            raise InputError(f"{file_format} has no form for {name!r}; it has one for {', '.join(readable)}")
    cells = [cell for cell in read_cells(run_dir, names) if cell.texts]
    if not cells:
        raise InputError(f"{run_dir} has no answers to {', '.join(names)}, which is what {file_format} reads")
    try:
        to.mkdir(parents=True, exist_ok=True)
        if file_format == "evalplus":
            return [_export_evalplus(cell, to) for cell in cells]
        values = _metric_values(run_dir)
        return [_export_lm_eval(cell, to, values) for cell in cells]
    except OSError as error:
        raise InputError(f"{to} cannot be written ({error.strerror}); choose another --to") from error


def _export_evalplus(cell: CellAnswers, to: Path) -> ExportedFile:
    benchmark = cell.first["benchmark"]
    documents = [cell.items[item_id].document for item_id in cell.texts]
    solutions = [
        evalplus_samples.make_solution(text, cell.items[item_id].document)
        for item_id, texts in cell.texts.items()
        for text in texts.values()
    ]
    path = to / f"{benchmark}_{cell.name}.jsonl"
    content = "".join(solution.to_line() for solution in solutions)
    results = path.with_name(path.name.replace(".jsonl", "_eval_results.json"))
    if results.exists() and not (path.is_file() and path.read_text(encoding="utf-8") == content):
        raise InputError(
            f"{results} holds EvalPlus' results of other samples, which it would show again; remove it"
        )
    problems = to / f"problems_{benchmark}_{digest([benchmark, list(cell.texts)])[:8]}.jsonl"
    if not problems.exists():
        _write(problems, evalplus_samples.problem_lines(documents))
    _write(path, [content])
    return ExportedFile(
        path=path,
        benchmark=benchmark,
        num_answers=len(solutions),
        num_left_out=cell.num_left_out,
        num_without_program=sum(not solution.is_extracted for solution in solutions),
        problems=problems,
    )


_Values = Mapping[tuple[str, str, int], Mapping[tuple[str, str], float]]


def _export_lm_eval(cell: CellAnswers, to: Path, values: _Values) -> ExportedFile:
    benchmark, cell_key = cell.first["benchmark"], cell.first["cell_key"]
    answered = [
        Answered(
            doc_id=cell.doc_ids[item_id],
            item=cell.items[item_id],
            texts=tuple(texts.values()),
            values=values.get((cell_key, item_id, min(texts)), {}),
        )
        for item_id, texts in cell.texts.items()
    ]
    task = lm_eval_samples.load_task(benchmark, [one.item.document for one in answered])
    first = cell.first
    rows = lm_eval_samples.sample_rows(
        task, answered, gen_length=first["gen_length"], temperature=first["temperature"]
    )
    path = to / f"samples_{TASKS[benchmark].name}_{cell.name}.jsonl"
    _write(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return ExportedFile(
        path=path,
        benchmark=benchmark,
        num_answers=sum(len(one.texts) for one in answered),
        num_left_out=cell.num_left_out,
    )


def _metric_values(run_dir: Path) -> dict[tuple[str, str, int], dict[tuple[str, str], float]]:
    """Scores of lm-eval's tasks by key, each by metric and filter; the last scorer version wins.

    A ``…_share`` is left out: it is ours, where lm-eval has a list of one truth value for each instruction.
    """
    found: dict[tuple[str, str, int], dict[tuple[str, str], float]] = defaultdict(dict)
    rows = [row for row in load_scores(run_dir).to_pylist() if row["scorer"] == SCORER_NAME]
    for row in sorted(rows, key=lambda row: (row["scored_at"] is not None, row["scored_at"])):
        if row["value"] is not None:
            metric, _, filter_name = row["metric"].partition(",")
            if metric.endswith("_share"):
                continue
            found[row["cell_key"], row["item_id"], row["repeat"]][metric, filter_name] = row["value"]
    return found


def _write(path: Path, parts: Iterable[str]) -> None:
    partial = partial_path(path)
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(parts)
    partial.replace(path)
