"""The layer loop with folding: a row close to its parent's takes what its source adds, and keeps its own residual.

Per layer: gate and provenance; pack the rows that are computed; norm, products and attention to the prefix for those;
attention to the own block for every row, with the query and the prefix states of its source and the keys and values of
its branch's sources; output projection for every row; the second half for the packed rows. At τ = 0 every row is its
own source and this is the plain loop bit for bit (``workers.models.layers``).

Shapes: R rows of a pass (N segments of L tokens), P packed rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dlmgrid.kernels.gemm import pad_rows
from dlmgrid.kernels.operators import Operators
from dlmgrid.kernels.specfold.folding import Folds
from dlmgrid.workers.folding.fold import Mark
from dlmgrid.workers.models.config import ModelConfig
from dlmgrid.workers.models.layers import PassInputs, project_heads, run_mlp
from dlmgrid.workers.models.weights import LayerWeights, ModelWeights


def run_folded_layers(
    config: ModelConfig,
    weights: ModelWeights,
    inputs: PassInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    operators: Operators,
    folds: Folds,
    mark: Mark | None = None,
) -> Tensor:
    """Hidden states after the final norm, [R or more, H]. Arguments as ``run_layers``; ``folds`` of these operators.

    ``mark`` is told of every stage that is queued (``fold.STAGES``). Waits for nothing on the device by itself.
    """
    num, length = inputs.num_segments, inputs.block_length
    hidden = operators.embed(inputs.tokens, weights.embedding, config.mask_token_id)
    done = mark or _unmarked
    done("select", 0)
    for index, layer in enumerate(weights.layers):
        folds.select(hidden[: num * length].view(num, length, -1), index)
        done("select", index)
        folds.pack()
        hidden = _layer(
            config, layer, index, hidden, inputs, key_cache[index], value_cache[index], operators, folds, done
        )
    return operators.rms_norm(hidden, weights.final_norm, config.rms_norm_eps)


def _layer(
    config: ModelConfig,
    layer: LayerWeights,
    index: int,
    hidden: Tensor,
    inputs: PassInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    operators: Operators,
    folds: Folds,
    done: Mark,
) -> Tensor:
    packed = folds.operators
    rows = folds.gather(hidden)
    scale = None if inputs.query_scale is None else folds.gather(inputs.query_scale)
    done("move", index)

    normed = packed.rms_norm(rows, layer.input_norm, config.rms_norm_eps)
    heads = project_heads(config, layer, normed, replace(inputs, query_scale=scale), packed)
    inputs.write(*heads[1:], key_cache, value_cache, operators, of=folds.row_map)
    before = folds.attend_prefix(heads[0], key_cache, value_cache)
    done("compute", index)

    attended = folds.attend_block(heads, key_cache, value_cache, before, inputs.plan)
    middle = operators.linear_residual(pad_rows(attended.flatten(1)), layer.output, pad_rows(hidden))
    done("joint", index)

    rows = folds.gather(middle)
    done("move", index)
    after = run_mlp(config, layer, rows, packed)
    done("compute", index)
    out = folds.fold(middle, after)
    done("move", index)
    return out


def _unmarked(stage: str, layer: int) -> None:
    del stage, layer
