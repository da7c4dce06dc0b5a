"""Network: initialized once, again when that is asked for; shares by what was measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import evener
from evener import gluon
from evener.errors import ModuleError, SharesError
from evener.pickling import STATE_NAME
from evener.policies import Policies
from evener.shares import Choice


def test_a_network_is_parallel_and_begins_with_what_was_asked_for() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(net.state_dict())

    assert gluon.initialize(net, None, "cpu*2") is net
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    gluon.initialize(net, gluon.Normal(0.0), "cpu*2", force_reinit=True)
    assert not net[0].weight.any()

    names: list[str] = []
    gluon.initialize(net, lambda m: names.append(type(m).__name__), "cpu*2", force_reinit=True)
    assert names == ["Linear", "BatchNorm1d", "Sequential"]
    evener.release(net)


@pytest.mark.parametrize("devices", ["cpu:0", "cpu*2"])
def test_a_second_time_needs_force_reinit(devices: str) -> None:
    net = gluon.initialize(nn.Linear(2, 1), gluon.Normal(0.5), devices)
    before = net.weight.detach().clone()

    with pytest.warns(UserWarning, match=r"initialized already.*force_reinit=True"):
        gluon.initialize(net, gluon.Normal(0.0), devices)

    assert torch.equal(net.weight, before)
    evener.release(net)


def test_a_network_may_move_to_other_devices() -> None:
    net = gluon.initialize(nn.Linear(2, 1), gluon.Normal(), "cpu:0")
    for spec in ("cpu*2", "cpu*3", "cpu:0"):
        gluon.initialize(net, gluon.Normal(), spec, force_reinit=True)
        devices = gluon.collect_params(net)["weight"].list_devices()
        assert devices == evener.devices(spec)
    evener.release(net)


def test_a_parallel_module_becomes_a_network_on_its_own_devices() -> None:
    net = evener.parallelize(nn.Linear(2, 1), "cpu*2", shares=(3, 1))

    with pytest.raises(ModuleError, match=r"parallel already, on cpu:0, cpu:1.*force_reinit"):
        gluon.initialize(net, None, "cpu*3")
    gluon.initialize(net, None, "cpu*2")

    assert vars(net)[STATE_NAME].explicit is not None
    assert gluon.shares(net, 8) == (6, 2)
    evener.release(net)


def test_a_batch_in_another_dimension_is_an_error_with_the_way_out() -> None:
    net = evener.parallelize(nn.LSTM(2, 3), "cpu*2", in_dims=1, out_dims=(1, 1))

    with pytest.raises(ModuleError, match=r"in_dims or out_dims.*evener\.release\(net\) first"):
        gluon.initialize(net, None, "cpu*2")

    evener.release(net)


@pytest.mark.parametrize("init", [gluon.Normal, "xavier", 0.01])
def test_an_init_that_is_none_is_refused_before_anything_is_done(init: Any) -> None:
    net = nn.Linear(2, 1)

    with pytest.raises(ValueError, match=r"init=.*Normal\(0\.01\), or a function"):
        gluon.initialize(net, init, "cpu*2")

    assert STATE_NAME not in vars(net)


def test_shares_before_anything_is_measured_are_even_and_for_one_device_all() -> None:
    two = gluon.initialize(nn.Linear(2, 1), None, "cpu*2")
    one = gluon.initialize(nn.Linear(2, 1), None, "cpu:0")

    assert gluon.shares(two, 5) == (3, 2)
    assert gluon.shares(two, 0) == (0, 0)
    assert gluon.shares(one, 5) == (5,)
    with pytest.raises(SharesError, match="batch_size=-1"):
        gluon.shares(two, -1)
    with pytest.raises(ModuleError, match=r"Linear is on no devices; evener\.gluon\.initialize"):
        gluon.shares(nn.Linear(2, 1), 5)


class FakePolicy:
    """Chooses what it is told to, and notes what it is shown."""

    num_observed = 1

    def __init__(self, *choices: Choice) -> None:
        self.choices = list(choices)
        self.observed: list[tuple[int, ...]] = []

    def choose(self, batch: int) -> Choice:
        return self.choices.pop(0)

    def limit(self, caps: Sequence[float]) -> None:
        assert list(caps) == [math.inf, math.inf]

    def observe(self, shares: tuple[int, ...], *measured: Any) -> None:
        self.observed.append(tuple(shares))


def test_shares_are_the_policys_and_calls_with_them_are_shown_to_it() -> None:
    net = gluon.initialize(nn.Linear(2, 1), None, "cpu*2")
    training = FakePolicy(Choice((3, 1)), Choice((4, 0)), Choice((1, 3)))
    inference = FakePolicy(Choice((0, 4)), Choice((4, 0)))
    way = vars(net)[STATE_NAME].way
    way._policies = Policies(way._devices, training, inference)  # type: ignore[arg-type]

    for expected in ((3, 1), (4, 0), (1, 3)):
        shares = gluon.shares(net, 4)
        assert gluon.shares(net, 4) == shares == expected
        losses = [net(x).sum() for x in split(shares)]
        for loss in losses:
            loss.backward()
    with torch.no_grad():
        for expected in ((0, 4), (4, 0)):
            shares = gluon.shares(net, 4)
            assert shares == expected
            assert [len(net(x)) for x in split(shares)] == list(expected)

    assert training.observed == [(3, 1), (4, 0), (1, 3)]
    assert inference.observed == [(0, 4), (4, 0)]
    assert evener.report(net).shares == (4, 0)
    evener.release(net)


def split(shares: tuple[int, ...]) -> list[torch.Tensor]:
    return gluon.split_and_load(torch.ones(sum(shares), 2), "cpu*2", shares=shares)
