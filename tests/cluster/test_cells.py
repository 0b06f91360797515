"""From a grid to its cells: references added, duplicates folded, names and lengths checked before any model loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlmgrid.cluster.cost import forwards_per_row
from dlmgrid.cluster.grid import read_grid
from dlmgrid.cluster.plan import UnitSettings, plan_chains
from dlmgrid.cluster.run import copy_drafters, look_up
from dlmgrid.cluster.sources import Sources
from dlmgrid.cluster.store import Store
from dlmgrid.workers.cell import Cell
from dlmgrid.workers.drafting.spiffy_graph import DraftGraph, GraphKey, GraphNode, load_graph, save_graph
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.testing import fake_catalog
from dlmgrid.workers.testing.fake_catalog import FakeMethod, write_fake_checkpoint


def test_every_accelerated_cell_has_its_reference_before_it_and_nothing_is_there_twice(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    grid = write_grid(temperatures=[0, 0, 1], methods=["ssd", "confidence_tree"], budgets=[0, 6, 6])
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    described = [(cell.temperature, cell.method, cell.budget) for cell in cells]
    assert described == [
        (temperature, method, budget)
        for temperature in (0.0, 1.0)
        for method, budget in (("none", 0), ("ssd", 6), ("confidence_tree", 6))
    ]
    keys = [cell.cell_key for cell in cells]
    for cell in cells:
        assert keys.index(cell.reference().cell_key) <= keys.index(cell.cell_key)
        assert cell == cell.canonical()


def test_triton_kernels_are_refused_on_a_cpu_before_anything_is_planned(
    tmp_path: Path, write_grid: Callable[..., Path], sources: Sources
) -> None:
    message = (
        r"kernels: triton runs on a CUDA device .*; add resources: {device: cuda}, or use kernels: torch"
    )
    with pytest.raises(InputError, match=message):
        look_up(read_grid(write_grid(kernels="triton")).grid, sources, data=None, limit=None)
    grid = read_grid(write_grid(kernels="triton", resources={"device": "cuda"})).grid
    look_up(grid, sources, data=None, limit=None)


def test_settings_that_are_equal_numbers_are_one_cell() -> None:
    cell = Cell(
        model="m", benchmark="b", prompt_version="1", method="ssd", budget=6, temperature=1.0, decoder="threshold",
        threshold=0.0, block_length=32, gen_length=64,
    )  # fmt: skip
    twin = replace(cell, temperature=1, threshold=-0.0)
    assert (twin.cell_key, twin.to_dict()) == (cell.cell_key, cell.to_dict())
    assert str(twin.threshold) == "0.0"
    assert replace(cell, temperature=1.5).cell_key != cell.cell_key


def test_fused_cells_are_compared_with_the_draft_free_cell_whose_passes_are_not_fused(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    fused = {"name": "factor", "factor": 1.0, "fused_commit": True}
    grid = write_grid(temperatures=[0], decoder=[fused, {"name": "factor", "factor": 1.0}])
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    assert [(cell.method, cell.fused_commit, cell.is_reference) for cell in cells] == [
        ("none", False, True), ("none", True, False), ("ssd", True, False), ("ssd", False, False),
    ]  # fmt: skip
    assert {cell.reference().cell_key for cell in cells} == {cells[0].cell_key}
    assert {cell.claim for cell in cells} == {"exact"}
    assert {(cell.decoder, cell.factor, cell.comparison) for cell in cells} == {("factor", 1.0, None)}
    assert forwards_per_row(cells[1]) < forwards_per_row(cells[3])


def test_windows_are_settings_of_the_drafted_cells_alone(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    windowed = {"name": "static", "window": "full", "fused_commit": True}
    grid = write_grid(
        temperatures=[0], methods=["none", "ssd"], decoder=[windowed, "static"], record="window"
    )
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    assert [(cell.method, cell.window, cell.fused_commit) for cell in cells] == [
        ("none", "", False), ("none", "", True), ("ssd", "full", True), ("ssd", "", False),
    ]  # fmt: skip
    assert {cell.reference().cell_key for cell in cells} == {cells[0].cell_key}
    assert {cell.claim for cell in cells} == {"exact"}
    assert read_grid(grid).grid.record == ["window"]
    plain = read_grid(
        write_grid("plain.yaml", temperatures=[0], methods=["none", "ssd"], decoder=[windowed, "static"])
    )
    assert plain.grid.digest == read_grid(grid).grid.digest


@pytest.mark.parametrize("option", [{"window": "refresh"}, {"fused_commit": True}])
def test_a_family_whose_commit_pass_seeds_the_next_block_takes_no_joined_passes(
    write_grid: Callable[..., Path], sources: Sources, option: dict[str, Any]
) -> None:
    grid = read_grid(write_grid(decoder={"name": "static", **option})).grid
    look_up(grid, sources, data=None, limit=None)

    def seeding(folder: Path, block_length: int | None) -> Any:
        return replace(sources.check_checkpoint(folder, block_length), seeds_next_block=True)

    with pytest.raises(
        InputError, match=f"commit pass gives the first token .*; remove {next(iter(option))}"
    ):
        look_up(grid, replace(sources, check_checkpoint=seeding), data=None, limit=None)


def test_a_method_is_refused_under_a_decoder_it_does_not_draft_for(
    write_grid: Callable[..., Path], sources: Sources
) -> None:
    known = replace(sources, methods={**sources.methods, "spot_sets": FakeMethod("spot_sets", "sets")})
    message = "method 'spot_sets' does not draft for the decoder static; it does for threshold and"
    with pytest.raises(InputError, match=message):
        look_up(read_grid(write_grid(methods=["ssd", "spot_sets"])).grid, known, data=None, limit=None)


def test_the_comparison_of_a_threshold_is_part_of_its_cells(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    decoders = [
        {"name": "threshold", "threshold": 0.9, **comparison}
        for comparison in ({}, {"comparison": "sdar"}, {"comparison": "fast_dllm"})
    ]
    grid = write_grid(temperatures=[0], methods=["none"], decoder=decoders)
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    assert [cell.comparison for cell in cells] == ["sdar", "fast_dllm"]
    assert len({cell.cell_key for cell in cells}) == 2


def test_greedy_match_promises_nothing_above_temperature_0(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    grid = write_grid(temperatures=[0, 1.5], methods=["ssd"], verification="greedy_match")
    cells = [work.cell for work in make_works(grid, tmp_path / "out")]
    assert [(c.temperature, c.method, c.verification, c.claim) for c in cells] == [
        (0.0, "none", "coupled", "exact"),
        (0.0, "ssd", "coupled", "exact"),
        (1.5, "none", "coupled", "exact"),
        (1.5, "ssd", "greedy_match", "approximate"),
    ]


def test_repeats_and_limits_choose_keys_not_cells(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    small = make_works(write_grid(limit=2), tmp_path / "a")
    large = make_works(write_grid(repeats=3), tmp_path / "b")
    assert [work.cell for work in small] == [work.cell for work in large]
    assert [len(work.keys) for work in small] == [2] * 4
    assert [len(work.keys) for work in large] == [36] * 4


def test_the_longer_of_two_entries_of_one_benchmark_counts(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any
) -> None:
    grid = write_grid(
        benchmarks=[{"name": "letters", "limit": 2}, "letters", {"name": "letters", "gen_length": 64}]
    )
    assert [len(work.keys) for work in make_works(grid, tmp_path / "out")] == [12] * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["sdd"]}, r"^grid: methods\[0\]: method 'sdd' does not exist; did you mean 'ssd'?"),
        (
            {"benchmarks": ["letters", "leters"]},
            r"^grid: benchmarks\[1\]: benchmark 'leters' does not exist; did you mean 'letters'?",
        ),
        ({"models": ["nowhere"]}, r"^grid: models\[0\]: model 'nowhere' has no checkpoint"),
        (
            {"gen_length": 513},
            "gen_length 513 of benchmark 'letters' is more than the 512 positions of model",
        ),
        (
            {"methods": [{"name": "ssd", "budgets": [2], "fold": {"tau": [0.1, 0.2, 0.3]}}]},
            "method 'ssd': fold: tau has 3 values, model .* has 4 layers; give one number, or one a layer",
        ),
        (
            {"methods": [{"name": "ssd", "budgets": [2], "fold": {"tau": [0.1]}}]},
            "method 'ssd': fold: tau has 1 value, model .* has 4 layers; give one number, or one a layer",
        ),
        (
            {"benchmarks": [{"name": "letters", "num_fewshot": 1}]},
            "num_fewshot 1 is more than the 0 examples",
        ),
        ({"decoder": {"name": "static", "commits_per_step": 33}}, "33 is more than its block of 32 tokens"),
        (
            {"repeats": 10**14},
            r"the grid has at least 400,000,000,000,000 rows .*; one run takes 2,000,000, lower repeats",
        ),
        (
            {"repeats": 50_000},
            r"the grid has 2,400,000 rows \(4 cells, 50,000 repeats\); one run takes 2,000,000",
        ),
        (
            {"temperatures": [n / 1000 for n in range(1000)], "budgets": list(range(1, 1001))},
            "the grid has 1,001,000 cells; one run takes 10,000, split it",
        ),
    ],
)
def test_what_does_not_exist_or_fit_is_named(
    write_grid: Callable[..., Path], sources: Sources, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        look_up(read_grid(write_grid(**changes)).grid, sources, data=None, limit=None)


def test_a_chat_template_is_tried_before_anything_is_run(
    write_grid: Callable[..., Path], sources: Sources, checkpoint: Path
) -> None:
    grid = read_grid(write_grid(models=[str(checkpoint), {"path": str(checkpoint), "chat_template": "nope"}]))
    with pytest.raises(
        InputError, match=r"^g.yaml: models\[1\]: .*chat_template 'nope' is not one of chatml"
    ):
        look_up(grid.grid, sources, data=None, limit=None, origin="g.yaml")


def test_what_is_folded_or_has_no_effect_is_said(
    write_grid: Callable[..., Path], sources: Sources, checkpoint: Path
) -> None:
    def remarks(**changes: Any) -> list[str]:
        return look_up(read_grid(write_grid(**changes)).grid, sources, data=None, limit=None).remarks

    assert remarks() == []
    assert remarks(
        models=[str(checkpoint), str(checkpoint)],
        benchmarks=["letters", {"name": "letters", "limit": 3}],
        temperatures=[1, 1.0],
        methods=["ssd", "ssd"],
        budgets=[4, 4],
    ) == [
        f"models: {checkpoint} is given more than once; each cell is run once",
        "benchmarks: letters is given more than once; each cell is run once",
        "temperatures: 1 is given more than once; each cell is run once",
        "methods: ssd with budget 4 is given more than once; each cell is run once",
    ]
    assert remarks(methods=["ssd", {"name": "ssd", "fold": {"tau": 0.1}}], budgets=[4]) == []
    assert remarks(methods=[{"name": "none", "budgets": [3]}, {"name": "ssd", "budgets": [0]}]) == [
        "methods: none drafts nothing; its budgets [3] are not used",
        "methods: ssd with budget 0 is the draft-free cell, which is run once",
    ]
    assert remarks(repeats=3, temperatures=[0, 1]) == [
        "repeats: 3 at temperature 0 are copies of one another: nothing is drawn there"
    ]
    assert remarks(repeats=3, temperatures=[1]) == []
    assert remarks(repeats=3, temperatures=[0], decoder={"name": "static", "confidence": "random"}) == []
    window = {"name": "static", "window": "full"}
    assert remarks(methods=["none"], decoder=window) == [
        "decoder: window full is without effect: no method of the grid drafts"
    ]
    assert remarks(decoder=window) == []
    assert remarks(record=["hidden", "window"]) == [
        "record: hidden, window without effect: nothing is recorded; use dlmgrid record, or dlmgrid plan --record"
    ]
    (line,) = remarks(stop="full")
    assert line.endswith("so the answers are those of eos, with more forwards")
    assert line.startswith("stop: full on ")
    assert remarks(limit=13) == ["benchmark letters has 12 items; limit 13 takes them all"]
    (actors, cpus) = remarks(resources={"num_actors": 1000, "cpus_per_actor": 1024})
    assert actors.startswith("resources: num_actors 1000 is more than the 24 samples")
    assert cpus.startswith("resources: cpus_per_actor 1024 is more than the ")


def test_a_block_length_that_does_not_fit_and_missing_data_are_named(
    tmp_path: Path, write_grid: Callable[..., Path], sources: Sources
) -> None:
    model = write_fake_checkpoint(tmp_path / "other", block_length=32)
    grid = read_grid(write_grid(models=[{"path": str(model), "block_length": 7}])).grid
    with pytest.raises(InputError, match="block_length 7 does not fit"):
        look_up(grid, sources, data=None, limit=None)
    with pytest.raises(InputError, match=r"letters.jsonl is missing; put the benchmark's items there"):
        look_up(read_grid(write_grid()).grid, sources, data=str(tmp_path), limit=None)


def test_twice_the_same_item_id_is_bad_data(
    tmp_path: Path, write_grid: Callable[..., Path], sources: Sources, write_data: Any
) -> None:
    data = write_data(2, {})
    path = data / "letters.jsonl"
    path.write_text(path.read_text() * 2)
    with pytest.raises(InputError, match="gives an item id twice"):
        look_up(read_grid(write_grid()).grid, sources, data=str(data), limit=None)


def spiffy_graph(path: Path, *, budget: int = 8, **key: Any) -> DraftGraph:
    """A graph of one node made for the fake model of these tests."""
    values = {
        "weight_fingerprint": "", "decoder": "static", "commits_per_step": 1, "threshold": None, "temperature": 0.0,
        "noise": "commit_count", "block_length": 32,
    }  # fmt: skip
    node = GraphNode(pairs=((0, 0),), parents=(-1,), count=1)
    graph = DraftGraph(
        key=GraphKey(**(values | key)), selection="marginal_gain", budget=budget, num_roots=1, calibration={},
        nodes=(node,),
    )  # fmt: skip
    save_graph(graph, path)
    return graph


def test_each_cell_takes_the_graph_that_was_calibrated_for_it(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any, checkpoint: Path
) -> None:
    weights = fake_catalog.weight_fingerprint(checkpoint)
    graphs = {
        temperature: spiffy_graph(
            tmp_path / f"T{temperature}.json", temperature=float(temperature), weight_fingerprint=weights
        )
        for temperature in (0, 1)
    }
    paths = [str(tmp_path / f"T{temperature}.json") for temperature in (0, 1)]
    grid = write_grid(methods=["ssd", {"name": "spiffy", "graph": paths, "budgets": [0, 6]}])
    works = [work for work in make_works(grid, tmp_path / "out") if work.cell.method == "spiffy"]
    assert [work.cell.drafter_fingerprint for work in works] == [graphs[t].fingerprint for t in (0, 1)]
    assert [work.drafter_source for work in works] == paths
    assert [Path(work.drafter_path).name for work in works] == [
        f"{graphs[t].fingerprint}.json" for t in (0, 1)
    ]
    # Another graph is another cell; where the file lies is not.
    moved = tmp_path / "moved.json"
    moved.write_bytes(Path(paths[0]).read_bytes())
    grid = write_grid(temperatures=[0], methods=[{"name": "spiffy", "graph": str(moved), "budgets": [6]}])
    again = [work for work in make_works(grid, tmp_path / "out") if work.cell.method == "spiffy"]
    assert [work.cell.cell_key for work in again] == [works[0].cell.cell_key]
    store = Store(tmp_path / "out")
    copy_drafters(store, works)
    assert sorted(path.name for path in store.drafters.iterdir()) == sorted(
        f"{graph.fingerprint}.json" for graph in graphs.values()
    )
    assert load_graph(Path(works[1].drafter_path)) == graphs[1]
    (unit,) = plan_chains(works[:1], None, UnitSettings(run_id="r", device="cpu", items_per_unit=32))[
        0
    ].dependents
    assert unit.drafter_path == works[0].drafter_path
    # A second graph that fits leaves no way to choose.
    grid = write_grid(
        temperatures=[0], methods=[{"name": "spiffy", "graph": [paths[0], str(moved)], "budgets": [6]}]
    )
    with pytest.raises(InputError, match="both fit; name one of them"):
        make_works(grid, tmp_path / "out")


@pytest.mark.parametrize(
    ("method", "key", "message"),
    [
        ({"name": "spiffy"}, {}, "method 'spiffy' needs graph; see dlmgrid methods spiffy"),
        ({"name": "ssd", "graph": "G"}, {}, "method 'ssd' takes no graph; remove it"),
        ({"name": "spot", "checkpoint": "G", "gamma": 0.1}, {}, "method 'spot' takes no gamma; remove it"),
        ({"name": "spot_gamma", "checkpoint": "G"}, {}, "method 'spot_gamma' needs gamma"),
        ({"name": "spot", "checkpoint": "G"}, {}, "order model .*G: not a whole safetensors file"),
        ({"name": "spot", "checkpoint": "nowhere.safetensors"}, {}, "nowhere.safetensors does not exist; make one"),
        ({"name": "spiffy", "graph": "nowhere.json"}, {}, "nowhere.json does not exist; make one with"),
        ({"name": "spiffy", "graph": "G"}, {"temperature": 1.0}, "calibrated for temperature 1.0, the cell has 0.0"),
        ({"name": "spiffy", "graph": "G"}, {"commits_per_step": 2}, "calibrated for commits_per_step 2, the cell"),
        ({"name": "spiffy", "graph": "G"}, {"block_length": 16}, "calibrated for block_length 16, the cell has 32"),
        ({"name": "spiffy", "graph": "G"}, {"budget": 4}, "calibrated for 4 nodes, the budget is 6"),
        ({"name": "spiffy", "graph": "G"}, {"weight_fingerprint": "0" * 24}, "calibrated on other weights"),
    ],
)  # fmt: skip
def test_a_drafter_that_is_missing_or_of_another_kind_is_named_before_work_starts(
    tmp_path: Path, write_grid: Callable[..., Path], make_works: Any, method: dict[str, Any], key: dict[str, Any],
    message: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    spiffy_graph(tmp_path / "G", **key)
    with pytest.raises(InputError, match=message) as caught:
        make_works(write_grid(temperatures=[0], methods=[method]), tmp_path / "out")
    assert "\n" not in str(caught.value)
