"""What a run shows: its rows gathered per cell, each beside the draft-free cell that it is compared with.

Every figure comes from the committed Parquet files, each verified against the manifest, so a report of a running
or broken run is a report of what it has so far. A ratio is taken over the items that both cells have decoded,
never over two different sets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dlmgrid.cluster.accuracy import Accuracy, Score, accuracies, latest_scores
from dlmgrid.cluster.records import read_record
from dlmgrid.workers.cell import CELL_FIELDS, IMPORTED, Cell, digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.run_folder import open_run, read_generations, unlisted
from dlmgrid.workers.tables import SCORES, read_table

# The settings that belong to a method: two cells that differ only here share one draft-free cell.
METHOD_FIELDS = (
    "method",
    "budget",
    "drafter_fingerprint",
    "verification",
    "fused_commit",
    "window",
    "gamma",
    "fold_tau",
    "fold_tau_by_layer",
    "fold_gate",
    "fold_recheck",
    "fold_pipelined",
    "product_tau",
)

_MEASURES = (
    "cell_key", "item_id", "repeat", "reference_key", "claim", "error", "generated_tokens",
    "nfe_total", "nfe_draft", "rounds", "accepted_per_round", "drafted_nodes", "recompute_ratio", "seconds_wall",
    "profiled", "exact_tokens", "exact_path", "exact_bits",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One level of exactness over a cell: ``equal`` of the ``checked`` rows equal their reference."""

    equal: int
    checked: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CellReport:
    """One cell. Counts are rows (item × repeat); a failed row has no tokens.

    ``nfe_mean`` is target forwards a row, ``nfe_ratio`` draft-free forwards over this cell's on the
    ``num_paired`` rows that both have. ``accepted_per_round`` is pooled over rounds. ``tokens_per_second`` is
    generated tokens over wall time of the rows that were not profiled, ``throughput_ratio`` this cell's over the
    draft-free one's on the paired rows. None stands for "nothing to compute it from".
    """

    cell_key: str
    reference_cell_key: str
    settings: dict[str, Any]
    claim: str
    is_reference: bool
    num_rows: int
    num_failed: int
    num_errors: int
    num_missing: int
    num_paired: int
    nfe_mean: float | None
    nfe_draft_mean: float | None
    nfe_ratio: float | None
    accepted_per_round: float | None
    drafted_nodes_mean: float | None
    recompute_ratio_mean: float | None
    tokens_per_second: float | None
    throughput_ratio: float | None
    exact: dict[str, Level]
    accuracies: tuple[Accuracy, ...] = ()

    @property
    def num_unchecked(self) -> int:
        return self.num_rows - min(level.checked for level in self.exact.values())

    @property
    def is_exact(self) -> bool:
        """True when at least one row was checked and every checked row is equal at all three levels.

        Never under ``greedy_match``, whose law is biased, under product max-commit, or where passes fold without a
        recheck: rows that happen to be equal are luck.
        """
        is_folded = self.settings["fold_tau"] not in (None, 0.0) and not self.settings["fold_recheck"]
        takes_products = self.settings["product_tau"] is not None
        if self.settings["verification"] == "greedy_match" or is_folded or takes_products:
            return False
        return all(level.checked > 0 and level.equal == level.checked for level in self.exact.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All cells of a run, draft-free first within each comparison. ``incomplete`` says in words what is missing
    ("" when nothing is)."""

    run_dir: str
    incomplete: str
    cells: list[CellReport]
    errors: dict[str, int] = field(default_factory=dict)


def load_generations(run_dir: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The committed rows of a run, as its manifest lists them.

    Raises InputError for a folder that is not a run's, and for a file that is not the committed one.
    """
    return read_generations(run_dir, columns)


def load_scores(run_dir: Path) -> pa.Table:
    """Every score row of a run, all scorer versions; empty before the first ``score``.

    Raises InputError for a file there that is none of scores.
    """
    folder = run_dir / "scores"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder; move it away and score again")
    return read_table([str(path) for path in sorted(folder.glob("*.parquet"))], SCORES)


def unfinished(run_dir: Path) -> str:
    """Why the last ``run`` into a folder is not finished, from its record; "" when it is, or has left none."""
    record = read_record(run_dir)
    if record is None or record.status in ("done", "failed"):
        return ""
    if record.status == "running":
        return "the last run is still going, or was killed; the same command resumes it"
    reason = f" ({record.message})" if record.message else ""
    return f"the last run ended as {record.status}{reason}; the same command resumes it"


def left_out(run_dir: Path) -> str:
    """Which files of ``generations/`` count for nothing, since the manifest does not name them; "" for none."""
    files = unlisted(run_dir, open_run(run_dir))
    if not files:
        return ""
    return (
        f"left out: {len(files)} files in generations/ that manifest.jsonl does not name ({files[0].name}); "
        "the same run command clears them up"
    )


def not_adopted(run_dir: Path) -> str:
    """How many units of ``staging/`` were decoded without Ray and wait for the next run; "" for none, and while a
    run is going on, whose files pass through there."""
    record = read_record(run_dir)
    files = list((run_dir / "staging").glob("*.parquet"))
    if not files or (record is not None and record.status == "running"):
        return ""
    command = "record" if any((run_dir / "trajectories").glob("*.parquet")) else "run"
    return (
        f"{len(files)} decoded units wait in staging/ and are not shown; dlmgrid {command} with the same grid adopts "
        "them"
    )


def build_report(run_dir: Path) -> Report:
    """Gather the report of a run folder. Raises InputError for a folder that is not a run's, or is damaged."""
    table = load_generations(run_dir, tuple(dict.fromkeys((*_MEASURES, *CELL_FIELDS))))
    settings = _settings_by_cell(table)
    rows_by_cell: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table.select(_MEASURES).to_pylist():
        rows_by_cell[row["cell_key"]].append(row)
    references = {
        (row["reference_key"], row["item_id"]): row
        for cell_key, rows in rows_by_cell.items()
        if settings[cell_key].is_reference
        for row in rows
    }
    expected = _expected_keys(settings, rows_by_cell)
    scores = latest_scores(load_scores(run_dir).to_pylist())
    cells = [
        _cell_report(
            cell_key,
            settings[cell_key],
            rows,
            references,
            expected[cell_key],
            scores.get(cell_key, []),
            scores.get(settings[cell_key].reference().cell_key, []),
        )
        for cell_key, rows in rows_by_cell.items()
    ]
    errors = Counter(row["error"] for rows in rows_by_cell.values() for row in rows if row["error"])
    return Report(
        run_dir=str(run_dir),
        incomplete="; ".join(
            filter(None, (unfinished(run_dir), _missing_text(cells), left_out(run_dir), not_adopted(run_dir)))
        ),
        cells=sorted(cells, key=_order),
        errors=dict(errors.most_common()),
    )


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell that a stored row names in its columns.

    Raises InputError where these are no settings: a seed that is no integer, a number that is not finite.
    """
    try:
        cell = Cell.from_dict({name: row[name] for name in CELL_FIELDS} | {"seed": int(row["seed"])})
        digest(cell.to_dict())
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a row of cell {row['cell_key']} holds settings that cannot be ({error}); see dlmgrid check, and "
            "run the grid into a new --out"
        ) from error
    return cell


def _settings_by_cell(table: pa.Table) -> dict[str, Cell]:
    first: dict[str, int] = {}
    for index, cell_key in enumerate(table.column("cell_key").to_pylist()):
        first.setdefault(cell_key, index)
    rows = table.take(pa.array(list(first.values()), pa.int64())).to_pylist()
    return {row["cell_key"]: cell_of(row) for row in rows}


def _expected_keys(
    settings: Mapping[str, Cell], rows_by_cell: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, int]:
    """Rows a cell should have: as many keys as any cell of its model and benchmark has seen. An imported cell
    has all that its file held."""
    keys: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    decoded = {cell_key: cell for cell_key, cell in settings.items() if cell.claim != IMPORTED}
    for cell_key, cell in decoded.items():
        keys[cell.model, cell.benchmark].update(
            (row["item_id"], row["repeat"]) for row in rows_by_cell[cell_key]
        )
    expected = {cell_key: len(keys[cell.model, cell.benchmark]) for cell_key, cell in decoded.items()}
    return {cell_key: len(rows) for cell_key, rows in rows_by_cell.items()} | expected


def _missing_text(cells: Iterable[CellReport]) -> str:
    missing = [cell.num_missing for cell in cells if cell.num_missing]
    if not missing:
        return ""
    return f"{sum(missing)} rows of {len(missing)} cells are missing"


def _cell_report(
    cell_key: str,
    cell: Cell,
    rows: Sequence[Mapping[str, Any]],
    references: Mapping[tuple[str, str], Mapping[str, Any]],
    num_expected: int,
    scores: Sequence[Score],
    reference_scores: Sequence[Score],
) -> CellReport:
    done = [row for row in rows if row["generated_tokens"] is not None]
    num_failed = (
        sum(row["error"] is not None for row in rows) if cell.claim == IMPORTED else len(rows) - len(done)
    )
    pairs = []
    for row in done:
        reference = references.get((row["reference_key"], row["item_id"]))
        if reference is not None and reference["generated_tokens"] is not None:
            pairs.append((row, reference))
    timed_pairs = [pair for pair in pairs if not (pair[0]["profiled"] or pair[1]["profiled"])]
    ours, theirs = [row for row, _ in timed_pairs], [reference for _, reference in timed_pairs]
    rounds = _total(done, "rounds")
    accepted = sum((row["accepted_per_round"] or 0.0) * (row["rounds"] or 0) for row in done)
    return CellReport(
        cell_key=cell_key,
        reference_cell_key=cell.reference().cell_key,
        settings=cell.to_dict(),
        claim=cell.claim,
        is_reference=cell.is_reference,
        num_rows=len(rows),
        num_failed=num_failed,
        num_errors=sum(row["error"] is not None for row in rows),
        num_missing=num_expected - len(rows),
        num_paired=len(pairs),
        nfe_mean=_mean(done, "nfe_total"),
        nfe_draft_mean=_mean(done, "nfe_draft"),
        nfe_ratio=_ratio(
            _total([reference for _, reference in pairs], "nfe_total"),
            _total([row for row, _ in pairs], "nfe_total"),
        ),
        accepted_per_round=_ratio(accepted, rounds),
        drafted_nodes_mean=_mean(done, "drafted_nodes"),
        recompute_ratio_mean=_mean(done, "recompute_ratio"),
        tokens_per_second=_throughput([row for row in done if not row["profiled"]]),
        throughput_ratio=_ratio(_throughput(ours), _throughput(theirs)),
        exact={level: _level(rows, f"exact_{level}") for level in ("tokens", "path", "bits")},
        accuracies=accuracies(
            {(row["item_id"], row["repeat"]) for row in rows},
            scores,
            () if cell.is_reference else reference_scores,
        ),
    )


def _level(rows: Sequence[Mapping[str, Any]], column: str) -> Level:
    verdicts = [row[column] for row in rows if row[column] is not None]
    return Level(equal=sum(verdicts), checked=len(verdicts))


def _total(rows: Iterable[Mapping[str, Any]], column: str) -> float:
    return float(sum(row[column] for row in rows if row[column] is not None))


def _mean(rows: Iterable[Mapping[str, Any]], column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return sum(values) / len(values) if values else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _throughput(rows: Sequence[Mapping[str, Any]]) -> float | None:
    timed = [row for row in rows if row["seconds_wall"]]
    return _ratio(_total(timed, "generated_tokens"), _total(timed, "seconds_wall")) if timed else None


def _order(cell: CellReport) -> tuple[Any, ...]:
    settings = cell.settings
    comparison = [(name, str(settings[name])) for name in CELL_FIELDS if name not in METHOD_FIELDS]
    return (
        settings["model"],
        settings["benchmark"],
        settings["temperature"],
        comparison,
        not cell.is_reference,
        settings["method"],
        settings["budget"],
        cell.cell_key,
    )
