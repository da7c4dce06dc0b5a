"""Devices: how they print, and what a spec means."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import evener
from evener import devices as devices_of
from evener.devices import Device, _ranges
from evener.errors import DeviceError
from evener.topology import _parse_ranges

# ------------------------------------------------------------------ devices, as they print


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (Device("cpu", 1, (1,), 0, "AMD EPYC 7763"), "cpu:1 (core 1, AMD EPYC 7763)"),
        (Device("cpu", 0, (0, 1, 2, 3), 0, "CPU"), "cpu:0 (cores 0-3, CPU)"),
        (Device("cpu", 0, (0, 2, 4, 5, 9), 0, "CPU"), "cpu:0 (cores 0,2,4-5,9, CPU)"),
        (Device("cuda", 0, (), 1 << 34, "NVIDIA H200"), "cuda:0 (NVIDIA H200)"),
    ],
)
def test_a_device_prints_as_a_person_would_say_it(device: Device, text: str) -> None:
    assert str(device) == text
    assert text.startswith(device.label)


def test_a_device_is_a_frozen_record() -> None:
    device = Device("cpu", 0, (0,), 1, "CPU")

    assert device == Device("cpu", 0, (0,), 1, "CPU")
    assert len({device, Device("cpu", 0, (0,), 1, "CPU")}) == 1
    with pytest.raises(AttributeError):
        device.index = 1  # type: ignore[misc]


@given(st.sets(st.integers(0, 300)))
def test_ranges_are_read_as_they_are_written(numbers: set[int]) -> None:
    assert _parse_ranges(_ranges(sorted(numbers))) == sorted(numbers)


# ------------------------------------------------------------------ specs, on this machine


#: Not `evener.devices`: that name is the function.
MODULE = sys.modules[devices_of.__module__]


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """A machine of two CPU devices, on a core that there is, and no accelerator."""
    core = min(os.sched_getaffinity(0))

    def cpu_devices(num_groups: int | None = None) -> list[Device]:
        return [Device("cpu", i, (core,), 1 << 30, "CPU") for i in range(num_groups or 2)]

    monkeypatch.setattr(MODULE, "_cpu_devices", cpu_devices)
    monkeypatch.setattr(MODULE, "_accelerators", list)
    return cpu_devices()


@pytest.fixture
def three_accelerators(two_cores: list[Device], monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """The same machine with three accelerators."""
    there = [Device("cuda", i, (), 1 << 34, f"H{i}") for i in range(3)]
    monkeypatch.setattr(MODULE, "_accelerators", lambda: there)
    return [*there, *two_cores]


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("spec", "labels"),
    [
        ("auto", "cpu:0 cpu:1"),
        ("all", "cpu:0 cpu:1"),
        ("cpu", "cpu:0 cpu:1"),
        ("cpu:1", "cpu:1"),
        ("cpu:1,cpu:0", "cpu:1 cpu:0"),
        (" CPU:0 , cpu:1 ", "cpu:0 cpu:1"),
        ("cpu*4", "cpu:0 cpu:1 cpu:2 cpu:3"),
        ("cpu*1", "cpu:0"),
        (1, "cpu:1"),
        ([1, 0], "cpu:1 cpu:0"),
        (("cpu:0", 1), "cpu:0 cpu:1"),
        (torch.device("cpu"), "cpu:0 cpu:1"),
        (torch.device("cpu", 1), "cpu:1"),
        ([torch.device("cpu:0"), "cpu:1"], "cpu:0 cpu:1"),
        ((word for word in ["cpu:1"]), "cpu:1"),
    ],
)
def test_what_a_spec_means(spec: Any, labels: str) -> None:
    assert " ".join(device.label for device in devices_of(spec)) == labels


@pytest.mark.usefixtures("three_accelerators")
@pytest.mark.parametrize(
    ("spec", "labels"),
    [
        ("auto", "cuda:0 cuda:1 cuda:2"),
        ("cuda", "cuda:0 cuda:1 cuda:2"),
        ("all", "cuda:0 cuda:1 cuda:2 cpu:0 cpu:1"),
        ("cpu", "cpu:0 cpu:1"),
        ("cuda:2,cpu", "cuda:2 cpu:0 cpu:1"),
        (2, "cuda:2"),
        (torch.device("cuda", 1), "cuda:1"),
        (Device("cuda", 1, (), 0, "made by hand"), "cuda:1"),
    ],
)
def test_what_a_spec_means_where_there_are_accelerators(spec: Any, labels: str) -> None:
    assert " ".join(device.label for device in devices_of(spec)) == labels


def test_a_device_that_was_given_is_taken_as_it_is(two_cores: list[Device]) -> None:
    own = Device("cpu", 7, two_cores[0].cores, 0, "mine")

    assert devices_of(own) == [own]
    assert devices_of([own, two_cores[1]]) == [own, two_cores[1]]


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("cpu:7", "there is no device 'cpu:7'"),
        ("gpu", "there is no device 'gpu'"),
        ("cuda", "there is no device 'cuda'"),
        ("cuda:0", "there is no device 'cuda:0'"),
        ("cuda:0,cpu", "there is no device 'cuda:0'"),
        ("xpu:1", "there is no device 'xpu:1'"),
        ([], r"devices=\[\] names no device"),
        ((), r"devices=\(\) names no device"),
        ("", "device '' is not understood"),
        ("cpu:", "device 'cpu:' is not understood"),
        ("cpu:-1", "device 'cpu:-1' is not understood"),
        ("cpu:0,", "device '' is not understood"),
        ("two cores", "device 'two cores' is not understood"),
        ("cpu:0,cpu:0", "names cpu:0 twice"),
        (["cpu", "cpu:1"], "names cpu:1 twice"),
        ("cpu*2,cpu*2", r'names cpu:0 twice; .* cut the CPU finer with "cpu\*8"'),
        ("cpu*0", "into one group or more"),
        ("cuda*2", "only the CPU can be cut"),
        (2, "there is no device number 2"),
        (-1, "there is no device number -1"),
        (True, "True is a bool, not a device"),
        ([None], "None is a NoneType, not a device"),
        (1.5, "devices=1.5: expected a word or a list"),
        (None, "devices=None: expected a word or a list"),
        (torch.device("meta"), "there is no device 'meta'"),
        (torch.device("cuda", 0), "there is no device 'cuda:0'"),
        (Device("cuda", 0, (), 0, ""), "there is no device 'cuda:0'"),
        (Device("cpu", 0, (), 0, ""), "expected cores among"),
        (Device("cpu", 0, (99999,), 0, ""), "expected cores among"),
    ],
)
def test_a_bad_spec_is_refused_and_told_what_there_is(spec: Any, says: str) -> None:
    with pytest.raises(DeviceError, match=f"{says}.*; this machine has cpu:0, cpu:1 .words: "):
        devices_of(spec)


def test_this_machine_has_devices() -> None:
    found = devices_of("cpu")

    assert [device.index for device in found] == list(range(len(found)))
    allowed = os.sched_getaffinity(0)
    for device in found:
        assert device.kind == "cpu"
        assert allowed.issuperset(device.cores)
        assert device.memory_bytes > 0
        assert device.name
    cores = [core for device in found for core in device.cores]
    assert len(cores) == len(set(cores))
    assert evener.devices is devices_of


def test_the_affinity_of_the_process_is_respected() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(allowed)})

        assert [device.cores for device in devices_of("cpu")] == [(max(allowed),)]
    finally:
        os.sched_setaffinity(0, allowed)
