"""The ``dlmgrid`` command: one table of commands, each a module of this folder.

A command is the function ``command`` of ``dlmgrid.jobs.<name>``, its parameters annotated for typer. It returns
its exit code (None is 0) and raises InputError for what the user can mend. Only the module of the command that
is called gets imported, so ``dlmgrid --help`` is fast and an optional package is missed only where it is used.

What the machine refuses (a file, memory, a device) is one line as well.

Exit codes: 0 done and exact; 1 rows failed; 2 bad input or usage, before any model loads; 3 a gate was breached;
4 exactness failed; 5 incomplete; 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import dlmgrid
from dlmgrid.workers.errors import DlmgridError, InputError

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


_PATH_FAULTS = {
    errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
_NO_MEMORY = re.compile(r"out of memory|can't allocate|Unable to allocate|alloc_cpu", re.IGNORECASE)


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
    :func:`refusal`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = next((word for word in words if not word.startswith("-")), "")
    try:
        _refuse_impossible(words)
        app = build_app([called] if called in COMMANDS else [])
        app(words, prog_name="dlmgrid")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except (DlmgridError, OSError, MemoryError, RuntimeError) as error:
        message, code = refusal(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(code)


def refusal(error: Exception) -> tuple[str, int]:
    """What the machine refused in one line, and the exit code: 2 for a path of the user's, else 5, not finished.

    torch's errors are plain RuntimeErrors that rarely name their cause, so the line also says where it was met.
    """
    text = " ".join(str(error).split())[:400]
    if isinstance(error, OSError):
        names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        message = f"{names}: {error.strerror or text}" if names else text or type(error).__name__
        if error.errno in _PATH_FAULTS and names:
            return f"{message}; name another path", 2
        return f"{message}; mend it and give the same command again", 5
    if isinstance(error, DlmgridError):
        return text, 5
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or _NO_MEMORY.search(text)
    ):
        return (
            f"there is not enough memory ({text or 'MemoryError'}); ask for less at once, such as smaller batches",
            5,
        )
    return f"{text or type(error).__name__} (a {type(error).__name__} at {_place(error)})", 5


def _place(error: Exception) -> str:
    """The innermost line of this package that an error passed: ``workers/units.py:12``."""
    root = Path(dlmgrid.__file__).resolve().parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    files = [(Path(frame.filename).resolve(), frame.lineno) for frame in frames]
    ours = [(file, line) for file, line in files if file.is_relative_to(root)]
    file, line = (ours or files)[-1]
    return f"{file.relative_to(root) if ours else file}:{line}"


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
