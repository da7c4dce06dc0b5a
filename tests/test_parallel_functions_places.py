"""Which devices the functions of torch.nn.parallel work on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.devices import Device, devices
from evener.errors import DeviceError, ModuleError
from evener.parallel_functions.places import check_place, on_cpu, places_of, torch_devices

GPU = Device("cuda", 1, (), 1, "a GPU")


def test_a_number_a_word_a_torch_device_and_a_record_mean_the_same() -> None:
    (first,) = devices("cpu:0")
    for spec in (0, "cpu:0", first, [0], ["cpu:0"], [torch.device("cpu:0")], (first,), range(1)):
        assert places_of(spec) == [first]


def test_none_is_all_devices_and_a_device_may_be_given_twice() -> None:
    assert places_of(None) == devices()
    assert [place.index for place in places_of([0, 0])] == [0, 0]
    assert [place.index for place in places_of("cpu*3")] == [0, 1, 2]


def test_none_at_all_and_one_that_is_not_there_are_errors() -> None:
    with pytest.raises(DeviceError, match="names no device"):
        places_of([])
    with pytest.raises(DeviceError, match="no device number 99"):
        places_of([99])


def test_cpu_devices_are_ours_and_others_torchs() -> None:
    assert on_cpu(devices("cpu*2"))
    assert not on_cpu([GPU])
    assert torch_devices([GPU]) == [torch.device("cuda:1")]
    with pytest.raises(DeviceError, match="cpu:0, cuda:1: expected devices of one kind"):
        on_cpu([*devices("cpu:0"), GPU])


def test_a_module_that_is_elsewhere_is_an_error_that_says_where() -> None:
    (cpu,) = devices("cpu:0")
    check_place(nn.Linear(2, 2), cpu)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).to("meta"))
    for place, expected, found in ((cpu, "cpu", "meta"), (GPU, "cuda:1", "cpu")):
        with pytest.raises(ModuleError, match=rf"buffers on device {expected}.* found .* {found}"):
            check_place(module, place)
