"""``check`` accepts a consistent run and names every kind of tampering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.check import GENERATION_COLUMNS, check_stored, compare_again
from dlmgrid.cluster.recompute import sample_name, sample_rows, write_checks
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.tables import CHECKS, read_table
from dlmgrid.workers.testing.stored_rows import make_row, small_cell, write_run

REFERENCE = small_cell()
CHAIN = small_cell(method="ssd", budget=4)
TOKENS = [7, 8, 9, 3, 2, 1]


def _rows(**changes: Any) -> list[dict[str, Any]]:
    """A draft-free row and an accelerated one of item ``a``; ``changes`` are planted in the accelerated one."""
    reference = make_row(REFERENCE, "a", TOKENS)
    return [reference, make_row(CHAIN, "a", TOKENS, accepted=[2, 1, 0], reference=reference) | changes]


def _faults(run_dir: Path) -> list[str]:
    return [fault for check in check_stored(run_dir).checks for fault in check.faults]


def test_consistent_run_has_no_faults_and_every_accelerated_row_gets_a_verdict(tmp_path: Path) -> None:
    found = check_stored(write_run(tmp_path, _rows()))
    assert [check.faults for check in found.checks] == [(), ()]
    assert not found.missing
    verdicts = [check.verdict for check in found.checks if check.cell_key == CHAIN.cell_key]
    assert [(v.exact_tokens, v.exact_path, v.exact_bits) for v in verdicts if v] == [(True, True, True)]


@pytest.mark.parametrize("method", ["none", "ssd"])
def test_fused_rows_are_held_against_the_serialized_run_whatever_their_method(
    tmp_path: Path, method: str
) -> None:
    cell = small_cell(method=method, budget=0 if method == "none" else 4, fused_commit=True)
    reference = make_row(REFERENCE, "a", TOKENS)
    fused = {
        "nfe_commit": 1,
        "nfe_total": reference["nfe_total"] - 1,
    }  # the last block's own commit pass is left
    equal = make_row(cell, "a", TOKENS, reference=reference) | fused
    run = write_run(tmp_path / "equal", [reference, equal])
    assert _faults(run) == []
    (check,) = [check for check in check_stored(run).checks if check.cell_key == cell.cell_key]
    assert check.verdict is not None and check.verdict.exact_bits
    other = make_row(cell, "a", [7, 8, 9, 4, 2, 1], reference=reference) | fused
    faults = _faults(write_run(tmp_path / "other", [reference, other]))
    assert {f"{level} is false" for level in ("exact_tokens", "exact_path", "exact_bits")} == set(faults)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"path_digest": "0" * 16}, "path_digest is"),
        ({"logits_digest": "0" * 16}, "logits_digest is"),
        ({"step_digests": ["0" * 16]}, "6 steps have 1 digests"),
        ({"token_ids": [7, 8, 9, 3, 2, 5]}, "token 5 is 5, the path commits 1 at position 10"),
        ({"token_ids": [7, 8, 9, 3, 2, 5]}, "exact_tokens is false"),
        ({"token_ids": [1] * 9}, "9 tokens exceed gen_length 8"),
        ({"commit_steps": [0, 1, 2, 3, 4, 6]}, "the path cannot be read"),
        ({"commit_positions": [5, 6, 7, 8, 9, 9]}, "a position is committed twice"),
        ({"commit_positions": [4, 6, 7, 8, 9, 10]}, "a prompt position is committed"),
        ({"nfe_total": 5}, "nfe_total is 5, its parts sum to 6"),
        ({"nfe_denoise": 4, "nfe_total": 7}, "nfe_denoise is 4 in 3 rounds"),
        ({"accepted": [2, 1]}, "3 rounds have 2 accepted counts"),
        ({"accepted": [2, 1, 1]}, "3 rounds that accept 4 cannot make 6 steps"),
        ({"accepted_per_round": 2.0}, "accepted_per_round is 2.0"),
        ({"text": "7 8 9"}, "text differs from that of its serialized run"),
        ({"text": None}, "a row with tokens has no text"),
        ({"stop_reason": "length"}, "stop_reason is length after 6 of 8 tokens"),
        ({"stop_reason": "bored"}, "stop_reason is bored"),
        ({"generated_tokens": 5}, "generated_tokens is 5, there are 6 tokens"),
        ({"prompt_digest": "0" * 16}, "prompt_digest differs"),
        ({"temperature_text": "1"}, "temperature_text is 1"),
        ({"drafted_nodes": 13}, "drafted_nodes is 13"),
        ({"drafted_nodes": 8}, "rows_computed is"),
        ({"nfe_prefill": -1, "nfe_total": 4}, "no count is stored in nfe_prefill"),
        ({"nfe_prefill": 0, "nfe_total": 5}, "nfe_prefill is 0"),
        ({"nfe_commit": 1, "nfe_total": 5}, "nfe_commit is 1"),
        ({"error": "out of memory"}, "an error is stored although it can be compared"),
        ({"token_ids": None, "error": "out of memory"}, "a row without tokens holds text"),
        ({"exact_bits": False}, "exact_bits is stored as False, found True"),
        ({"exact_path": None}, "exact_path is stored as None, found True"),
        ({"temperature": 1.0}, "cell_key is"),
        ({"claim": "law"}, "claim is law, its settings give exact"),
        ({"repeat": 1}, "reference_key is"),
        ({"runtime_fingerprint": "elsewhere"}, "reference_key is"),
    ],
)
def test_each_tampering_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    faults = _faults(write_run(tmp_path, _rows(**changes)))
    assert any(fault.startswith(expected) for fault in faults), faults


def test_draft_free_row_without_a_verdict_and_one_with_an_error_beside_it_are_faults(tmp_path: Path) -> None:
    none = dict.fromkeys(("exact_tokens", "exact_path", "exact_bits"))
    rows = [make_row(REFERENCE, "a", TOKENS) | none, make_row(REFERENCE, "b", TOKENS, error="late")]
    assert _faults(write_run(tmp_path, rows)) == [
        "the serialized run has no verdict against its second run",
        "an error is stored beside a verdict: late",
    ]


def test_divergence_is_found_with_its_step_position_and_margin(tmp_path: Path) -> None:
    reference = make_row(REFERENCE, "a", TOKENS, commit_margins=[1.0, 1.0, 1.0, 0.25, 1.0, 1.0])
    other = make_row(CHAIN, "a", [7, 8, 9, 4, 2, 1], reference=reference)
    found = check_stored(write_run(tmp_path, [reference, other]))
    (check,) = found.faulty
    assert check.verdict is not None
    assert check.verdict.first_divergence_step == 3
    assert check.verdict.first_divergence_position == 8
    assert check.verdict.top2_margin == 0.25
    assert set(check.faults) == {
        f"{level} is false" for level in ("exact_tokens", "exact_path", "exact_bits")
    }


def test_divergence_of_an_approximate_row_is_a_verdict_and_no_fault(tmp_path: Path) -> None:
    cell, fast = small_cell(numerics="fast"), small_cell(numerics="fast", method="ssd", budget=4)
    reference = make_row(cell, "a", TOKENS)
    other = make_row(fast, "a", [7, 8, 9, 4, 2, 1], reference=reference)
    found = check_stored(write_run(tmp_path, [reference, other]))
    assert not found.faulty
    assert [check.verdict.exact_tokens for check in found.checks if check.verdict] == [False]


def test_duplicates_and_missing_keys_are_reported(tmp_path: Path) -> None:
    rows = _rows()
    rows += [make_row(REFERENCE, "b", TOKENS), dict(rows[1])]
    found = check_stored(write_run(tmp_path, rows))
    assert {check.faults for check in found.faulty} == {("stored 2 times",)}
    assert found.missing == [(CHAIN.cell_key, "b", 0)]


def test_serialized_run_that_is_not_stored_counts_as_missing(tmp_path: Path) -> None:
    found = check_stored(write_run(tmp_path, _rows()[1:]))
    assert found.missing == [(REFERENCE.cell_key, "a", 0)]


def test_rows_whose_serialized_run_failed_are_unchecked_and_may_hold_no_verdict(tmp_path: Path) -> None:
    levels = dict.fromkeys(("exact_tokens", "exact_path", "exact_bits"))
    reference, accelerated = _rows(error="no verdict", **levels)
    failed = reference | dict.fromkeys(GENERATION_COLUMNS) | {"error": "prompt does not fit"}
    found = check_stored(write_run(tmp_path / "honest", [failed, accelerated]))
    assert not found.faulty
    assert any("its serialized run failed" in note for check in found.checks for note in check.notes)

    faults = _faults(write_run(tmp_path / "claims", [failed, accelerated | {"exact_tokens": True}]))
    assert faults == ["a verdict is stored although there is no serialized run to compare with"]


def test_a_serialized_run_that_differs_from_its_second_run_is_a_fault(tmp_path: Path) -> None:
    reference = make_row(REFERENCE, "a", TOKENS, exact_bits=False)
    assert _faults(write_run(tmp_path, [reference])) == ["the serialized run differs from its second run"]


def test_decoding_again_must_give_the_same_row_on_the_same_runtime() -> None:
    row = _rows()[1]
    assert compare_again(row, dict(row)).faults == ()
    other = make_row(CHAIN, "a", [7, 8, 9, 4, 2, 1], accepted=[2, 1, 0])
    assert (
        compare_again(row, other)
        .faults[0]
        .startswith("decoded again, it differs in exact_tokens, exact_path")
    )
    elsewhere = compare_again(row, other | {"runtime_fingerprint": "another"})
    assert elsewhere.faults == ()
    assert "on another runtime: another" in elsewhere.notes[0]
    assert compare_again(row, dict(row) | {"nfe_total": 9}).faults == (
        "decoded again, it differs in nfe_total",
    )


def test_sample_covers_cells_before_it_repeats_one_and_follows_its_seed(tmp_path: Path) -> None:
    rows = []
    for item in "abcdef":
        reference = make_row(REFERENCE, item, TOKENS)
        rows += [reference, make_row(CHAIN, item, TOKENS, reference=reference)]
    rows.append(make_row(REFERENCE, "failed", TOKENS, token_ids=None, generated_tokens=None, error="no"))
    write_run(tmp_path, rows)
    first = sample_rows(tmp_path, 4, seed=1)
    assert sorted(row["cell_key"] for row in first) == sorted([REFERENCE.cell_key, CHAIN.cell_key] * 2)
    assert [row["item_id"] for row in first] == [row["item_id"] for row in sample_rows(tmp_path, 4, seed=1)]
    assert len(sample_rows(tmp_path, 100, seed=1)) == 12


def test_checks_are_written_as_rows_of_the_checks_table(tmp_path: Path) -> None:
    checks = check_stored(write_run(tmp_path, _rows(nfe_total=5))).checks
    path = write_checks(tmp_path, "stored", checks)
    rows = read_table([str(path)], CHECKS).to_pylist()
    assert {row["kind"] for row in rows} == {"stored"}
    assert [row["detail"] for row in rows if row["cell_key"] == CHAIN.cell_key] == [
        "nfe_total is 5, its parts sum to 6"
    ]
    assert list((tmp_path / "staging").iterdir()) == []
    assert sample_name(checks) == sample_name(list(reversed(checks)))


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"generations/ folder; give the --out folder"):
        check_stored(tmp_path)


def test_text_rewritten_everywhere_is_found_by_its_tokens(tmp_path: Path) -> None:
    rows = [row | {"text": "another answer"} for row in _rows()]
    assert _faults(write_run(tmp_path, rows)) == ["the text is not that of its tokens"] * 2


def test_texts_of_a_model_that_is_not_here_are_said_to_be_unread(tmp_path: Path) -> None:
    found = check_stored(write_run(tmp_path, [make_row(small_cell(model="no/where"), "a", TOKENS)]))
    assert [check.faults for check in found.checks] == [()]
    ((reason, count),) = found.unread.items()
    assert count == 1
    assert "'no/where' is not in the local cache" in reason
