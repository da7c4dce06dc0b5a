"""Strides: tensors that lie in memory in one way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evener.strides import contiguous, dense, order_of

X = torch.arange(120.0).reshape(4, 3, 2, 5)


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.to(memory_format=torch.channels_last),
        X.transpose(0, 3),
        X[:, :, :, ::2],
        X[:1].expand(4, 3, 2, 5),
        X.to(torch.complex64).conj(),
        X[:0],
        X[0, 0, 0, 0],
    ],
)
def test_parts_lie_as_the_whole_does_however_they_are_cut(x: Tensor) -> None:
    order = order_of(x)
    whole = dense(x, order)
    assert torch.equal(whole, x)
    assert order_of(whole) == order or x.numel() == 0
    if x.dim() and len(x):
        part, other = x[1:2], x.clone()[1:2]
        assert torch.equal(dense(part, order), part)
        assert dense(part, order).stride() == dense(other, order).stride()
        assert dense(part, order).data_ptr() % 64 == 0


def test_contiguous_has_the_strides_of_a_new_tensor() -> None:
    odd = torch.zeros(4, 3, 1, 1).to(memory_format=torch.channels_last)
    assert odd.is_contiguous()
    assert odd.stride() != torch.zeros(4, 3, 1, 1).stride()
    assert contiguous(odd).stride() == torch.zeros(4, 3, 1, 1).stride()
    assert contiguous(X) is X
    assert contiguous(X[:, 1]).stride() == (10, 5, 1)
    empty, number = torch.zeros(0, 3), torch.tensor(1.0)
    assert contiguous(empty) is empty
    assert contiguous(number) is number
