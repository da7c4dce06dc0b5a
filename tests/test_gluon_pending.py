"""Pending: gradients that wait are neither lost nor added to gradients that were cleared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from evener.errors import StaleGradientError
from evener.gluon.pending import Pending


class Waiting:
    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.events: list[str] = []

    def run(self) -> None:
        self.pending.remove(self)
        self.events.append("run")
        self.pending.ran()

    def drop(self) -> None:
        self.pending.remove(self)
        self.events.append("drop")


def scene() -> tuple[nn.Module, Pending, Waiting]:
    net, pending = nn.Linear(3, 2), Pending()
    waiting = Waiting(pending)
    pending.add(waiting, net.parameters())
    return net, pending, waiting


def test_what_waits_runs_when_it_is_asked_for() -> None:
    net, pending, waiting = scene()

    pending.flush()
    pending.flush()

    assert waiting.events == ["run"]
    assert all(p.grad is None for p in net.parameters())  # the mark is gone


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_who_clears_the_gradients_clears_what_waits(
    set_to_none: bool, has_gradients: bool
) -> None:
    net, pending = nn.Linear(3, 2), Pending()
    if has_gradients:
        net(torch.ones(1, 3)).sum().backward()
    first, second = Waiting(pending), Waiting(pending)
    pending.add(first, net.parameters())
    pending.add(second, net.parameters())

    net.zero_grad(set_to_none=set_to_none)
    pending.flush()

    assert first.events == second.events == ["drop"]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: None,
        lambda net: net(torch.ones(1, 3)).sum().backward(),
        lambda net: net.weight.grad.mul_(2),
    ],
)
def test_other_gradients_in_between_are_no_clearing(change: Callable[[nn.Module], None]) -> None:
    net, pending = nn.Linear(3, 2), Pending()
    net(torch.ones(1, 3)).sum().backward()
    waiting = Waiting(pending)
    pending.add(waiting, net.parameters())

    change(net)
    pending.flush()

    assert waiting.events == ["run"]


def test_one_backward_is_no_clearing_for_another_that_waits() -> None:
    net, pending, first = scene()
    second = Waiting(pending)
    pending.add(second, net.parameters())
    first.run()

    pending.forget_if_cleared()

    assert second.events == []
    second.run()
    assert net.bias.grad is None


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_did_not_wait_is_an_error(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    net, pending, waiting = scene()
    optimizer(net.parameters(), lr=0.1).step()

    with pytest.raises(StaleGradientError, match=r"each shard before.*evener\.gluon\.Trainer"):
        pending.flush()

    assert waiting.events == ["drop"]
    assert not pending
    pending.flush()


def test_a_network_without_parameters_has_no_mark() -> None:
    pending = Pending()
    waiting = Waiting(pending)
    pending.add(waiting, [])

    pending.flush()

    assert waiting.events == ["run"]
