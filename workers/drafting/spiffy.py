"""Spiffy (arXiv 2509.18085): a calibrated draft graph, filled in at every root.

The k-th masked position by stale confidence and its j-th token stand for the pair (k, j). A node's state is that of
its first parent with the pairs of its own step added; at T > 0 their tokens are those the target would draw after
the parent's commits. Nodes whose position rank exceeds the masks left, complete states and states that another node
already gives are dropped for the round (complete ones are kept in a two-block
window).

``build_pruned`` adds the online pruning of the paper's version 4: all nodes of the graph are scored by the stale
probabilities of their tokens and the best ones, as many as the budget, are verified. How several children combine is
not published; here the best child counts, and a leaf has its own score alone.

Legend: S samples, L block length, K nodes of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import num_masked, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs
from dlmgrid.workers.drafting.spiffy_graph import ROOT, DraftGraph, GraphNode, load_graph
from dlmgrid.workers.drafting.spiffy_ranks import positions_by_rank, tokens_by_rank


class _Filling(NamedTuple):
    """How the first K nodes of a graph are filled in, whatever the root: P pairs each on the way from the root, in that
    order, padded where ``is_pair`` bool [K, P] is False.

    ``position_ranks``, ``token_ranks`` int64 [K, P]; ``groups`` int64 [K, P], indices into ``commits``: how many
    commits from the root the token of a pair is drawn; ``sizes``, ``deepest_ranks``, ``parents`` int64 [K]: pairs of a
    node, the greatest position rank on its way, its first parent (-1: the root); ``depths`` int32 and ``log_mass``
    fp64 [K].
    """

    position_ranks: Tensor
    token_ranks: Tensor
    groups: Tensor
    is_pair: Tensor
    commits: tuple[int, ...]
    num_ranks: int
    sizes: Tensor
    deepest_ranks: Tensor
    parents: Tensor
    depths: Tensor
    log_mass: Tensor

    @classmethod
    def of(cls, nodes: Sequence[GraphNode], num_roots: int, device: torch.device) -> _Filling:
        """That of ``nodes``, at least one; ``num_roots`` were calibrated on."""
        ways: list[list[tuple[int, int, int]]] = []
        depths: list[int] = []
        for node in nodes:
            parent = node.parents[0]
            before = nodes[parent].pairs if parent != ROOT else ()
            own = [(*pair, len(before)) for pair in sorted(set(node.pairs) - set(before))]
            ways.append((ways[parent] if parent != ROOT else []) + own)
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        commits = tuple(sorted({count for way in ways for *_, count in way}))
        longest = max(len(way) for way in ways)
        padded = [[*way, *[(0, 0, commits[0])] * (longest - len(way))] for way in ways]
        table = torch.tensor([[(p, t, commits.index(count)) for p, t, count in way] for way in padded])
        position_ranks, token_ranks, groups = table.to(device).unbind(-1)
        return cls(
            position_ranks=position_ranks,
            token_ranks=token_ranks,
            groups=groups,
            is_pair=torch.tensor([[at < len(way) for at in range(longest)] for way in ways], device=device),
            commits=commits,
            num_ranks=1 + max(rank for node in nodes for _, rank in node.pairs),
            sizes=torch.tensor([len(node.pairs) for node in nodes], device=device),
            deepest_ranks=torch.tensor([max(rank for rank, *_ in way) for way in ways], device=device),
            parents=torch.tensor([node.parents[0] for node in nodes], device=device),
            depths=torch.tensor(depths, dtype=torch.int32, device=device),
            log_mass=torch.tensor(
                [math.log(node.count / num_roots) for node in nodes], dtype=torch.float64, device=device
            ),
        )


class SpiffyDrafter:
    """The first ``budget`` nodes of a graph; with ``prunes``, the best ``budget`` of all its nodes."""

    def __init__(self, graph: DraftGraph, *, prunes: bool = False) -> None:
        self._graph = graph
        self._prunes = prunes
        self._fillings: dict[tuple[int, torch.device], _Filling] = {}

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        nodes = self._graph.nodes if self._prunes else self._graph.nodes[: tree.budget]
        if not nodes or not tree.budget:
            return
        key = (len(nodes), inputs.roots.device)
        filling = self._fillings.get(key)
        if filling is None:
            filling = self._fillings[key] = _Filling.of(nodes, self._graph.num_roots, key[1])
        states, usable, log_probability = self._fill(inputs, filling)
        hashes = state_hashes(states)
        first = _first_equal(hashes, usable)
        usable = usable & (first == torch.arange(len(nodes), device=first.device))
        if self._prunes:
            usable = self._keep_best(usable, log_probability, tree.budget)
        place = usable.cumsum(dim=1) * usable  # 1-based; the root stands at 0
        place = place.gather(1, first)  # a dropped repeat is where the first one stands
        samples, which = usable.nonzero(as_tuple=True)
        at = place[samples, which]
        tree.tokens[samples, at] = states[samples, which]
        tree.hashes[samples, at] = hashes[samples, which]
        tree.depths[samples, at] = filling.depths[which]
        tree.log_mass[samples, at] = filling.log_mass[which]
        parents = filling.parents[which]
        above = place[samples, parents.clamp_min(0)]
        tree.parents[samples, at] = torch.where(parents == ROOT, 0, above).to(torch.int32)
        tree.num_nodes[:] = usable.sum(dim=1) + 1

    def _fill(self, inputs: DraftInputs, filling: _Filling) -> tuple[Tensor, Tensor, Tensor]:
        """States int32 [S, K, L], which of them are possible bool [S, K], and, where the graph is pruned, the mean log
        stale probability of their tokens fp32 [S, K]."""
        roots = inputs.roots
        num_samples, length = roots.shape
        order = positions_by_rank(inputs)
        masks_left = num_masked(roots)[:, None]
        shape = (num_samples, *filling.is_pair.shape)
        at = order[:, filling.position_ranks.clamp_max(length - 1)]
        is_alike = inputs.temperature == 0  # whatever was committed
        commits = filling.commits[:1] if is_alike else filling.commits
        ranked = [
            tokens_by_rank(inputs, inputs.commit_counts + count, filling.num_ranks) for count in commits
        ]
        tokens, probabilities = (torch.stack(parts) for parts in zip(*ranked, strict=True))
        groups = torch.zeros_like(filling.groups) if is_alike else filling.groups
        rows = torch.arange(num_samples, device=roots.device)[:, None, None]
        which = (groups.expand(shape), rows.expand(shape), at, filling.token_ranks.expand(shape))
        # A column more takes what is padding.
        states = torch.nn.functional.pad(roots, (0, 1))[:, None].repeat(1, shape[1], 1)
        states.scatter_(2, torch.where(filling.is_pair, at, length), tokens[which])
        usable = inputs.snapshots.is_valid[:, None] & (filling.deepest_ranks < masks_left)
        usable = usable & (masks_left >= filling.sizes + (not inputs.allows_complete))
        total = torch.zeros(shape[:2], device=roots.device)
        if self._prunes:
            logs = torch.where(filling.is_pair, probabilities[which].log(), 0.0)
            for pair in logs.unbind(-1):
                total = total + pair
        return states[..., :length].contiguous(), usable, total / filling.sizes

    def _keep_best(self, usable: Tensor, local: Tensor, budget: int) -> Tensor:
        """bool [S, K]: the best ``budget`` usable nodes whose first parent is kept too.

        The score of a node is the geometric mean of its local score and its best child's score.
        """
        nodes = self._graph.nodes
        score = torch.where(usable, local.double(), -torch.inf)
        best_child = torch.full_like(score, -torch.inf)
        for index in range(len(nodes) - 1, -1, -1):
            has_child = best_child[:, index] > -torch.inf
            score[:, index] = torch.where(
                has_child, (score[:, index] + best_child[:, index]) / 2, score[:, index]
            )
            parent = nodes[index].parents[0]
            if parent != ROOT:
                best_child[:, parent] = torch.maximum(best_child[:, parent], score[:, index])
        parents = torch.tensor([node.parents[0] for node in nodes], device=usable.device)
        kept = torch.zeros_like(usable)
        for _ in range(min(budget, len(nodes))):
            reached = torch.where(parents == ROOT, True, kept[:, parents.clamp_min(0)])
            open_score = torch.where(reached & usable & ~kept, score, -torch.inf)
            best, which = open_score.max(dim=1)
            found = best > -torch.inf
            kept[found, which[found]] = True
        return kept


def _first_equal(hashes: Tensor, usable: Tensor) -> Tensor:
    """int64 [S, K]: the earliest usable node with the state of each node; a node that is not usable gives itself."""
    own = torch.arange(hashes.shape[1], device=hashes.device)
    same = (hashes[:, :, None] == hashes[:, None, :]) & usable[:, None, :]
    return torch.where(usable, same.to(torch.int8).argmax(dim=-1), own)


def build(graph: Path) -> Drafter:
    """Spiffy with the graph at ``graph``. Raises InputError for a file that is none."""
    return SpiffyDrafter(load_graph(graph))


def build_pruned(graph: Path) -> Drafter:
    """Spiffy with online pruning of the graph at ``graph``. Raises InputError for a file that is none."""
    return SpiffyDrafter(load_graph(graph), prunes=True)
