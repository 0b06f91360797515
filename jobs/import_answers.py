"""``dlmgrid import FILE --benchmark B --out DIR``: answers made elsewhere, to be scored and reported here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dlmgrid.cluster.imports import ImportRequest, ImportSummary, import_answers

NUM_SHOWN = 5


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Answers as JSON lines.")],
    benchmark: Annotated[str, typer.Option("--benchmark", help="The benchmark that they answer.")],
    out: Annotated[Path, typer.Option("--out", help="Output folder: new, or of earlier imports.")],
    data: Annotated[
        str | None, typer.Option(help="Folder with the benchmark's data, instead of the hub.")
    ] = None,
    model: Annotated[str, typer.Option(help="Names what made the answers; default the file's name.")] = "",
    temperature: Annotated[float, typer.Option(min=0, help="What they were sampled at.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Answers an item may have.")] = 1,
) -> None:
    """Take in answers made elsewhere: EvalPlus' samples.jsonl, samples that lm-eval logged, or lines with item_id
    and text.

    The rows say `imported` for method and claim and have no exactness verdict. `dlmgrid score` and `dlmgrid
    report` work on the folder as on any other. Items without an answer are named; the score is of those answered.
    """
    request = ImportRequest(
        file=file,
        benchmark=benchmark,
        out=out,
        data=data,
        model=model,
        temperature=temperature,
        repeats=repeats,
    )
    summary = import_answers(request, say=_say)
    _warn_of_missing(summary)
    typer.echo(
        f"{summary.num_added} answers added from a file of the {summary.shape} shape, {summary.num_kept} were "
        f"there already; next: dlmgrid score {shlex.quote(str(out))}"
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _warn_of_missing(summary: ImportSummary) -> None:
    if summary.missing:
        shown = ", ".join(summary.missing[:NUM_SHOWN]) + (", …" if len(summary.missing) > NUM_SHOWN else "")
        _say(f"warning: {len(summary.missing)} items of the benchmark have no answer: {shown}")
