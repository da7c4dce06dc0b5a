"""Distance: how far two tensors are from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors' numbers.

    Not-a-numbers are equal to each other, and infinitely far from all others.
    """
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):  # some have no float64 of their own
        return 0.0 if torch.equal(a, b) else max(1.0, float((_wide(a) - _wide(b)).abs().max()))
    a, b = _wide(a), _wide(b)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    apart = torch.where(same, 0.0, (a - b).abs())
    return float(apart.nan_to_num(math.inf, math.inf).max())


def largest(a: Tensor) -> float:
    """The largest finite size of a tensor's numbers; zero where there are none."""
    return float(_wide(a).abs().nan_to_num(0.0, 0.0).max()) if a.numel() else 0.0


def _wide(a: Tensor) -> Tensor:
    return a.to(torch.complex128 if a.is_complex() else torch.float64)
