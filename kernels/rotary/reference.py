"""Torch twin of rotary position embedding (Su et al. 2021) in its half-split form.

Dimension i < r/2 of a head turns together with dimension i + r/2 by the angle position * theta^(-2i/r), where
r is the number of rotated dimensions; the rest of the head passes through.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def yarn_frequencies(
    rotary_dim: int, theta: float, *, factor: float, original_length: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """Frequencies fp32 [rotary_dim / 2] under YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2).

    Dimensions that turn more than ``beta_fast`` times over ``original_length`` positions keep their frequency, those
    that turn less than ``beta_slow`` times have it divided by ``factor``, with a linear ramp between.
    """

    def dimension_of(turns: float) -> float:
        return rotary_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(beta_fast)), 0)
    high = min(math.ceil(dimension_of(beta_slow)), rotary_dim - 1)
    width = float(high - low) if high != low else 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    periods = theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    kept = 1 - ramp
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def rotary_tables(
    num_positions: int,
    rotary_dim: int,
    theta: float,
    device: torch.device | str = "cpu",
    *,
    frequencies: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions from 0: two tensors [num_positions, rotary_dim / 2], fp32.

    ``frequencies`` [rotary_dim / 2] in place of the plain ones of ``theta``; ``scale`` multiplies both tables.

    Frequencies and angles are rounded to fp32 before the cosine is taken, as the published checkpoints were
    trained. Made on the CPU whatever the device, so every device reads the same numbers.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_tables: rotary_dim is {rotary_dim}, want an even number above 0")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    if frequencies is None:
        frequencies = 1.0 / theta**exponents
    angles = torch.arange(num_positions, dtype=torch.int64).float()[:, None] * frequencies[None, :]
    cosines, sines = angles.cos(), angles.sin()
    if scale != 1.0:
        cosines, sines = cosines * scale, sines * scale
    return cosines.to(device), sines.to(device)


def apply_rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn ``x`` [R, heads, d] by the rows' tables, ``cosines`` and ``sines`` [R, r/2] with r ≤ d; same
    dtype.

    Computed in fp32 with one rounding at the end.
    """
    half = cosines.shape[1]
    if x.dim() != 3 or 2 * half > x.shape[2] or cosines.shape[0] != x.shape[0]:
        raise ValueError(f"apply_rotary: x {tuple(x.shape)} does not fit tables {tuple(cosines.shape)}")
    values = x.float()
    low, high = values[..., :half], values[..., half : 2 * half]
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    turned = torch.empty_like(values)
    torch.sub(low * cosines, high * sines, out=turned[..., :half])
    torch.add(high * cosines, low * sines, out=turned[..., half : 2 * half])
    turned[..., 2 * half :] = values[..., 2 * half :]
    return turned.to(x.dtype)
