"""The report's figures are those of the rows, and no ratio comes without its verdict."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlmgrid.cluster.accuracy import change_of
from dlmgrid.cluster.report import Report, build_report
from dlmgrid.cluster.report_views import csv_text, html_page, json_text, tables_of, terminal_view
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.tables import SCORES, to_table, write_table
from dlmgrid.workers.testing.stored_rows import make_row, small_cell, write_run

REFERENCE = small_cell()
CHAIN = small_cell(method="ssd", budget=4)
TOKENS = [7, 8, 9, 3, 2, 1]
SCORED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def _rows(items: str = "ab", **changes: Any) -> list[dict[str, Any]]:
    rows = []
    for item in items:
        reference = make_row(REFERENCE, item, TOKENS)
        rows += [reference, make_row(CHAIN, item, TOKENS, accepted=[2, 1, 0], reference=reference) | changes]
    return rows


def _score(
    row: dict[str, Any], value: float | None, status: str = "scored", version: str = "1"
) -> dict[str, Any]:
    return dict.fromkeys(SCORES.names) | {
        "cell_key": row["cell_key"],
        "item_id": row["item_id"],
        "repeat": row["repeat"],
        "benchmark": row["benchmark"],
        "scorer": "words",
        "scorer_version": version,
        "metric": "exact",
        "value": value,
        "status": status,
        "text_digest": "",
        "scored_at": SCORED_AT + timedelta(hours=int(version)),
    }


def _write_scores(run_dir: Path, scores: list[dict[str, Any]]) -> None:
    (run_dir / "scores").mkdir(exist_ok=True)
    number = len(list((run_dir / "scores").iterdir()))
    write_table(str(run_dir / "scores" / f"{number}.parquet"), to_table(SCORES, scores))


def _column(report: Report, heading: str) -> list[str]:
    (table,) = tables_of(report)
    place = table.headings.index(heading)
    return [row[place].text for row in table.rows]


def _printed(report: Report) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(terminal_view(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_follow_from_the_rows(tmp_path: Path) -> None:
    draft_free, chain = build_report(write_run(tmp_path, _rows())).cells
    assert draft_free.is_reference
    assert (draft_free.nfe_mean, chain.nfe_mean) == (9, 6)
    assert (draft_free.nfe_ratio, chain.nfe_ratio) == (1.0, 1.5)
    assert chain.accepted_per_round == 1.0
    assert chain.drafted_nodes_mean == 12
    assert chain.tokens_per_second == pytest.approx(100)
    assert chain.throughput_ratio == pytest.approx(1.5)
    assert {level: (count.equal, count.checked) for level, count in chain.exact.items()} == {
        "tokens": (2, 2),
        "path": (2, 2),
        "bits": (2, 2),
    }


def test_ratios_are_taken_over_items_that_both_cells_have(tmp_path: Path) -> None:
    rows = _rows("ab")
    rows.append(make_row(REFERENCE, "c", TOKENS * 1, accepted=[0] * 6) | {"nfe_total": 1000})
    report = build_report(write_run(tmp_path, rows))
    chain = report.cells[1]
    assert chain.num_paired == 2
    assert chain.nfe_ratio == 1.5
    assert chain.num_missing == 1
    assert report.incomplete == "1 rows of 1 cells are missing"
    assert _column(report, "rows") == ["3", "2/3"]


def test_profiled_rows_give_no_speed(tmp_path: Path) -> None:
    chain = build_report(write_run(tmp_path, _rows(profiled=True))).cells[1]
    assert chain.tokens_per_second is None
    assert chain.throughput_ratio is None
    assert chain.nfe_ratio == 1.5


def test_ratio_without_a_verdict_is_withheld(tmp_path: Path) -> None:
    unchecked = dict.fromkeys(("exact_tokens", "exact_path", "exact_bits"))
    report = build_report(write_run(tmp_path, _rows(**unchecked)))
    assert _column(report, "× fewer") == ["1.00", "unchecked"]
    assert _column(report, "× faster") == ["1.00", "unchecked"]
    assert "1.50" not in html_page(report, "0")


def test_ratio_of_rows_that_differ_says_so(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path, _rows(exact_bits=False)))
    assert _column(report, "× fewer") == ["1.00", "1.50 inexact"]
    assert _column(report, "bits") == ["2/2", "0/2"]
    assert _column(report, "path") == ["2/2", "2/2"]


def test_failed_rows_are_counted_and_their_errors_listed(tmp_path: Path) -> None:
    rows = _rows("ab")
    blank = dict.fromkeys(
        ("token_ids", "generated_tokens", "nfe_total", "exact_tokens", "exact_path", "exact_bits")
    )
    rows[3] |= blank | {"error": "prompt of 900 tokens does not fit"}
    report = build_report(write_run(tmp_path, rows))
    chain = report.cells[1]
    assert (chain.num_rows, chain.num_failed, chain.num_errors, chain.num_unchecked) == (2, 1, 1, 1)
    assert chain.nfe_mean == 6
    assert report.errors == {"prompt of 900 tokens does not fit": 1}
    assert "1 × prompt of 900 tokens does not fit" in _printed(report)


def test_accuracy_is_of_the_latest_scorer_version_with_its_counts(tmp_path: Path) -> None:
    rows = _rows("abcd")
    write_run(tmp_path, rows)
    _write_scores(tmp_path, [_score(row, 0.0) for row in rows])
    draft_free = [row for row in rows if row["method"] == "none"]
    _write_scores(
        tmp_path,
        [
            _score(draft_free[0], 1.0, version="2"),
            _score(draft_free[1], 0.0, version="2"),
            _score(draft_free[2], None, "timed_out", version="2"),
        ],
    )
    report = build_report(tmp_path)
    (accuracy,) = report.cells[0].accuracies
    assert accuracy.scorer_version == "2"
    assert accuracy.mean == 0.5
    assert accuracy.standard_error == pytest.approx(0.5)
    assert accuracy.statuses == {"scored": 2, "timed_out": 1, "unscored": 1}
    assert report.cells[1].accuracies == ()
    assert _column(report, "words exact") == ["0.500 ±0.500 (1 timed_out, 1 unscored)", "–"]


def test_metrics_of_answers_that_may_differ_stand_beside_their_paired_change(tmp_path: Path) -> None:
    rows = _rows("abcd", exact_tokens=False)
    run_dir = write_run(tmp_path, rows)
    values = {"a": (1.0, 0.0), "b": (1.0, 1.0), "c": (0.0, 0.0), "d": (1.0, None)}
    _write_scores(
        run_dir, [_score(row, values[row["item_id"]][row["cell_key"] == CHAIN.cell_key]) for row in rows]
    )
    report = build_report(run_dir)
    (free,), (chain,) = (cell.accuracies for cell in report.cells)
    assert free.change is None
    assert chain.change is not None
    assert (chain.change.num_paired, chain.change.num_items, chain.change.num_differing) == (3, 3, 1)
    assert chain.change.mean == pytest.approx(-1 / 3)
    assert chain.change.margin == pytest.approx(4.3027 / 3, rel=1e-4)
    assert _column(report, "Δ words exact") == ["–", "-0.333 ±1.434 (1/3 differ)"]
    lines = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert float(lines[1]["words exact change"]) == pytest.approx(-1 / 3)
    names = ("valued", "without value", "paired", "differing")
    assert [lines[1][f"words exact {name}"] for name in names] == ["3", "1", "3", "1"]
    assert [lines[0][f"words exact {name}"] for name in names] == ["4", "0", "", ""]


def test_repeats_of_an_item_are_no_items_of_their_own() -> None:
    once = [(item, -1.0 if item == "c" else 0.0) for item in "abcde"]
    change, repeated = change_of(once), change_of(once * 4)
    assert change.margin == pytest.approx(0.2 * 2.7764, rel=1e-4)
    assert (repeated.mean, repeated.margin) == pytest.approx((change.mean, change.margin))
    assert (repeated.num_items, repeated.num_paired, repeated.num_differing) == (5, 20, 4)
    assert not change.is_loss
    assert change_of([("a", -1.0)]).margin is None


def test_no_interval_is_drawn_from_values_that_do_not_differ(tmp_path: Path) -> None:
    assert change_of([("a", 0.0), ("b", 0.0)]).margin is None
    rows = _rows("ab", exact_tokens=False)
    run_dir = write_run(tmp_path, rows)
    _write_scores(run_dir, [_score(row, 1.0) for row in rows])
    assert _column(build_report(run_dir), "Δ words exact") == ["–", "+0.000 (0/2 differ)"]


def test_a_score_that_is_no_number_is_named(tmp_path: Path) -> None:
    rows = _rows("a")
    run_dir = write_run(tmp_path, rows)
    _write_scores(run_dir, [_score(rows[0], float("nan"))])
    with pytest.raises(InputError, match=r"a score of item .a. of cell .* is nan"):
        build_report(run_dir)


def test_product_max_commit_is_never_listed_as_exact(tmp_path: Path) -> None:
    product = small_cell(method="spot_sets_product", budget=1, product_tau=0.999)
    reference = make_row(REFERENCE, "a", TOKENS)
    rows = [reference, make_row(product, "a", TOKENS, accepted=[2, 1, 0], reference=reference)]
    report = build_report(write_run(tmp_path, rows))
    assert not report.cells[1].is_exact
    assert _column(report, "× fewer") == ["1.00", "1.50 inexact"]


def test_a_loss_of_accuracy_is_red_and_exact_answers_have_no_such_column(tmp_path: Path) -> None:
    for exact in (False, True):
        rows = _rows("abcdefgh", exact_tokens=exact)
        run_dir = write_run(tmp_path / str(exact), rows)
        values = {row["item_id"]: float(row["item_id"] == "a") for row in rows}
        own = [values[row["item_id"]] if row["cell_key"] == CHAIN.cell_key else 1.0 for row in rows]
        _write_scores(run_dir, [_score(row, value) for row, value in zip(rows, own, strict=True)])
        (table,) = tables_of(build_report(run_dir))
        assert ("Δ words exact" in table.headings) is not exact
        tones = [entry.tone for row in table.rows for entry in row if entry.text.startswith("-0.875")]
        assert tones == ([] if exact else ["bad"])


def test_settings_that_differ_are_named_and_others_are_not(tmp_path: Path) -> None:
    hotter = small_cell(temperature=1.0)
    loose = small_cell(temperature=1.0, method="ssd", budget=4, verification="uncoupled")
    coupled = small_cell(temperature=1.0, method="ssd", budget=4)
    reference = make_row(hotter, "a", TOKENS)
    rows = [reference, *(make_row(cell, "a", TOKENS, reference=reference) for cell in (loose, coupled))]
    report = build_report(write_run(tmp_path, [*rows, *_rows("a")]))
    first, second = tables_of(report)
    assert (first.title, second.title) == ("reference · words · T = 0", "reference · words · T = 1")
    assert "seed" not in second.headings
    claim = second.headings.index("claim")
    described = [(row[2].text, row[claim].text) for row in second.rows]
    assert described[0] == (
        "coupled",
        "exact",
    )  # the draft-free cell; of the others the cell key sets the order
    assert sorted(described[1:]) == [("coupled", "exact"), ("uncoupled", "exact")]


def test_fused_cells_stand_beside_the_draft_free_cell(tmp_path: Path) -> None:
    reference = make_row(REFERENCE, "a", TOKENS)
    fused = [
        make_row(cell, "a", TOKENS, reference=reference, nfe_commit=1, nfe_total=8)
        for cell in (small_cell(fused_commit=True), small_cell(fused_commit=True, method="ssd", budget=4))
    ]
    report = build_report(write_run(tmp_path, [reference, *fused]))
    (table,) = tables_of(report)
    shown = [
        [row[table.headings.index(name)].text for name in ("method", "fused_commit", "× fewer")]
        for row in table.rows
    ]
    assert shown == [["none", "False", "1.00"], ["none", "True", "1.12"], ["ssd", "True", "1.12"]]
    assert [cell.is_reference for cell in report.cells] == [True, False, False]


def test_greedy_match_is_never_listed_as_exact(tmp_path: Path) -> None:
    reference = make_row(small_cell(temperature=1.5), "a", TOKENS)
    cell = small_cell(temperature=1.5, method="ssd", budget=4, verification="greedy_match")
    lucky = make_row(cell, "a", TOKENS, accepted=[2, 1, 0], reference=reference)
    report = build_report(write_run(tmp_path, [reference, lucky]))
    assert [(cell.claim, cell.is_exact) for cell in report.cells] == [("exact", True), ("approximate", False)]
    (table,) = tables_of(report)
    assert table.rows[1][table.headings.index("× fewer")].text == "1.50 inexact"
    assert _column(report, "bits") == ["1/1", "1/1"]


def test_json_and_csv_hold_every_cell_unrounded(tmp_path: Path) -> None:
    rows = _rows("abc")
    write_run(tmp_path, rows)
    _write_scores(tmp_path, [_score(row, 1.0) for row in rows])
    report = build_report(tmp_path)
    cells = json.loads(json_text(report))["cells"]
    assert [cell["settings"]["method"] for cell in cells] == ["none", "ssd"]
    lines = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert [line["method"] for line in lines] == ["none", "ssd"]
    assert [float(line["nfe_ratio"]) for line in lines] == [1.0, 1.5]
    assert [line["exact_bits"] for line in lines] == ["3", "3"]
    assert [float(line["words exact"]) for line in lines] == [1.0, 1.0]


def test_page_loads_nothing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    page = html_page(build_report(write_run(tmp_path, _rows(error="<script>alert(1)</script>"))), "0.1")
    assert "http" not in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_run_without_rows_says_so(tmp_path: Path) -> None:
    (tmp_path / "generations").mkdir()
    report = build_report(tmp_path)
    assert "no rows yet" in _printed(report)
    assert "No rows yet" in html_page(report, "0")


def test_units_that_wait_to_be_adopted_are_named(tmp_path: Path) -> None:
    (tmp_path / "generations").mkdir()
    assert "staging" not in build_report(tmp_path).incomplete
    (tmp_path / "staging").mkdir(exist_ok=True)
    (tmp_path / "staging" / "a.parquet").write_bytes(b"")
    assert (
        "1 decoded units wait in staging/ and are not shown; dlmgrid run "
        in build_report(tmp_path).incomplete
    )
    (tmp_path / "trajectories").mkdir(exist_ok=True)
    (tmp_path / "trajectories" / "a.parquet").write_bytes(b"")
    assert "dlmgrid record with the same grid adopts them" in build_report(tmp_path).incomplete


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"status": "done", "message": ""}, ""),
        ({"status": "failed", "message": ""}, ""),
        ({"status": "running", "message": ""}, "still going, or was killed; the same command resumes it"),
        ({"status": "incomplete", "message": "no GPU came"}, "ended as incomplete (no GPU came); the same"),
    ],
)
def test_unfinished_run_says_so(tmp_path: Path, record: dict[str, str], text: str) -> None:
    write_run(tmp_path, _rows())
    (tmp_path / "run.json").write_text(json.dumps(record))
    report = build_report(tmp_path)
    assert text in report.incomplete
    assert bool(report.incomplete) == bool(text)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"status": 1, "message": ""}', "[" * 100_000])
def test_damaged_run_record_is_named(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, _rows())
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run.json cannot be read .* delete it"):
        build_report(tmp_path)


def test_damage_to_a_file_is_named_and_a_foreign_one_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, _rows())
    before = json_text(build_report(tmp_path))
    path = sorted((tmp_path / "generations").iterdir())[0]
    path.with_name("copy.parquet").write_bytes(path.read_bytes())
    (tmp_path / "generations" / "foreign.parquet").write_bytes(b"foreign")
    report = build_report(tmp_path)
    assert "left out: 2 files in generations/" in report.incomplete
    assert json.loads(json_text(report))["cells"] == json.loads(before)["cells"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{path.name} has sha256 .* run the same grid again"):
        build_report(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=rf"{path.name} is missing"):
        build_report(tmp_path)


def test_scores_that_are_none_and_settings_that_cannot_be_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "scored", _rows())
    (tmp_path / "scored" / "scores").mkdir()
    (tmp_path / "scored" / "scores" / "x.parquet").write_bytes(b"garbage")
    with pytest.raises(InputError, match=r"x.parquet is not a whole Parquet file of scores"):
        build_report(tmp_path / "scored")
    write_run(tmp_path / "seeded", _rows(seed="abc"))
    with pytest.raises(InputError, match="holds settings that cannot be"):
        build_report(tmp_path / "seeded")


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give the --out folder of a run"):
        build_report(tmp_path)
