"""Triton routed experts: grouped products over rows sorted by expert, and the weighted sum in rank order.

The products follow the reduction tree of ``kernels.gemm`` (chunks of K from zero, added in ascending order), and the
ranks of a row are added in ascending order by one program, without atomics: a row's bits depend on the row alone. Which
rows belong to an expert is worked out on the device; row tiles past the last expert's rows exit.

Shapes as in the twin; pair r * k + j is rank j of row r, P = R k pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmgrid.kernels.gemm.epilogue import silu
from dlmgrid.kernels.gemm.pointer_kernel import all_chunks
from dlmgrid.kernels.gemm.reference import CHUNK_WIDTH
from dlmgrid.kernels.gemm.tiles import NARROW, STEP_WIDTH
from dlmgrid.kernels.triton_support import check_float_type, check_one_device, power_of_two

_TILE = 1024


class ExpertPlan(NamedTuple):
    """Pairs sorted by expert, and the row tiles that cover them; all int32 on the device.

    ``pairs`` [P]; ``tile_expert`` [T], the number of experts past the last tile; ``tile_first``, ``tile_stop`` [T]:
    the tile's part of ``pairs``.
    """

    pairs: Tensor
    tile_expert: Tensor
    tile_first: Tensor
    tile_stop: Tensor


@triton.jit
def _grouped_kernel(
    x, w, out, pairs, tile_expert, tile_first, tile_stop, num_experts, num_outputs, width, x_stride,
    w_expert_stride, w_stride, w_stride_k,
    CHOSEN: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, output tiles). CHOSEN pairs share a row of ``x``; with 1, each has its own."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert >= num_experts:
        return
    at = tl.load(tile_first + tile) + tl.arange(0, ROWS)
    held = at < tl.load(tile_stop + tile)
    pair = tl.load(pairs + at, mask=held, other=0)
    rows = pair // CHOSEN
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < num_outputs
    weights = w + expert.to(tl.int64) * w_expert_stride
    total = all_chunks(
        x,
        weights,
        rows,
        held,
        outputs,
        inside,
        width,
        x_stride,
        w_stride,
        w_stride_k,
        ROWS,
        OUTPUTS,
        STEP,
        CHUNK,
    )
    if GATED:
        upper = all_chunks(
            x, weights, rows, held, outputs + num_outputs, inside, width, x_stride, w_stride, w_stride_k,
            ROWS, OUTPUTS, STEP, CHUNK,
        )  # fmt: skip
        total = silu(total) * upper
    result = out + pair[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(result, total.to(out.dtype.element_ty), mask=held[:, None] & inside[None, :])


@triton.jit
def _combine_kernel(outputs, share, out, width, CHOSEN: tl.constexpr, TILE: tl.constexpr):
    """Grid (rows, tiles of the hidden size)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    total = tl.zeros((TILE,), dtype=tl.float32)
    for rank in range(CHOSEN):
        pair = row * CHOSEN + rank
        total += tl.load(outputs + pair * width + columns, mask=inside, other=0.0) * tl.load(share + pair)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)


def plan_experts(chosen: Tensor, num_experts: int, tile_rows: int = NARROW.rows) -> ExpertPlan:
    """Sort the pairs of ``chosen`` int64 [R, k] by expert, stably, and lay row tiles over them, without the host."""
    flat = chosen.flatten()
    pairs = flat.sort(stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    stops = counts.cumsum(0)
    tiles = (counts + tile_rows - 1) // tile_rows
    tile_stops = tiles.cumsum(0)
    num_tiles = flat.numel() // tile_rows + min(num_experts, flat.numel())
    index = torch.arange(num_tiles, device=chosen.device)
    expert = torch.searchsorted(tile_stops, index, right=True)
    known = expert.clamp_max(num_experts - 1)
    within = index - (tile_stops - tiles)[known]
    first = (stops - counts)[known] + within * tile_rows
    stop = torch.minimum(first + tile_rows, stops[known])
    return ExpertPlan(pairs.int(), expert.int(), first.int(), stop.int())


def grouped_linear(
    x: Tensor, weight: Tensor, plan: ExpertPlan, *, num_chosen: int, gated: bool, out_dtype: torch.dtype
) -> Tensor:
    """Each pair's row times its expert's weight: [P, N] in the order of pairs.

    Args:
        x: [R, K], a row for each token, with ``num_chosen`` pairs each; or [P, K] and ``num_chosen`` 1.
        weight: [E, N, K], or [E, 2N, K] where ``gated``: silu(gate) * up.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    num_pairs = plan.pairs.shape[0]
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2] and x.shape[1] > 0
    if not fits or x.shape[0] * num_chosen != num_pairs or (gated and weight.shape[1] % 2):
        raise ValueError(
            f"grouped_linear: x {tuple(x.shape)} with {num_chosen} experts a row and weight {tuple(weight.shape)} do "
            f"not fit {num_pairs} pairs"
        )
    if x.dtype != weight.dtype or x.stride(1) != 1:
        raise ValueError(f"grouped_linear: x {x.dtype}, strides {x.stride()}, weight {weight.dtype}")
    check_float_type("grouped_linear", x=x)
    check_one_device("grouped_linear", x=x, weight=weight, pairs=plan.pairs)
    num_outputs = weight.shape[1] // 2 if gated else weight.shape[1]
    out = torch.empty((num_pairs, num_outputs), dtype=out_dtype, device=x.device)
    if num_pairs:
        _grouped_kernel[(plan.tile_expert.shape[0], triton.cdiv(num_outputs, NARROW.outputs))](
            x, weight, out, plan.pairs, plan.tile_expert, plan.tile_first, plan.tile_stop, weight.shape[0],
            num_outputs, x.shape[1], x.stride(0), *weight.stride(), CHOSEN=num_chosen, GATED=gated, ROWS=NARROW.rows,
            OUTPUTS=NARROW.outputs, STEP=STEP_WIDTH, CHUNK=CHUNK_WIDTH, num_warps=NARROW.warps,
            num_stages=NARROW.stages,
        )  # fmt: skip
    return out


def run_routed(rows: Tensor, chosen: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of the chosen experts' outputs, [R, H], as the twin of this name."""
    num_rows, num_chosen = chosen.shape
    width = rows.shape[1]
    if share.shape != chosen.shape or share.dtype != torch.float32 or not share.is_contiguous():
        raise ValueError(
            f"run_routed: shares {tuple(share.shape)} {share.dtype}; want float32 {tuple(chosen.shape)}"
        )
    plan = plan_experts(chosen, gate_up.shape[0])
    inner = grouped_linear(rows, gate_up, plan, num_chosen=num_chosen, gated=True, out_dtype=rows.dtype)
    outputs = grouped_linear(inner, down, plan, num_chosen=1, gated=False, out_dtype=torch.float32)
    out = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)
    if num_rows:
        tile = min(_TILE, power_of_two(width))
        _combine_kernel[(num_rows, triton.cdiv(width, tile))](
            outputs, share, out, width, CHOSEN=num_chosen, TILE=tile, num_warps=4
        )
    return out
