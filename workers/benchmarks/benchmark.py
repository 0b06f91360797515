"""What a benchmark is: where its rows come from, how they become prompts, and who scores the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dlmgrid.workers.benchmarks.data_file import DataFile
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.items import Item

Loader = Callable[[str | Path | None, int | None, int], list[Item]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """One way to score an answer. Its rows in ``scores`` carry ``name`` and ``version()``.

    ``metrics`` are named as the tool that computes them names them. A scorer with ``runs_code`` executes text
    that a model wrote, so it runs only after an explicit opt-in. ``why_not_scored`` is the reason that every row
    gets instead of a value, for a set that only its prompts are used of; "" where there is a scorer.
    """

    name: str
    metrics: tuple[str, ...]
    runs_code: bool
    summary: str
    version: Callable[[], str]
    why_not_scored: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A named set of items with its prompt, its scorers, and the words that describe both.

    ``source`` names the data set and its pinned revision. ``chat`` tells whether items are chat messages,
    rendered by the model's own template, or raw text. ``scoring`` is the module whose
    ``score(text, document, options)`` gives the verdicts of every scorer at once; it is imported in the
    scoring process only ("" where nothing is scored). ``files`` are what ``prefetch`` fetches. ``exceptions``
    lists the items whose gold answer does not score, by the fault of the set or of the scorer.
    """

    name: str
    title: str
    source: str
    chat: bool
    prompt: str
    default_gen_length: int
    max_fewshot: int
    stop: str
    extraction: str
    postprocessing: str
    scorers: tuple[Scorer, ...]
    scoring: str
    versions: Callable[[int], str]
    loader: Loader
    files: tuple[DataFile, ...] = ()
    exceptions: str = "none known"

    def prompt_version(self, num_fewshot: int = 0) -> str:
        """Identifies the prompt before the model's chat template. Raises InputError for a bad count."""
        self._check_fewshot(num_fewshot)
        return self.versions(num_fewshot)

    def load(
        self, data: str | Path | None = None, limit: int | None = None, num_fewshot: int = 0
    ) -> list[Item]:
        """The first ``limit`` items (all for None) with ``num_fewshot`` worked examples in each prompt.

        ``data`` is a local folder (see ``data``); None means the environment variable DLMGRID_DATA, or else
        the pinned source. Raises InputError for a bad argument and for data that is missing, truncated or
        altered.
        """
        self._check_fewshot(num_fewshot)
        if limit is not None and limit < 1:
            raise InputError(
                f"benchmark {self.name}: limit is {limit}; give at least 1, or leave it out for all"
            )
        return self.loader(data, limit, num_fewshot)

    def _check_fewshot(self, num_fewshot: int) -> None:
        if not 0 <= num_fewshot <= self.max_fewshot:
            raise InputError(
                f"benchmark {self.name}: num_fewshot is {num_fewshot}; it takes 0 to {self.max_fewshot}"
            )


def package_version(package: str, extra: str = "") -> str:
    """Installed version of a scoring package. Raises InputError with the command that installs it."""
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise InputError(f"scoring needs the package {package}: pip install '{package}{extra}'") from error
