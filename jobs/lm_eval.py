"""``dlmgrid lm-eval …``: lm-eval's own command line, with this project's decoder as one of its models.

lm-eval has no entry point for models of other packages, so this command registers the class and hands all
arguments on, unchanged but for two that are put in where an evaluation does not name them: ``--model dlmgrid``,
and ``--device cpu`` on a machine without a GPU, where lm-eval would ask for cuda:0.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from dlmgrid.workers.benchmarks.benchmark import package_version
from dlmgrid.workers.errors import InputError

_NO_EVALUATION = ("ls", "validate", "-h", "--help")


def command(context: typer.Context) -> int:
    """Run lm-eval on this decoder: dlmgrid lm-eval --tasks gsm8k --model_args path=reference,method=ssd,budget=8.

    Everything after the name is lm-eval's; `dlmgrid lm-eval run --help` lists it. Exits with 4 when verify=true
    finds an answer that claims exactness and lacks it.
    """
    package_version("lm_eval", "[math,ifeval]")
    from lm_eval.__main__ import cli_evaluate

    from dlmgrid.jobs.lm_eval_model import DlmgridLM  # the import registers it

    words = completed(context.args)
    num_broken = DlmgridLM.num_broken_claims
    before = sys.argv
    sys.argv = ["lm-eval", *words]
    try:
        if is_evaluation_of_ours(words):
            check_model_args()
        cli_evaluate()
    except ValueError as error:
        if not _is_of_its_arguments(error):
            raise
        raise InputError(f"lm-eval: {error}; `dlmgrid lm-eval ls tasks` lists its tasks") from error
    finally:
        sys.argv = before
    return 4 if DlmgridLM.num_broken_claims > num_broken else 0


def is_evaluation_of_ours(words: Sequence[str]) -> bool:
    """Whether completed arguments evaluate this project's model, with its arguments among them."""
    if words[:1] != ["run"] or {"-h", "--help", "--config", "-C"} & {
        word.partition("=")[0] for word in words
    }:
        return False
    return "dlmgrid" in words or "--model=dlmgrid" in words


def check_model_args() -> None:
    """Make the model that ``sys.argv`` asks for, before lm-eval takes its time to load tasks; no weights are read.

    Raises InputError as the model does, and ValueError for arguments that lm-eval cannot read.
    """
    from lm_eval._cli import HarnessCLI

    from dlmgrid.jobs.lm_eval_model import DlmgridLM

    given = HarnessCLI().parse_args()
    names = ("batch_size", "max_batch_size", "device")
    options = {name: getattr(given, name, None) for name in names}
    DlmgridLM.create_from_arg_obj(given.model_args or {}, options)


def _is_of_its_arguments(error: ValueError) -> bool:
    """Whether lm-eval raised an error over what it was asked for, as an unknown task."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return "lm_eval" in last.parts and last.parent.name in ("config", "_cli", "tasks")


def completed(words: Sequence[str]) -> list[str]:
    """The arguments for lm-eval, with model and device where an evaluation of ours names none.

    Those of a configuration file, of another model and of another sub-command are left as they are.
    """
    words = list(words)
    if not words or words[0] in _NO_EVALUATION or {"-h", "--help"} & set(words):
        return words
    given = {word.partition("=")[0] for word in words}
    if given & {"--config", "-C"}:
        return words
    options = words[1:] if words[0] == "run" else words
    added = [] if given & {"--model", "-M"} else ["--model", "dlmgrid"]
    is_ours = bool(added) or "dlmgrid" in words or "--model=dlmgrid" in words
    if is_ours and "--device" not in given and not has_gpu():
        added += ["--device", "cpu"]
    return ["run", *added, *options]


def has_gpu() -> bool:
    """Whether torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()
