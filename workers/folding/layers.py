"""The layer loop with folding: a row close to its parent's takes what its source adds, and keeps its own residual.

Per layer: gate and provenance; pack the rows that are computed; norm, products and attention to the prefix for those;
attention to the own block for every row, with the query and the prefix states of its source and the keys and values of
its branch's sources; output projection for every row; the second half for the packed rows. At τ = 0 every row is its
own source and this is the plain loop bit for bit (``workers.models.layers``).

Shapes: R rows of a pass (N segments of L tokens, then zero rows up to a multiple of 32), P packed rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlmgrid.kernels.attention import AttentionPlan
from dlmgrid.kernels.attention.boundary import attend_block, attend_prefix
from dlmgrid.kernels.gemm import pad_rows
from dlmgrid.kernels.operators import Operators
from dlmgrid.kernels.specfold import PackedRows, fold_rows, pack_rows, row_sources
from dlmgrid.workers.folding.fold import FoldBranches, FoldReport, FoldSettings
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.layers import PassInputs, project_heads, run_mlp
from dlmgrid.workers.models.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Folding:
    """How a pass folds. ``plan_groups`` maps the sample of each group of L packed rows, in order, to their plan."""

    settings: FoldSettings
    branches: FoldBranches
    plan_groups: Callable[[Sequence[int]], AttentionPlan]
    clock: Callable[[], float]


def run_folded_layers(
    config: ModelConfig,
    weights: ModelWeights,
    inputs: PassInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    operators: Operators,
    folding: Folding,
) -> tuple[Tensor, FoldReport]:
    """Hidden states after the final norm, [R, H], and what was recomputed. Arguments as ``run_layers``."""
    num, length = inputs.num_segments, inputs.block_length
    hidden = operators.embed(inputs.tokens, weights.embedding, config.mask_token_id)
    report = FoldReport(is_foldable=folding.branches.is_foldable, length=length)
    itself = torch.arange(num * length, device=hidden.device).view(num, length)
    for index, layer in enumerate(weights.layers):
        begun = folding.clock()
        sources = row_sources(
            hidden[: num * length].view(num, length, -1),
            folding.branches.parents,
            folding.branches.levels,
            folding.settings.of_layer(index, len(weights.layers)),
            folding.settings.gate,
        )
        selected = folding.clock()
        packed = pack_rows(sources, folding.branches.groups)
        report.own_rows.append((sources == itself).sum(1).tolist())
        report.select += selected - begun
        report.move += folding.clock() - selected
        hidden = _layer(
            config, layer, hidden, inputs, key_cache[index], value_cache[index], operators, folding, sources, packed,
            report, sum(report.own_rows[-1]) / (num * length),
        )  # fmt: skip
    return operators.rms_norm(hidden, weights.final_norm, config.rms_norm_eps), report


def _layer(
    config: ModelConfig,
    layer: LayerWeights,
    hidden: Tensor,
    inputs: PassInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    operators: Operators,
    folding: Folding,
    sources: Tensor,
    packed: PackedRows,
    report: FoldReport,
    share_computed: float,
) -> Tensor:
    length, clock = inputs.block_length, folding.clock
    begun = clock()
    rows = pad_rows(hidden[packed.rows])
    of_rows = replace(
        inputs,
        cosines=pad_rows(inputs.cosines[packed.rows]),
        sines=pad_rows(inputs.sines[packed.rows]),
        query_scale=None if inputs.query_scale is None else pad_rows(inputs.query_scale[packed.rows]),
    )
    row_map = packed.place[sources]
    plan = folding.plan_groups(packed.group_of.tolist())
    gathered = clock()

    normed = operators.rms_norm(rows, layer.input_norm, config.rms_norm_eps)
    heads = project_heads(config, layer, normed, of_rows, operators)
    queries, keys, values = (part[: len(packed.rows)] for part in heads)
    inputs.write(keys, values, key_cache, value_cache, of=row_map)
    boundary = attend_prefix(queries.unflatten(0, (-1, length)), key_cache, value_cache, plan)
    prefixed = clock()

    attended, _ = attend_block(queries, keys, values, key_cache, value_cache, row_map, boundary, inputs.plan)
    middle = operators.linear_residual(pad_rows(attended.flatten(0, 1).flatten(1)), layer.output, hidden)
    attended_all = clock()

    after = run_mlp(config, layer, pad_rows(middle[packed.rows]), operators)
    computed = clock()
    out = fold_rows(middle, sources, packed, after)
    joint = attended_all - prefixed
    report.move += gathered - begun + clock() - computed
    report.compute += prefixed - gathered + computed - attended_all + joint * share_computed
    report.correct += joint * (1 - share_computed)
    return out
