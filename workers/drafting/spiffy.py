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
from pathlib import Path

import torch
from torch import Tensor

from dlmgrid.workers.decoding.state import num_masked, state_hashes
from dlmgrid.workers.decoding.tree import DraftTree
from dlmgrid.workers.drafting.drafter import Drafter, DraftInputs
from dlmgrid.workers.drafting.spiffy_graph import ROOT, DraftGraph, load_graph
from dlmgrid.workers.drafting.spiffy_ranks import positions_by_rank, tokens_by_rank


class SpiffyDrafter:
    """The first ``budget`` nodes of a graph; with ``prunes``, the best ``budget`` of all its nodes."""

    def __init__(self, graph: DraftGraph, *, prunes: bool = False) -> None:
        self._graph = graph
        self._prunes = prunes

    def draft(self, inputs: DraftInputs, tree: DraftTree) -> None:
        """Fill every tree whose root has a valid snapshot."""
        nodes = self._graph.nodes if self._prunes else self._graph.nodes[: tree.budget]
        if not nodes or not tree.budget:
            return
        states, usable, log_probability = self._fill(inputs, len(nodes))
        hashes = state_hashes(states)
        first = _first_equal(hashes, usable)
        usable = usable & (first == torch.arange(len(nodes), device=first.device))
        if self._prunes:
            usable = self._keep_best(usable, log_probability, tree.budget)
        place = usable.cumsum(dim=1) * usable  # 1-based; the root stands at 0
        place = place.gather(1, first)  # a dropped repeat is where the first one stands
        depths: list[int] = []
        for index, node in enumerate(nodes):
            parent = node.parents[0]
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            samples = usable[:, index].nonzero().flatten()
            at = place[samples, index]
            tree.tokens[samples, at] = states[samples, index]
            tree.hashes[samples, at] = hashes[samples, index]
            tree.depths[samples, at] = depths[index]
            tree.log_mass[samples, at] = math.log(node.count / self._graph.num_roots)
            tree.parents[samples, at] = 0 if parent == ROOT else place[samples, parent].to(torch.int32)
        tree.num_nodes[:] = usable.sum(dim=1) + 1

    def _fill(self, inputs: DraftInputs, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """States int32 [S, K, L], which of them are possible bool [S, K], and the mean log stale probability of
        their tokens fp32 [S, K]."""
        nodes = self._graph.nodes[:count]
        length = inputs.roots.shape[1]
        order = positions_by_rank(inputs)
        masks_left = num_masked(inputs.roots)
        num_ranks = 1 + max(token_rank for node in nodes for _, token_rank in node.pairs)
        ranked = {}
        rows = torch.arange(inputs.roots.shape[0], device=inputs.roots.device)
        states: list[Tensor] = []
        usable: list[Tensor] = []
        log_probability: list[Tensor] = []
        nothing = torch.zeros(inputs.roots.shape[0], device=inputs.roots.device)
        for node in nodes:
            parent = node.parents[0]
            before = nodes[parent].pairs if parent != ROOT else ()
            state = (inputs.roots if parent == ROOT else states[parent]).clone()
            possible = inputs.snapshots.is_valid if parent == ROOT else usable[parent]
            possible = possible & (masks_left >= len(node.pairs) + (not inputs.allows_complete))
            total = nothing if parent == ROOT else log_probability[parent]
            if len(before) not in ranked:
                ranked[len(before)] = tokens_by_rank(inputs, inputs.commit_counts + len(before), num_ranks)
            tokens, probabilities = ranked[len(before)]
            for position_rank, token_rank in sorted(set(node.pairs) - set(before)):
                possible = possible & (position_rank < masks_left)
                position = order[:, min(position_rank, length - 1)]
                state[rows, position] = tokens[rows, position, token_rank]
                total = total + probabilities[rows, position, token_rank].log()
            states.append(state)
            usable.append(possible)
            log_probability.append(total)
        sizes = torch.tensor([len(node.pairs) for node in nodes], device=nothing.device)
        return torch.stack(states, 1), torch.stack(usable, 1), torch.stack(log_probability, 1) / sizes

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
