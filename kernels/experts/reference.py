"""Torch twin of the routed experts of a mixture layer.

    y[r] = sum over ranks j ascending, in fp32, of share[r, j] * down_e(silu(gate_e x[r]) * up_e x[r]), e = chosen[r, j]

An expert's rows go through in whole panels (kernels/gemm) and a row's outputs are added in the order of their rank, so
what else is in the pass changes no bit.

Shapes: R rows, H hidden size, E experts, k chosen a row, I width of an expert; pair r * k + j is rank j of row r.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dlmgrid.kernels.gemm import linear, pad_rows
from dlmgrid.kernels.silu_gate import silu_gate


def run_routed(
    rows: Tensor,
    chosen: Tensor,
    share: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    product: Callable[..., Tensor] = linear,
) -> Tensor:
    """The weighted sum of the chosen experts' outputs, [R, H] in the rows' dtype, summed in fp32.

    Args:
        rows: [R, H]; chosen: int64 [R, k], experts by rank; share: fp32 [R, k].
        gate_up: [E, 2 I, H], the gate's rows first; down: [E, H, I].
        product: (x, weight) to x weight^T.
    """
    num_rows, num_chosen = chosen.shape
    by_expert = chosen.flatten().sort(stable=True)
    counts = torch.bincount(by_expert.values, minlength=gate_up.shape[0]).tolist()
    outputs = torch.empty(num_rows * num_chosen, rows.shape[1], dtype=torch.float32, device=rows.device)
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        entries = by_expert.indices[first : first + count]
        first += count
        own = pad_rows(rows[torch.div(entries, num_chosen, rounding_mode="floor")])
        inner = silu_gate(product(own, gate_up[expert]))
        outputs[entries] = product(inner, down[expert])[:count].float()
    ranked = outputs.view(num_rows, num_chosen, -1)
    total = ranked[:, 0] * share[:, :1]
    for rank in range(1, num_chosen):
        total += ranked[:, rank] * share[:, rank : rank + 1]
    return total.to(rows.dtype)
