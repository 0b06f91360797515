"""Accuracy of a cell from its score rows, and its change against another cell over the generations that both have.

Items are what was sampled: repeats of an item are averaged before a spread is taken, since at T = 0 they are copies.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlmgrid.workers.errors import InputError

CONFIDENCE = 0.95

Score = Mapping[str, Any]
"""One row of the ``scores`` table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One metric of a cell minus that of another cell, over the generations that have a value in both.

    ``mean`` is over ``num_paired`` generations of ``num_items`` items, ``num_differing`` of which have another value.
    ``margin`` is half the width of a 95 % interval of Student's t over the items' means; None below two items, and
    where no value differs: such a sample does not tell its spread.
    """

    mean: float
    margin: float | None
    num_items: int
    num_paired: int
    num_differing: int

    @property
    def is_loss(self) -> bool:
        """Whether the whole interval lies below 0."""
        return self.margin is not None and self.mean + self.margin < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """One metric of one scorer over a cell, in the scorer's latest version.

    ``mean`` is over the ``num_valued`` rows that have a value (None: no row has), ``standard_error`` is that of the
    items' means. ``statuses`` counts every generation of the cell, those without a score as ``unscored``. ``change``
    is against the cell it is compared with; None where there is none, or no pair.
    """

    scorer: str
    scorer_version: str
    metric: str
    mean: float | None
    standard_error: float | None
    num_valued: int
    statuses: dict[str, int]
    change: Change | None = None

    @property
    def is_complete(self) -> bool:
        return set(self.statuses) <= {"scored"}

    @property
    def num_unvalued(self) -> int:
        """Generations without a value, whatever the reason."""
        return sum(self.statuses.values()) - self.num_valued


def latest_scores(scores: Iterable[Score]) -> dict[str, list[Score]]:
    """Score rows by cell: of each benchmark's scorer only the version that scored last, one row a key.

    Raises InputError for a value that is not finite.
    """
    ordered = sorted(scores, key=lambda row: (row["scored_at"] is not None, row["scored_at"]))
    latest = {(row["benchmark"], row["scorer"]): row["scorer_version"] for row in ordered}
    by_key = {
        (row["cell_key"], row["item_id"], row["repeat"], row["scorer"], row["metric"]): row
        for row in ordered
        if latest[row["benchmark"], row["scorer"]] == row["scorer_version"]
    }
    by_cell: dict[str, list[Score]] = defaultdict(list)
    for (cell_key, *_), row in by_key.items():
        if row["value"] is not None and not math.isfinite(row["value"]):
            raise InputError(
                f"a score of item {row['item_id']!r} of cell {cell_key} is {row['value']}, no number; remove that file "
                "of scores/ and score again"
            )
        by_cell[cell_key].append(row)
    return by_cell


def accuracies(
    keys: set[tuple[str, int]], scores: Sequence[Score], others: Sequence[Score] = ()
) -> tuple[Accuracy, ...]:
    """Every metric of a cell whose generations are ``keys`` (item, repeat), with its change against a cell whose scores
    are ``others``."""
    theirs = {_name_of(score): score["value"] for score in others if score["value"] is not None}
    by_metric: dict[tuple[str, str, str], list[Score]] = defaultdict(list)
    for score in scores:
        if (score["item_id"], score["repeat"]) in keys:
            by_metric[score["scorer"], score["scorer_version"], score["metric"]].append(score)
    found = []
    for (scorer, version, metric), scored in sorted(by_metric.items()):
        valued = [score for score in scored if score["value"] is not None]
        statuses = Counter(score["status"] for score in scored)
        if len(scored) < len(keys):
            statuses["unscored"] = len(keys) - len(scored)
        pairs = [
            (score["item_id"], score["value"] - theirs[_name_of(score)])
            for score in valued
            if _name_of(score) in theirs
        ]
        found.append(
            Accuracy(
                scorer=scorer,
                scorer_version=version,
                metric=metric,
                mean=sum(score["value"] for score in valued) / len(valued) if valued else None,
                standard_error=_standard_error([(score["item_id"], score["value"]) for score in valued]),
                num_valued=len(valued),
                statuses=dict(statuses),
                change=change_of(pairs) if pairs else None,
            )
        )
    return tuple(found)


def change_of(differences: Sequence[tuple[str, float]]) -> Change:
    """The change from (item, difference) of every pair, at least one."""
    num_items = len({item for item, _ in differences})
    num_differing = sum(value != 0 for _, value in differences)
    error = _standard_error(differences)
    margin = None
    if error is not None and num_differing:
        from scipy.stats import t  # takes a while to import

        margin = float(t.ppf((1 + CONFIDENCE) / 2, num_items - 1)) * error
    return Change(
        mean=sum(value for _, value in differences) / len(differences),
        margin=margin,
        num_items=num_items,
        num_paired=len(differences),
        num_differing=num_differing,
    )


def _standard_error(values: Sequence[tuple[str, float]]) -> float | None:
    """That of the mean of the items' means, from (item, value); None below two items."""
    by_item: dict[str, list[float]] = defaultdict(list)
    for item, value in values:
        by_item[item].append(value)
    means = [sum(own) / len(own) for own in by_item.values()]
    if len(means) < 2:
        return None
    center = sum(means) / len(means)
    return math.sqrt(sum((mean - center) ** 2 for mean in means) / (len(means) - 1) / len(means))


def _name_of(score: Score) -> tuple[Any, ...]:
    """What a score has in common with that of the same generation in another cell."""
    return tuple(score[name] for name in ("item_id", "repeat", "scorer", "scorer_version", "metric"))
