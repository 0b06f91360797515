"""Selection of Spiffy's draft graph on paths made by hand, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dlmgrid.workers.drafting.spiffy_graph import (
    SELECTIONS,
    DraftGraph,
    GraphKey,
    Pairs,
    Path_,
    build_graph,
    load_graph,
    save_graph,
    select_nodes,
)
from dlmgrid.workers.drafting.spiffy_picture import draw
from dlmgrid.workers.errors import InputError

A, B, C, D = (0, 0), (1, 0), (2, 0), (0, 1)
KEY = GraphKey(
    weight_fingerprint="f" * 24, decoder="static", commits_per_step=1, threshold=None, temperature=0.0,
    noise="commit_count", block_length=8,
)  # fmt: skip


def path(*commits: tuple[int, int]) -> Path_:
    """The growing sets of a sequence of single commits."""
    return tuple(tuple(sorted(commits[: n + 1])) for n in range(len(commits)))


def graph_of(paths: list[Path_], budget: int, selection: str = "marginal_gain") -> DraftGraph:
    return build_graph(paths, key=KEY, budget=budget, selection=selection, calibration={"items": {}})


def test_marginal_gain_takes_what_brings_most_roots_one_step_further() -> None:
    # Six roots start with A; of them four go on with B. Five start with B and then take A: the same set {A, B}.
    paths = [path(A, B)] * 4 + [path(A, C)] * 2 + [path(B, A, C)] * 5
    selected = select_nodes(paths, 4, "marginal_gain")
    # A brings 6 roots on, B 5; then {A, B} brings 4 + 5, and {A, B, C} 5.
    assert selected == [(A,), (B,), (A, B), (A, B, C)]
    assert select_nodes(paths, 2, "marginal_gain") == selected[:2]
    assert select_nodes(paths, 99, "marginal_gain")[4:] == [(A, C)]


def test_a_path_moves_over_nodes_that_are_selected_already() -> None:
    # {A, B} is selected for the first three; when {B} comes, the last two roots reach {A, B} at once.
    paths = [path(A, B)] * 3 + [path(B, A, C)] * 2
    assert select_nodes(paths, 4, "marginal_gain") == [(A,), (A, B), (B,), (A, B, C)]


def test_connected_count_takes_the_largest_count_with_a_selected_parent() -> None:
    # {A, B} has the largest count of all but no parent at first.
    paths = [path(A, B)] * 4 + [path(B, A)] * 3 + [path(C)] * 5
    assert select_nodes(paths, 3, "connected_count") == [(C,), (A,), (A, B)]


def test_degree_1_adds_the_counts_of_the_parents_and_stays_under_one_first_commit() -> None:
    paths = [path(A, B)] * 5 + [path(A, C)] * 4 + [path(B)] * 8
    # Counts: A 9, B 8, {A, B} 5, {A, C} 4. By degree 1 {A, B} scores 14 and {A, C} 13, both above B.
    assert select_nodes(paths, 3, "degree_1") == [(A,), (A, B), (A, C)]
    assert select_nodes(paths, 3, "connected_count") == [(A,), (B,), (A, B)]


def test_ties_go_to_the_smaller_set_then_to_the_smaller_pairs() -> None:
    paths = [path(B, C), path(A, C), path(C, A)]
    assert select_nodes(paths, 4, "connected_count") == [(A,), (A, C), (B,), (C,)]
    assert select_nodes([path(D), path(A)], 2, "marginal_gain") == [(A,), (D,)]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_node_has_an_earlier_parent_and_smaller_budgets_are_prefixes(selection: str) -> None:
    orders: list[tuple[tuple[int, int], ...]] = [
        (A, B, C),
        (B, A, C),
        (C, B, A),
        (A, C, B),
        (D, B),
        (B, D, C),
    ]
    paths = [path(*orders[n % 6]) for n in range(40)] + [path(A, B, C)] * 7
    large = graph_of(paths, 12, selection)
    for budget in range(1, 12):
        assert [node.pairs for node in graph_of(paths, budget, selection).nodes] == [
            node.pairs for node in large.nodes[:budget]
        ]
    for index, node in enumerate(large.nodes):
        first = node.parents[0]
        before: Pairs = () if first == -1 else large.nodes[first].pairs
        assert first < index
        assert set(before) < set(node.pairs) and len(node.pairs) == len(before) + 1
    both = next(node for node in large.nodes if node.pairs == (A, B))
    assert len(both.parents) == 2, "a node that was reached in two orders has two parents"


def test_a_graph_is_stored_whole_and_says_when_it_was_changed(tmp_path: Path) -> None:
    graph = graph_of([path(A, B)] * 3 + [path(B)], 8)
    file = tmp_path / "graph.json"
    save_graph(graph, file)
    assert load_graph(file) == graph
    values = json.loads(file.read_text())
    assert values["fingerprint"] == graph.fingerprint and values["key"]["decoder"] == "static"
    values["nodes"][0]["count"] += 1
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match="was changed after calibration"):
        load_graph(file)
    del values["nodes"][0]["parents"]
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match="is not whole"):
        load_graph(file)
    file.write_text(json.dumps({"format": "other"}))
    with pytest.raises(InputError, match="its format is 'other'"):
        load_graph(file)
    file.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_graph(file)
    with pytest.raises(InputError, match="does not exist; make one with dlmgrid calibrate"):
        load_graph(tmp_path / "none.json")


def test_nothing_to_select_from_and_an_unknown_selection_are_bad_input() -> None:
    with pytest.raises(InputError, match="hold no drafted step"):
        graph_of([(), ()], 8)
    with pytest.raises(InputError, match="selection 'best' does not exist"):
        graph_of([path(A)], 8, "best")


def test_the_picture_shows_every_node_and_edge() -> None:
    graph = graph_of([path(A, B)] * 3 + [path(B, A)], 8)
    root = ElementTree.fromstring(draw(graph))
    svg = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{svg}text")]
    assert {"root", "1. 0:0", "2. 0:0 1:0", "3. 1:0", "75.0%", "100.0%"} <= set(texts)
    edges = list(root.iter(f"{svg}line"))
    assert len(edges) == sum(len(node.parents) for node in graph.nodes) == 4
    assert sum("stroke-dasharray" in edge.attrib for edge in edges) == 1
