"""``dlmgrid lm-eval …``: lm-eval's own command line, with this project's decoder as one of its models.

lm-eval has no entry point for models of other packages, so this command registers the class and hands all
arguments on, unchanged but for ``--model dlmgrid``, which is put in where no model is named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from dlmgrid.workers.benchmarks.benchmark import package_version

_NAMES_A_MODEL = ("--model", "-M", "--config", "-C")
_NO_EVALUATION = ("ls", "validate", "-h", "--help")


def command(context: typer.Context) -> None:
    """Run lm-eval on this decoder: dlmgrid lm-eval --tasks gsm8k --model_args path=reference,method=ssd,budget=8.

    Everything after the name is lm-eval's; `dlmgrid lm-eval run --help` lists it.
    """
    package_version("lm_eval", "[math,ifeval]")
    from lm_eval.__main__ import cli_evaluate

    import dlmgrid.jobs.lm_eval_model  # noqa: F401 - registers the model

    before = sys.argv
    sys.argv = ["lm-eval", *with_model(context.args)]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def with_model(words: Sequence[str]) -> list[str]:
    """The arguments for lm-eval, with ``--model dlmgrid`` where an evaluation names no model."""
    words = list(words)
    if not words or words[0] in _NO_EVALUATION or {"-h", "--help"} & set(words):
        return words
    if any(word.split("=", 1)[0] in _NAMES_A_MODEL for word in words):
        return words
    options = words[1:] if words[0] == "run" else words
    return ["run", "--model", "dlmgrid", *options]
