"""The kernels of a pass as one set: the torch twins or the Triton kernels. Chosen by name, never by what happens to
be installed: a set that cannot work here is refused with the reason.

Sets of one device give equal values to rounding; bits are only compared within a set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlmgrid.kernels.attention import SPLIT_KEYS, block_attention, plan_attention
from dlmgrid.kernels.attention.fixed_plan import PlanShape
from dlmgrid.kernels.embedding import embed
from dlmgrid.kernels.experts import run_routed
from dlmgrid.kernels.gemm import linear, linear_vendor
from dlmgrid.kernels.gemm.tiles import is_vendor_faster
from dlmgrid.kernels.logits import NUM_CANDIDATES, LogitsPass, logits_pass
from dlmgrid.kernels.rmsnorm import head_rms_norm, rms_norm
from dlmgrid.kernels.rotary import apply_rotary
from dlmgrid.kernels.silu_gate import silu_gate
from dlmgrid.kernels.specfold.folding import Folds, TwinFolds
from dlmgrid.kernels.specfold.layout import FoldLayout, FoldTables
from dlmgrid.kernels.triton_support import KernelsUnavailableError, check_triton

KERNELS = ("torch", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """One set of kernels.

    Attributes:
        linear: (x [R, K], weight [N, K], bias [N] or None, out_dtype=None) to [R, N].
        linear_residual: (x, weight, residual [R, N]) to [R, N]; ``residual`` may be overwritten.
        linear_silu_gate: (x, weight [2N, K]) to [R, N], silu(gate) * up.
        silu_gate: (gate and up [R, 2N]) to [R, N], silu(gate) * up.
        rms_norm: (x [R, H], weight, eps) to [R, H].
        norm_rotary: (x [R, heads, d], weight [heads, d] or None, cosines [R, r/2], sines, eps) to [R, heads, d].
        embed: (tokens [R], weight [V, H], mask id) to [R, H].
        plan_attention, block_attention: as ``kernels.attention`` has them; the plan belongs to the set.
        write_blocks: (keys [N, L, Hkv, d], values, key cache of a layer, value cache, slots int32 [N], -1 where nothing
            is written, block starts int32 [N]), in place; None for a set that writes no pass of fixed shape.
        run_routed: (rows [R, H], chosen [R, k], share, gate_up [E, 2I, H], down [E, H, I]) to [R, H]: kernels/experts.
        logits_pass: (logits [R, V], temperature, noise=None) to LogitsPass.
        open_folds: (FoldLayout, device, heads=(Hq, Hkv, d), dtype) to what a folded pass works with (specfold/folding).
    """

    name: str
    linear: Callable[..., Tensor]
    linear_residual: Callable[[Tensor, Tensor, Tensor], Tensor]
    linear_silu_gate: Callable[[Tensor, Tensor], Tensor]
    silu_gate: Callable[[Tensor], Tensor]
    rms_norm: Callable[..., Tensor]
    norm_rotary: Callable[[Tensor, Tensor | None, Tensor, Tensor, float], Tensor]
    embed: Callable[[Tensor, Tensor, int], Tensor]
    plan_attention: Callable[..., Any]
    block_attention: Callable[..., tuple[Tensor, Tensor]]
    write_blocks: Callable[..., None] | None
    run_routed: Callable[..., Tensor]
    logits_pass: Callable[..., LogitsPass]
    open_folds: Callable[..., Folds]


def torch_operators(numerics: str) -> Operators:
    """The torch twins; under ``fast`` with the vendor's products."""
    product = linear if numerics == "exact" else linear_vendor

    def open_folds(
        layout: FoldLayout, device: torch.device, *, heads: tuple[int, int, int], dtype: torch.dtype
    ) -> Folds:
        del heads, dtype
        return TwinFolds(layout, device, plan_attention, operators)

    operators = Operators(
        name="torch",
        linear=product,
        linear_residual=lambda x, weight, residual: product(x, weight).add_(residual),
        linear_silu_gate=lambda x, weight: silu_gate(product(x, weight)),
        silu_gate=silu_gate,
        rms_norm=rms_norm,
        norm_rotary=_norm_rotary,
        embed=embed,
        plan_attention=plan_attention,
        block_attention=block_attention,
        write_blocks=None,
        run_routed=functools.partial(run_routed, product=product),
        logits_pass=logits_pass,
        open_folds=open_folds,
    )
    return operators


def _norm_rotary(x: Tensor, weight: Tensor | None, cosines: Tensor, sines: Tensor, eps: float) -> Tensor:
    return apply_rotary(x if weight is None else head_rms_norm(x, weight, eps), cosines, sines)


def triton_operators(numerics: str) -> Operators:
    """The Triton kernels; under ``fast`` with the vendor's products where those are faster (``gemm.tiles``)."""
    from dlmgrid.kernels.attention.launch import block_attention as triton_attention
    from dlmgrid.kernels.attention.launch_plan import LaunchPlan
    from dlmgrid.kernels.cache_write.kernel import write_blocks as triton_write_blocks
    from dlmgrid.kernels.embedding.kernel import embed as triton_embed
    from dlmgrid.kernels.experts.kernel import run_routed as triton_run_routed
    from dlmgrid.kernels.gemm.kernel import linear as triton_linear
    from dlmgrid.kernels.logits.kernel import logits_pass as triton_logits_pass
    from dlmgrid.kernels.rmsnorm.kernel import rms_norm as triton_rms_norm
    from dlmgrid.kernels.rotary.kernel import norm_rotary
    from dlmgrid.kernels.silu_gate.kernel import silu_gate as triton_silu_gate
    from dlmgrid.kernels.specfold.device_folding import DeviceFolds

    def takes_vendor(x: Tensor, weight: Tensor) -> bool:
        if numerics == "exact":
            return False
        return x.element_size() != 2 or is_vendor_faster(x.shape[0], *weight.shape)

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        found = linear_vendor if takes_vendor(x, weight) else triton_linear
        return found(x, weight, bias, out_dtype=out_dtype)

    def linear_residual(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        if takes_vendor(x, weight):
            return residual.addmm_(x, weight.T)
        return triton_linear(x, weight, residual=residual)

    def linear_silu_gate(x: Tensor, weight: Tensor) -> Tensor:
        if takes_vendor(x, weight):
            return triton_silu_gate(linear_vendor(x, weight))
        return triton_linear(x, weight, gated=True)

    def open_folds(
        layout: FoldLayout, device: torch.device, *, heads: tuple[int, int, int], dtype: torch.dtype
    ) -> Folds:
        num_heads, num_kv_heads, width = heads
        shape = PlanShape(
            layout.num_segments, layout.block_length, num_heads // num_kv_heads, num_kv_heads, width, dtype.itemsize
        )  # fmt: skip
        tables = FoldTables(FoldTables.buffer_of(layout).to(device), layout.num_segments, len(layout.taus))
        num_splits = max(start // SPLIT_KEYS + 1 for start in layout.starts)
        return DeviceFolds(tables, operators, shape, gate=layout.gate, num_splits=num_splits)

    operators = Operators(
        name="triton",
        linear=product,
        linear_residual=linear_residual,
        linear_silu_gate=linear_silu_gate,
        silu_gate=triton_silu_gate,
        rms_norm=triton_rms_norm,
        norm_rotary=lambda x, weight, cosines, sines, eps: norm_rotary(x, weight, cosines, sines, None, eps),
        embed=triton_embed,
        plan_attention=LaunchPlan,
        block_attention=triton_attention,
        write_blocks=triton_write_blocks,
        run_routed=triton_run_routed,
        logits_pass=triton_logits_pass,
        open_folds=open_folds,
    )
    return operators


def load_operators(
    name: str,
    numerics: str,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    head_dim: int,
    vocab_size: int,
) -> Operators:
    """The set ``name`` for a model on ``device``.

    Raises:
        KernelsUnavailableError: Triton is missing, or the device, the dtype, the head width or the vocabulary is one
            that the kernels cannot take.
    """
    if name not in KERNELS:
        raise KernelsUnavailableError(f"kernels: {name!r} is not one of {', '.join(KERNELS)}")
    if name == "torch":
        return torch_operators(numerics)
    check_triton(device, dtype)
    from dlmgrid.kernels.attention.launch import HEAD_WIDTHS
    from dlmgrid.kernels.logits.kernel import MAX_VOCABULARY

    if head_dim not in HEAD_WIDTHS:
        raise KernelsUnavailableError(
            f"kernels: the Triton attention takes head widths {', '.join(map(str, HEAD_WIDTHS))}, the model has "
            f"{head_dim}; use kernels: torch"
        )
    if not NUM_CANDIDATES <= vocab_size <= MAX_VOCABULARY:
        raise KernelsUnavailableError(
            f"kernels: the Triton logits pass takes {NUM_CANDIDATES} to {MAX_VOCABULARY} tokens, the model has "
            f"{vocab_size}; use kernels: torch"
        )
    return triton_operators(numerics)
