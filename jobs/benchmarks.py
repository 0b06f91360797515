"""``dlmgrid benchmarks [NAME]``: the benchmarks, or everything that decides one benchmark's number."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlmgrid.workers.benchmarks.benchmark import Benchmark, Scorer
from dlmgrid.workers.benchmarks.catalog import benchmark_names, get_benchmark
from dlmgrid.workers.benchmarks.data import is_at_hand
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Describe this benchmark in full.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="Data folder for the example item.")
    ] = None,
    num_fewshot: Annotated[
        int, typer.Option("--num-fewshot", min=0, help="Worked examples in the prompt.")
    ] = 0,
) -> None:
    """List the benchmarks, or describe one: prompt, shots, stopping, extraction, scorers, an example.

    Nothing is fetched: the example is shown where the data is in the folder of --data or DLMGRID_DATA, or was
    prefetched.
    """
    console = wide_console()
    if name is None:
        console.print(_overview())
    else:
        benchmark = get_benchmark(name)
        for label, text in describe(benchmark, num_fewshot):
            console.print(f"[bold]{label}[/bold]: {escape(text)}")
        console.print(_example(benchmark, data, num_fewshot), markup=False, highlight=False)


def wide_console() -> Console:
    """A console as wide as the terminal; 160 columns in a log or a pipe, where nothing may be cut."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=160)


def _overview() -> Table:
    table = Table("name", "title", "prompt", "few-shot", "scorers", "runs code")
    for name in benchmark_names():
        benchmark = get_benchmark(name)
        scorers = ", ".join(scorer.name for scorer in benchmark.scorers)
        runs_code = "yes" if any(scorer.runs_code for scorer in benchmark.scorers) else "no"
        kind = "chat" if benchmark.chat else "raw"
        table.add_row(name, benchmark.title, kind, f"0-{benchmark.max_fewshot}", scorers, runs_code)
    return table


def describe(benchmark: Benchmark, num_fewshot: int = 0) -> list[tuple[str, str]]:
    """Labels and texts of the full description, in the order in which they are printed."""
    lines = [
        ("benchmark", f"{benchmark.name}: {benchmark.title}"),
        ("source", benchmark.source),
        ("prompt version", benchmark.prompt_version(num_fewshot)),
        ("prompt", f"{'chat' if benchmark.chat else 'raw'}; {benchmark.prompt}"),
        ("shots", f"{num_fewshot} (0 to {benchmark.max_fewshot}; the papers use 0)"),
        ("default generation length", f"{benchmark.default_gen_length} tokens"),
        ("stop policy", benchmark.stop),
        ("extraction", benchmark.extraction),
        ("post-processing", benchmark.postprocessing),
    ]
    for scorer in benchmark.scorers:
        unsafe = "; runs generated code, after an explicit opt-in" if scorer.runs_code else ""
        lines.append(
            (
                f"scorer {scorer.name}",
                f"{scorer.summary}; metrics {', '.join(scorer.metrics)}; {_version(scorer)}{unsafe}",
            )
        )
    lines.append(("gold answers that do not score", benchmark.exceptions))
    lines.extend(
        (f"data DIR/{file.path}", f"{file.num_rows} rows; {', '.join(file.columns)}; from {file.origin}")
        for file in benchmark.files
    )
    return lines


def _version(scorer: Scorer) -> str:
    try:
        return f"version: {scorer.version()}"
    except InputError as error:
        return str(error)


def _example(benchmark: Benchmark, data: str | None, num_fewshot: int) -> str:
    if not is_at_hand(benchmark.files, data):
        return f"example item: run `dlmgrid prefetch {benchmark.name}`, or name a data folder by --data DIR"
    try:
        item = benchmark.load(data, 1, num_fewshot)[0]
    except InputError as error:
        return f"example item: not available here ({error})"
    return "\n".join(["example item:", *_rendered(item)])


def _rendered(item: Item) -> list[str]:
    turns = item.messages if item.messages is not None else [{"role": "prompt", "content": item.prompt or ""}]
    lines = [f"  id: {item.item_id}"]
    for turn in turns:
        lines.append(f"  {turn['role']}:")
        lines.extend(f"    | {line}" for line in turn["content"].split("\n"))
    if item.assistant_prefix:
        lines.append("  assistant (opened by the prompt):")
        lines.extend(f"    | {line}" for line in item.assistant_prefix.split("\n"))
    return lines
