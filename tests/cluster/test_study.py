"""The study's table: means over benchmarks, drafters told apart, goals measured from the lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.study import goals_of, num_disagreeing, read_replays, study_lines
from dlmgrid.jobs import study
from dlmgrid.workers.cell import CELL_FIELDS, Cell
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.run_folder import open_run
from dlmgrid.workers.tables import REPLAYS, to_table, write_table

NAMES = {"aaa": "marginal_gain", "bbb": "degree_1"}


def row(method: str, budget: int, nfe: int, *, benchmark: str = "words", **changes: Any) -> dict[str, Any]:
    """A replayed generation of 100 serialized forwards; its rounds accept two states each."""
    settings = {"prompt_version": "1", "temperature": 0.0, "block_length": 32, "gen_length": 64}
    values = {"model": "/data/model", "benchmark": benchmark, "method": method, "budget": budget} | settings
    of_cell = {name: changes.pop(name) for name in CELL_FIELDS if name in changes}
    cell = Cell(**(values | of_cell))
    return cell.to_dict() | {
        "cell_key": cell.cell_key, "item_id": "1", "repeat": 0, "nfe_total": nfe, "nfe_reference": 100, "rounds": 2,
        "accepted": [1, 3], "drafted_nodes": 30,
    } | changes  # fmt: skip


def test_a_line_is_the_mean_of_its_benchmarks() -> None:
    rows = [row("ssd", 8, 50), row("ssd", 8, 30, item_id="2"), row("ssd", 8, 80, benchmark="functions")]
    (line,) = study_lines(rows, {})
    assert line.nfe_by_benchmark == {"words": 40, "functions": 80}
    assert (line.nfe, line.num_items, line.accepted_per_round) == (60, 3, 2)
    assert line.ratio == (200 / 80 + 100 / 80) / 2


def test_drafters_and_passes_have_lines_of_their_own() -> None:
    rows = [
        row("spiffy", 8, 50, drafter_fingerprint="aaa"),
        row("spiffy", 8, 60, drafter_fingerprint="cccccccc"),
        row("ssd", 8, 40, window="full", fused_commit=True),
        row("none", 0, 100),
    ]
    lines = study_lines(rows, NAMES)
    assert [(line.passes.decoder, line.method) for line in lines] == [
        ("static", "none"),
        ("static", "spiffy cccccc"),
        ("static", "spiffy marginal_gain"),
        ("static fused window full", "ssd"),
    ]


def test_goals_compare_with_the_best_graph_and_name_the_worst_task() -> None:
    rows = []
    for benchmark, spot in (("words", 40), ("functions", 47)):
        rows += [
            row("spot", 8, spot, benchmark=benchmark),
            row("spiffy", 8, 50, benchmark=benchmark, drafter_fingerprint="aaa"),
            row("spiffy", 8, 90, benchmark=benchmark, drafter_fingerprint="bbb"),
            row("ssd", 8, 60, benchmark=benchmark),
        ]
    goals = {goal.text: goal for goal in goals_of(study_lines(rows, NAMES))}
    over = goals["spot D = 8: NFE saved over spiffy marginal_gain"]
    assert over.measured == pytest.approx(0.13) and over.is_met
    worst = goals["spot D = 8: NFE saved over spiffy marginal_gain, functions"]
    assert worst.measured == pytest.approx(0.06) and not worst.is_met
    assert goals["spot D = 8: NFE saved over ssd"].measured == pytest.approx(1 - 43.5 / 60)
    assert not goals["spot D = 8: draft-free / NFE"].is_met


def test_gamma_is_held_against_the_same_order_model() -> None:
    rows = [row("spot", 20, 40), row("spot_gamma", 20, 43, drafted_nodes=15)]
    goals = {goal.text: goal for goal in goals_of(study_lines(rows, {}))}
    assert goals["spot_gamma D = 20: NFE above spot"].is_met
    assert goals["spot_gamma D = 20: drafted nodes saved over spot"].measured == 0.5


def test_a_folder_without_replays_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no replays; make them with dlmgrid replay"):
        read_replays([tmp_path])


def test_a_folder_of_replays_is_named_where_a_run_is_wanted(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    (folder / "replays").mkdir(parents=True)
    with pytest.raises(InputError, match=r"it holds replays, which dlmgrid study '.*with space' shows"):
        open_run(folder)


def test_a_drafted_boundary_is_held_against_plain_draft_free_runs() -> None:
    passes = {"window": "full", "fused_commit": True, "nfe_reference": 95}
    rows = [row("none", 0, 100), row("spot", 8, 40, **passes)]
    (goal,) = goals_of(study_lines(rows, {}))
    assert (goal.measured, goal.wanted, goal.is_met) == (2.5, 2.7, False)


@pytest.mark.parametrize(
    ("setting", "values", "texts"),
    [
        ("gen_length", (64, 32), {"static gen_length 64", "static gen_length 32"}),
        ("seed", (0, 1), {"static seed 0", "static seed 1"}),
        ("dtype", ("float32", "bfloat16"), {"static dtype float32", "static dtype bfloat16"}),
        ("top_k", (None, 5), {"static", "static top_k 5"}),
        (
            "weight_fingerprint",
            ("a1", "b2"),
            {"static weight_fingerprint a1", "static weight_fingerprint b2"},
        ),
    ],
)
def test_rows_that_differ_in_a_setting_are_never_pooled(
    setting: str, values: tuple[object, object], texts: set[str]
) -> None:
    rows = [row("ssd", 8, nfe, **{setting: value}) for value, nfe in zip(values, (10, 40), strict=True)]
    lines = study_lines(rows, {})
    assert {line.passes.decoder for line in lines} == texts
    assert sorted(line.nfe for line in lines) == [10, 40]


def test_every_setting_of_a_cell_but_the_benchmark_tells_lines_apart() -> None:
    one = row("ssd", 8, 50)
    for name in set(CELL_FIELDS) - {"benchmark"}:
        other = one | {name: "fast_dllm" if name == "comparison" else _another(one[name])}
        assert len(study_lines([one, other], {})) == 2, name


def _another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else 3 if value is None else f"{value}x"


def test_factors_gammas_and_models_of_one_last_name_read_differently() -> None:
    factors = [row("ssd", 8, 10, decoder="factor", factor=factor) for factor in (0.1, 8)]
    assert [line.passes.decoder for line in study_lines(factors, {})] == ["factor 0.1", "factor 8"]
    near = [row("ssd", 8, 10, decoder="threshold", threshold=value) for value in (0.9, 0.90000001)]
    assert len({line.passes.decoder for line in study_lines(near, {})}) == 2
    gammas = [row("spot_gamma", 20, 43, gamma=gamma) for gamma in (0.1, 0.2)]
    lines = study_lines([row("spot", 20, 40), *gammas], {})
    assert [line.method for line in lines] == ["spot", "spot_gamma gamma 0.1", "spot_gamma gamma 0.2"]
    texts = [goal.text for goal in goals_of(lines)]
    assert "spot_gamma gamma 0.2 D = 20: NFE above spot" in texts
    models = [row("ssd", 8, 10, model=f"/data/{name}/model") for name in "ab"]
    assert [line.passes.model for line in study_lines(models, {})] == ["/data/a/model", "/data/b/model"]
    drafters = [row("spiffy", 8, 50, drafter_fingerprint=name) for name in ("aaa", "bbb")]
    found = study_lines(drafters, {"aaa": "degree_1", "bbb": "degree_1"})
    assert [line.method for line in found] == ["spiffy degree_1 aaa", "spiffy degree_1 bbb"]


def test_a_benchmark_may_have_its_own_length_in_a_line() -> None:
    rows = [row("ssd", 8, 50), row("ssd", 8, 90, benchmark="functions", gen_length=128)]
    (line,) = study_lines(rows, {})
    assert line.passes.decoder == "static" and line.nfe == 70


def test_goals_compare_lines_of_one_experiment_only() -> None:
    lines = study_lines(
        [row(method, 8, nfe, seed=seed) for seed, method, nfe in
         ((0, "spot", 40), (0, "ssd", 60), (1, "spot", 80), (1, "ssd", 100))],
        {},
    )  # fmt: skip
    measured = {goal.text: goal.measured for goal in goals_of(lines)}
    assert measured["model, seed 0, 1 generations: spot D = 8: NFE saved over ssd"] == pytest.approx(1 / 3)
    assert measured["model, seed 1, 1 generations: spot D = 8: NFE saved over ssd"] == pytest.approx(0.2)
    apart = study_lines([row("spot", 8, 40), row("ssd", 8, 60), row("ssd", 8, 2, item_id="2")], {})
    assert not [goal.text for goal in goals_of(apart) if "over ssd" in goal.text]


def test_rows_that_disagree_with_live_decoding_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("ssd", 8, 50, item_id=str(number)) for number in range(3)]
    for one, agrees in zip(rows, (True, False, None), strict=True):
        one |= {
            "recorded_cell_key": "r", "prompt_tokens": 4, "nfe_prefill": 1, "nfe_denoise": 48, "nfe_commit": 1,
            "accepted_per_round": 2.0, "depth_per_round": 1.0, "width_per_round": 1.0, "rows_computed": 9,
            "agrees_with_live": agrees, "product_version": "0", "seed": "0",
        }  # fmt: skip
    (tmp_path / "replays").mkdir()
    write_table(str(tmp_path / "replays" / "a.parquet"), to_table(REPLAYS, rows))
    assert num_disagreeing([tmp_path]) == 1
    assert study.command([tmp_path]) == 4
    printed = capsys.readouterr()
    assert "1 of these rows do not agree with live decoding" in printed.err
    assert "× fewer" in printed.out
