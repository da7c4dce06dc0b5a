"""Parameter: what it is on each device, asked from the device."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import evener
from evener import gluon
from evener.errors import DeviceError, NotOnDeviceError


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_parameters_have_their_names_in_order_and_can_be_selected() -> None:
    params = gluon.collect_params(make())

    assert list(params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(gluon.collect_params(make(), select="1|0.w")) == ["0.weight", "1.weight", "1.bias"]
    assert repr(params["0.weight"]) == "Parameter('0.weight', (2, 3), torch.float32)"
    assert "no shape yet" in repr(gluon.collect_params(nn.LazyLinear(2))["weight"])


def test_values_are_read_from_each_device() -> None:
    net = gluon.initialize(make(), gluon.Xavier(), "cpu*3")
    devices = evener.devices("cpu*3")
    weight = gluon.collect_params(net)["0.weight"]
    assert torch.equal(weight.data(devices[0]), net[0].weight)
    with pytest.raises(NotOnDeviceError, match=r"'0\.weight' is not on cpu:1 yet.*one batch"):
        weight.data(devices[1])
    [net(x) for x in gluon.split_and_load(torch.randn(6, 3), devices)]

    for _ in range(2):
        assert [torch.equal(values, net[0].weight) for values in weight.list_data()] == [True] * 3
        torch.optim.SGD([net[0].weight], lr=1.0, weight_decay=0.5).step()
        net[0].weight.grad = torch.ones(2, 3)
        torch.optim.SGD([net[0].weight], lr=1.0).step()
    assert [there.label for there in weight.list_devices()] == ["cpu:0", "cpu:1", "cpu:2"]
    for device in ("cpu:1", "CPU:1", 1, torch.device("cpu", 1), devices[1]):
        values = weight.data(device)
        assert torch.equal(values, net[0].weight)
    values.zero_()  # a copy
    assert net[0].weight.any()
    with pytest.raises(RuntimeError, match=r"was not initialized on cpu:7, only on cpu:0, cpu:1"):
        weight.data("cpu:7")
    with pytest.raises(RuntimeError, match="on several devices, cpu:0, cpu:1, cpu:2; name one"):
        weight.data()
    with pytest.raises(DeviceError, match="no device number 99"):
        weight.data(99)
    evener.release(net)


def test_a_gradient_is_complete_when_it_is_read() -> None:
    net = gluon.initialize(nn.Linear(2, 1, bias=False), None, "cpu*2")
    weight = gluon.collect_params(net)["weight"]
    assert weight.grad() is None
    x = torch.randn(4, 2)
    losses = [net(shard).sum() for shard in gluon.split_and_load(x, "cpu*2")]
    losses[0].backward()

    torch.testing.assert_close(weight.grad("cpu:1"), x[:2].sum(0, keepdim=True))
    losses[1].backward()
    torch.testing.assert_close(weight.grad(), x.sum(0, keepdim=True))
    assert weight.grad() is net.weight.grad
    with pytest.raises(NotOnDeviceError, match="not initialized on cpu:7"):
        weight.grad("cpu:7")
    evener.release(net)


def test_one_device_need_not_be_named_and_none_is_an_error() -> None:
    net = nn.LazyLinear(1)
    weight = gluon.collect_params(net)["weight"]
    with pytest.raises(
        NotOnDeviceError, match=re.escape("has not been initialized; evener.gluon.initialize(net")
    ):
        weight.data()
    gluon.initialize(net, None, "cpu:0")
    with pytest.raises(NotOnDeviceError, match="no shape before the first call"):
        weight.data()
    net(torch.ones(1, 2))

    assert torch.equal(weight.data(), net.weight)
    assert len(weight.list_data()) == 1
