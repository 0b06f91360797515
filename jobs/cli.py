"""The ``dlmgrid`` command: one table of commands, each a module of this folder.

A command is the function ``command`` of ``dlmgrid.jobs.<name>``, its parameters annotated for typer. It returns
its exit code (None is 0) and raises InputError for what the user can mend. Only the module of the command that
is called gets imported, so ``dlmgrid --help`` is fast and an optional package is missed only where it is used.

What the machine refuses (a file, memory, a device) is one line as well.

Exit codes: 0 done and exact; 1 rows failed; 2 bad input or usage, before any model loads; 3 a gate was breached;
4 exactness failed; 5 incomplete; 130 interrupted.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import dlmgrid
from dlmgrid.jobs.refusals import REFUSED, tell_refusal
from dlmgrid.workers.errors import InputError

COMMANDS = {
    "run": "Decode a grid on Ray; the same command resumes or extends.",
    "plan": "Show a grid's cells, keys and work units; decodes nothing.",
    "decode": "Decode planned work units here, without Ray.",
    "record": "Record the draft-free runs of a grid, step by step.",
    "replay": "Replay drafting methods on recorded runs; no model.",
    "study": "Compare replayed methods: one table, and the goals.",
    "diagnose": "Show what recorded runs say about drafting.",
    "train-order": "Train SPOT's order model on recorded runs.",
    "train-sets": "Train SPOT-Sets' drafter, or fit it to another target.",
    "calibrate": "Calibrate Spiffy's graph or SPOT-γ's floor on recorded runs.",
    "submit": "Send a grid to a Ray cluster as a job.",
    "score": "Score a run; a new scorer version adds rows.",
    "check": "Verify exactness again, from rows and a decoded sample.",
    "report": "Show forwards, speed, accuracy and exactness of a run.",
    "models": "List the known models, or check a checkpoint folder.",
    "benchmarks": "List the benchmarks, or describe one in full.",
    "prefetch": "Fetch benchmark data once; work offline afterwards.",
    "methods": "List the drafting methods, or describe one in full.",
    "export": "Write answers as files that lm-eval or EvalPlus score.",
    "import": "Take in answers made elsewhere, to score them here.",
    "lm-eval": "Run lm-eval's own command line on this decoder.",
    "doctor": "Check this machine and its packages, with remedies.",
}

# For a command whose arguments are another program's: nothing is parsed here, not even --help.
HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def module_name(name: str) -> str:
    """The module of a command; ``import`` cannot be the name of one."""
    return f"dlmgrid.jobs.{'import_answers' if name == 'import' else name.replace('-', '_')}"


def load_command(name: str) -> Callable[..., int | None]:
    """The function behind a command. Raises InputError when a package it imports is not installed."""
    try:
        module = importlib.import_module(module_name(name))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "dlmgrid"):
            raise
        raise InputError(
            f"`dlmgrid {name}` needs the package {package}, which is not installed: pip install {package}"
        ) from error
    command: Callable[..., int | None] = module.command
    return command


def build_app(loaded: Sequence[str]) -> typer.Typer:
    """The typer app, with the commands in ``loaded`` ready to run and the others known by name and help only."""
    app = typer.Typer(
        name="dlmgrid",
        help="Batch evaluation of accelerated decoding for diffusion language models, checked for exactness.",
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        rich_markup_mode=None,
    )

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
            ),
        ] = False,
    ) -> None:
        pass

    for name, summary in COMMANDS.items():
        function = _exit_with_its_code(load_command(name)) if name in loaded else _not_loaded
        app.command(
            name,
            short_help=summary,
            help=None if name in loaded else summary,
            context_settings=HANDED_ON if name == "lm-eval" else None,
        )(function)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    An InputError is one line on stderr and exit code 2; so is what the machine refuses, with the code of
    :func:`~dlmgrid.jobs.refusals.refusal`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = next((word for word in words if not word.startswith("-")), "")
    try:
        _refuse_impossible(words)
        app = build_app([called] if called in COMMANDS else [])
        app(words, prog_name="dlmgrid")
    except KeyboardInterrupt:
        sys.exit(130)
    except REFUSED as error:
        sys.exit(tell_refusal(error))


def _refuse_impossible(words: Sequence[str]) -> None:
    """Raises InputError for an argument that is empty (as a path that would be the current folder) or that no path
    can hold."""
    for before, word in zip(["", *words], words, strict=False):
        name = before if before.startswith("--") else "argument"
        if not word or (word.startswith("--") and word.endswith("=")):
            raise InputError(f"{word.rstrip('=') or name} is empty; give a value (an unset shell variable?)")
        if "\0" in word:
            raise InputError(f"{name} {word!r} holds a NUL character; remove it")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(dlmgrid.__version__)
        raise typer.Exit


def _exit_with_its_code(command: Callable[..., int | None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        code = command(*args, **kwargs)
        if code:
            raise typer.Exit(code)

    return run


def _not_loaded() -> None:
    raise AssertionError("main() loads the command that is called")


if __name__ == "__main__":
    main()
