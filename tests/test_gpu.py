"""What needs an accelerator; left out unless asked for (scripts/gpu_tests.sh)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evener
from evener.errors import DeviceError

pytestmark = pytest.mark.gpu


def test_accelerators_come_first_and_have_names_and_memory() -> None:
    first = evener.devices()[0]

    assert first.kind == torch.accelerator.current_accelerator().type
    assert first.memory_bytes > 0
    assert first.name
    assert [device.label for device in evener.devices("all")][-1].startswith("cpu:")


def test_one_accelerator_is_the_plain_call() -> None:
    device = torch.device(evener.devices()[0].label)
    model = nn.Linear(4, 3).to(device)
    x = torch.randn(5, 4, device=device)
    expected = model(x)
    evener.parallelize(model, evener.devices()[0])

    assert torch.equal(model(x), expected)
    evener.release(model)


def test_an_accelerator_beside_the_cpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(DeviceError, match='give devices="cpu"'):
        evener.parallelize(nn.Linear(4, 3), [evener.devices()[0], "cpu:0"])


def test_cpu_devices_work_beside_an_accelerator() -> None:
    plain = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    expected = plain(x)
    model = evener.parallelize(plain, "cpu*2")

    torch.testing.assert_close(model(x), expected)
    evener.release(model)


def test_data_parallel_on_one_accelerator_takes_inputs_from_the_cpu() -> None:
    plain = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    expected = plain(x)

    net = evener.DataParallel(plain, [0])

    torch.testing.assert_close(net(x).cpu(), expected)
    assert net.src_device_obj == torch.device(evener.devices()[0].label)


def test_data_parallel_on_two_accelerators_is_torchs() -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    device = torch.device(evener.devices()[0].label)
    plain = nn.Linear(4, 3).to(device)
    x = torch.randn(5, 4, device=device)
    expected = plain(x)

    found = evener.DataParallel(plain, [0, 1])(x)

    torch.testing.assert_close(found, expected)
