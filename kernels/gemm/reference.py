"""Torch twin of the linear layer: the CPU path, and the reduction tree that every kernel of it must follow.

Shapes: R rows, K inputs of a row, N outputs of a row.

    y[r, n] = sum over chunks c ascending, in fp32, of (sum over k in chunk c of x[r, k] * w[n, k], from zero)

On the CPU the rows go through in panels of exactly PANEL_ROWS, each panel a matrix product of one fixed
shape, so the bits of a row depend on that row alone. (Products of 1, 2, 3, 5 or 7 rows take other code paths
of the vendor library and give other bits.) Panels of one call are entries of one batched product: that takes
less time than a loop over panels and gives the same bits, which the tests and the start-up self-test hold it
to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PANEL_ROWS = 32
"""Rows of a panel. Callers that keep R a multiple of it pay nothing for padding."""

CHUNK_WIDTH = 1024
"""Width of a chunk of K here. The Triton products have their own (``tiles``): sets of kernels are never compared bit
for bit."""


def pad_rows(x: Tensor, multiple: int = PANEL_ROWS) -> Tensor:
    """``x`` [R, ...] with zero rows appended up to a multiple of ``multiple``; ``x`` itself where R fits."""
    missing = -x.shape[0] % multiple
    if not missing and x.is_contiguous():
        return x
    padded = x.new_zeros((x.shape[0] + missing, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


def column_major(weight: Tensor) -> Tensor:
    """``weight`` [N, K] with the same values, laid out so that its transpose is contiguous.

    The vendor library reads this layout without packing it first: 20 to 30 % less time for 32 rows. A weight
    in another layout is copied into it at every call of :func:`linear` on the CPU.
    """
    return weight.t().contiguous().t()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    chunk_width: int = CHUNK_WIDTH,
) -> Tensor:
    """``x`` [R, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [R, N] in ``out_dtype`` (that of
    ``x``), in chunks of ``chunk_width`` columns of K.

    Inputs fp32 or bf16; products and sums in fp32; one rounding at the end. On CUDA the rows go through whole
    and only the chunks are kept: equal bits are not promised there by this twin.
    """
    _check(x, weight, bias)
    rows, width = x.shape
    out_dtype = out_dtype or x.dtype
    panels = x if x.is_cuda else pad_rows(x)
    total: Tensor | None = None
    for start in range(0, width, chunk_width):
        stop = min(start + chunk_width, width)
        product = _product_cuda if x.is_cuda else _product_panels
        chunk = product(panels[:, start:stop], weight[:, start:stop])
        total = chunk if total is None else total.add_(chunk)
    if total is None:
        raise ValueError("linear: K is 0")
    total = total[:rows]
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype)


def linear_vendor(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The same product by the vendor library in one call: the ``fast`` numerics. Its bits depend on R."""
    _check(x, weight, bias)
    if out_dtype in (None, x.dtype):
        return functional.linear(x, weight, bias)
    if x.is_cuda and x.dtype != torch.float32:
        total = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        total = functional.linear(x.float(), weight.float())
    return (total if bias is None else total + bias.float()).to(out_dtype)


def _product_panels(x: Tensor, weight: Tensor) -> Tensor:
    """One chunk on the CPU, ``x`` [R, k] with R a multiple of the panel: [R, N] fp32.

    One entry of a batched product runs on one thread, and then K is summed in one order; a lone panel on
    several threads would have K split among them. So a lone panel is cut by columns into one entry a thread.
    """
    rows, width = x.shape
    outputs = weight.shape[0]
    num_panels = rows // PANEL_ROWS
    panels = x.float().unflatten(0, (num_panels, PANEL_ROWS))
    by_column = weight.float().t()
    if not by_column.is_contiguous() and by_column.stride(1) != 1:
        by_column = by_column.contiguous()
    if num_panels > 1 or torch.get_num_threads() == 1:
        return torch.bmm(panels, by_column.expand(num_panels, width, outputs)).view(rows, outputs)
    num_cuts = 2
    while num_cuts < torch.get_num_threads() and outputs % (2 * num_cuts) == 0:
        num_cuts *= 2
    if outputs % num_cuts:  # an odd number of outputs: two panels, the second thrown away
        return torch.bmm(panels.expand(2, -1, -1), by_column.expand(2, width, outputs))[0]
    cuts = by_column.unflatten(1, (num_cuts, outputs // num_cuts)).transpose(0, 1)
    return torch.bmm(panels.expand(num_cuts, -1, -1), cuts).transpose(0, 1).reshape(rows, outputs)


def _product_cuda(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} (want [R, K], [N, K])"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"linear: x is {x.dtype}, weight {weight.dtype}; they must be one type")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
