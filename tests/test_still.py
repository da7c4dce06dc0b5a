from __future__ import annotations

import random
from inspect import signature

import pytest
import torch
from torch import nn
from torch.nn import functional

from evener.still import StillForward, drawers, generators_kept, random_numbers_still


@pytest.mark.parametrize(
    "dropout",
    [
        functional.dropout,
        lambda x, p: functional.dropout(x, p).clone(),
        lambda x, p: functional.dropout1d(x[:, :, None], p)[:, :, 0],
        lambda x, p: torch.native_dropout(x, p, True)[0],
        lambda x, p: x * torch.bernoulli(torch.full_like(x, 1 - p)) / (1 - p),
    ],
)
@pytest.mark.parametrize("p", [0.25, 0.5])
def test_dropout_lets_everything_through(dropout, p: float) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with random_numbers_still():
        y = dropout(x, p)
        y.sum().backward()

    torch.testing.assert_close(y, x)
    torch.testing.assert_close(x.grad, torch.ones_like(x))


def test_dropout_inside_of_attention_and_of_a_recurrent_layer() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 3, 4)
    lstm = nn.LSTM(4, 4, 2, dropout=0.5)
    with random_numbers_still():
        with_dropout = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        outputs = lstm(q[0])[0]

    torch.testing.assert_close(with_dropout, functional.scaled_dot_product_attention(q, q, q))
    torch.testing.assert_close(outputs, lstm.eval()(q[0])[0])


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand,
        torch.randn,
        lambda n: torch.randn(n).exponential_(),
        lambda n: torch.empty(n).uniform_(),
        lambda n: torch.randint(0, 9, (n,)),
        lambda n: torch.rand(n, dtype=torch.float64),
        lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
        lambda n: functional.rrelu(torch.full((n,), -1.0), training=True),
    ],
)
def test_each_sample_gets_the_same(draw) -> None:
    with random_numbers_still():
        few, many = draw(2), draw(5)

    assert torch.equal(few, many[:2])
    assert torch.equal(few, few[:1].expand(2))


def test_a_permutation_stays_one() -> None:
    with random_numbers_still():
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]


def test_after_the_block_numbers_are_random_again() -> None:
    with random_numbers_still():
        pass

    assert not torch.equal(torch.rand(9), torch.rand(9))


def test_generators_are_put_back() -> None:
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(3)

    def state():
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

    def draw():
        return torch.rand(1).item(), random.random(), numpy.random.rand()  # noqa: S311 - a test of it

    before = state()
    with generators_kept(5):
        first = draw()
    with generators_kept(5):
        assert draw() == first
    with generators_kept(6):
        assert draw() != first
    with pytest.raises(ZeroDivisionError), generators_kept():
        draw()[0] / 0
    assert state() == before
    assert torch.initial_seed() == 3


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calm = nn.Linear(2, 2)
        self.drop = nn.Dropout()
        self.silent = nn.Dropout().eval()

    def forward(self, x, scale=1.0):
        return self.silent(self.drop(self.calm(x))) * scale


class Coin(Noisy):
    def forward(self, x, scale=1.0):
        return super().forward(x) * random.random()  # noqa: S311 - not for secrets


def test_who_draws_is_named() -> None:
    for module, expected in ((Noisy(), ["drop"]), (Coin(), ["drop", ""])):
        assert drawers(module, lambda m=module: m(torch.ones(3, 2), scale=2.0)) == expected
        assert not module._forward_hooks


def test_a_still_forward_has_the_arguments_of_the_one_in_it() -> None:
    module = Coin()
    forward = StillForward(module.forward, 0)
    with random_numbers_still():
        one, other = forward(torch.ones(3, 2)), forward(torch.ones(3, 2))

    assert list(signature(forward).parameters) == ["x", "scale"]
    assert torch.equal(one, other)
