"""Spiffy's draft graph (arXiv 2509.18085): which sets of candidates are worth verifying, chosen once, offline.

A node is a set of (position rank, token rank) pairs, what the target will have filled some steps after the root. Its
structure is fixed by calibration; positions and tokens are filled in at every root. A node may have several parents
and is accepted through any of them.

Selections, each greedy and connected (a node is added only after one of its parents, the root counting as one):

- ``marginal_gain`` (default): the node that brings most calibration roots one step further;
- ``connected_count``: the node that most calibration paths go through (the wording of the paper's version 4);
- ``degree_1``: count of the node plus those of its parents, the root's left out (the wording of version 3).

Ties go to the smaller set, then to the lexicographically smaller one. The first n nodes of a graph are the graph of
budget n, so one calibration serves every smaller budget. No torch here.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlmgrid.workers.cell import DEFAULT_CONFIDENCE, digest
from dlmgrid.workers.errors import InputError
from dlmgrid.workers.partial_files import write_whole

FORMAT = "dlmgrid-draft-graph-1"
SELECTIONS = ("marginal_gain", "connected_count", "degree_1")
ROOT = -1

Pairs = tuple[tuple[int, int], ...]
"""A node: (position rank, token rank) pairs in ascending order."""

Path_ = tuple[Pairs, ...]
"""What followed one calibration root: the growing sets of its steps, each a superset of the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    """What a graph was calibrated for: it drafts only where all of this is the same."""

    weight_fingerprint: str
    decoder: str
    commits_per_step: int
    threshold: float | None
    temperature: float
    noise: str
    block_length: int
    comparison: str | None = None
    factor: float | None = None
    confidence: str = DEFAULT_CONFIDENCE
    sub_block_length: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNode:
    """``parents`` are indices of nodes, -1 for the root; the first one comes earlier in the graph and fills the
    node's tokens. ``count`` is the number of calibration paths through the node."""

    pairs: Pairs
    parents: tuple[int, ...]
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftGraph:
    """Nodes in the order of their selection, hence in topological order along first parents.

    ``budget`` is the number of nodes asked for; fewer are there where calibration saw fewer.
    """

    key: GraphKey
    selection: str
    budget: int
    num_roots: int
    calibration: dict[str, Any]
    nodes: tuple[GraphNode, ...]

    @property
    def fingerprint(self) -> str:
        """24 hexadecimal digits of everything in the graph."""
        return digest(_plain(self))


def select_nodes(paths: Sequence[Path_], budget: int, selection: str) -> list[Pairs]:
    """At most ``budget`` nodes in the order of selection. Raises InputError for an unknown selection."""
    if selection not in SELECTIONS:
        raise InputError(f"selection {selection!r} does not exist; known: {', '.join(SELECTIONS)}")
    if selection == "marginal_gain":
        return _by_gain(paths, budget)
    counts, edges = count_paths(paths)
    parents = _parents(edges)
    scores = dict(counts)
    if selection == "degree_1":
        scores = {
            node: count + sum(counts[parent] for parent in parents[node] if parent)
            for node, count in counts.items()
        }
    return _by_score(scores, parents, budget)


def count_paths(paths: Sequence[Path_]) -> tuple[Counter[Pairs], Counter[tuple[Pairs, Pairs]]]:
    """How many paths go through each node, and along each edge; the root is the empty set and has no count."""
    counts: Counter[Pairs] = Counter()
    edges: Counter[tuple[Pairs, Pairs]] = Counter()
    for path in paths:
        counts.update(path)
        edges.update(zip(((), *path), path, strict=False))
    return counts, edges


def build_graph(
    paths: Sequence[Path_], *, key: GraphKey, budget: int, selection: str, calibration: dict[str, Any]
) -> DraftGraph:
    """Select nodes and give each its parents. Raises InputError where there is nothing to select from."""
    nodes = select_nodes(paths, budget, selection)
    if not nodes:
        raise InputError(
            "the calibration runs hold no drafted step (every block takes one step, or none was predicted); "
            "record more items, or a decoder that takes more steps"
        )
    counts, edges = count_paths(paths)
    parents = _parents(edges)
    index = {(): ROOT, **{node: number for number, node in enumerate(nodes)}}
    made = []
    for number, node in enumerate(nodes):
        known = [parent for parent in parents[node] if parent in index]
        known.sort(key=lambda parent: (index[parent] >= number, -edges[parent, node], index[parent]))
        made.append(GraphNode(pairs=node, parents=tuple(index[p] for p in known), count=counts[node]))
    return DraftGraph(
        key=key, selection=selection, budget=budget, num_roots=len(paths), calibration=calibration,
        nodes=tuple(made),
    )  # fmt: skip


def save_graph(graph: DraftGraph, path: Path) -> None:
    """Write the graph as JSON with its fingerprint, whole or not at all."""
    text = json.dumps({"fingerprint": graph.fingerprint, **_plain(graph)}, indent=1)
    write_whole(path, text + "\n")


def load_graph(path: Path) -> DraftGraph:
    """Read and check a graph. Raises InputError for a missing file, one that is no graph, or an altered one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"draft graph {path} does not exist; make one with dlmgrid calibrate TRAJ --method spiffy --out {path}"
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"draft graph {path} is a folder; name the .json file in it") from error
    except PermissionError as error:
        raise InputError(f"draft graph {path} cannot be read ({error.strerror})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"draft graph {path} cannot be read ({error}); calibrate again") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise InputError(
            f"draft graph {path}: its format is {found!r}, this version reads {FORMAT!r}; calibrate again"
        )
    try:
        graph = DraftGraph(
            key=GraphKey(**values["key"]),
            selection=values["selection"],
            budget=values["budget"],
            num_roots=values["num_roots"],
            calibration=values["calibration"],
            nodes=tuple(
                GraphNode(
                    pairs=tuple((i, j) for i, j in node["pairs"]),
                    parents=tuple(node["parents"]),
                    count=node["count"],
                )
                for node in values["nodes"]
            ),
        )
        fingerprint = graph.fingerprint
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"draft graph {path} is not whole ({error!r}); calibrate again") from error
    if fingerprint != values.get("fingerprint"):
        raise InputError(f"draft graph {path} was changed after calibration; calibrate again")
    return graph


def _plain(graph: DraftGraph) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(graph)}


def _parents(edges: Counter[tuple[Pairs, Pairs]]) -> dict[Pairs, list[Pairs]]:
    parents: dict[Pairs, list[Pairs]] = defaultdict(list)
    for parent, node in edges:
        parents[node].append(parent)
    return parents


def _by_score(scores: dict[Pairs, int], parents: dict[Pairs, list[Pairs]], budget: int) -> list[Pairs]:
    children: dict[Pairs, list[Pairs]] = defaultdict(list)
    for node, own in parents.items():
        for parent in own:
            children[parent].append(node)
    selected: dict[Pairs, None] = {}
    candidates = set(children[()])
    while candidates and len(selected) < budget:
        best = min(candidates, key=lambda node: (-scores[node], len(node), node))
        candidates.remove(best)
        selected[best] = None
        candidates.update(child for child in children[best] if child not in selected)
    return list(selected)


def _by_gain(paths: Sequence[Path_], budget: int) -> list[Pairs]:
    """Each path waits at the first of its nodes that is not selected; the node with the longest queue is next."""
    waiting: dict[Pairs, list[tuple[Path_, int]]] = defaultdict(list)
    for path in paths:
        if path:
            waiting[path[0]].append((path, 0))
    selected: dict[Pairs, None] = {}
    while waiting and len(selected) < budget:
        best = min(waiting, key=lambda node: (-len(waiting[node]), len(node), node))
        selected[best] = None
        for path, at in waiting.pop(best):
            following = next((i for i in range(at + 1, len(path)) if path[i] not in selected), None)
            if following is not None:
                waiting[path[following]].append((path, following))
    return list(selected)
