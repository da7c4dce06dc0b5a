"""Devices: the places of this machine that compute.

An accelerator is a device as the machine has it. The CPU is cut into devices by us: equal groups
of the *physical* cores that this process may use (its affinity mask, and its cgroup's quota), in
the order of the machine's topology, so that the cores of a group share what they can::

    up to 8 cores      one core each                      cpu:0  cpu:1
    more               one device for each shared cache,  cpu:0 = cores 0-7, cpu:1 = cores 8-15 ...
                       or NUMA node, where that gives 2 to 8 equal groups; else 8 equal groups

This file describes and decides nothing: which devices share a job is up to whoever asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from evener.errors import DeviceError
from evener.topology import (
    cpu_name,
    cpu_quota,
    group_cores,
    memory_limit_bytes,
    read_cores,
    usable_cores,
)


@dataclass(frozen=True)
class Device:
    """A place that computes.

    Attributes:
        kind: ``"cpu"``, or the type of an accelerator such as ``"cuda"``.
        index: its number among those of its kind, from zero.
        cores: the CPU cores it computes on, as the numbers that the system gives them, one for
            each physical core; empty for an accelerator.
        memory_bytes: an accelerator's memory; a CPU device's equal part of the main memory.
        name: what the maker calls it, such as ``"AMD EPYC 7763"``.
    """

    kind: str
    index: int
    cores: tuple[int, ...]
    memory_bytes: int
    name: str

    @property
    def label(self) -> str:
        """How specs, tables and messages call it: ``"cpu:1"``."""
        return f"{self.kind}:{self.index}"

    def __str__(self) -> str:
        if not self.cores:
            return f"{self.label} ({self.name})"
        noun = "core" if len(self.cores) == 1 else "cores"
        return f"{self.label} ({noun} {_ranges(self.cores)}, {self.name})"


DeviceSpec: TypeAlias = "str | int | torch.device | Device"
DevicesSpec: TypeAlias = "DeviceSpec | Sequence[DeviceSpec]"


def devices(spec: DevicesSpec = "auto") -> list[Device]:
    """Say which devices a spec means on this machine.

    Args:
        spec: one of the words below, several of them joined by commas, or a list of them and of
            ``Device``, ``torch.device`` or int. Default ``"auto"``.

            ===============  ==================================================================
            ``"auto"``       all accelerators; where there is none, the same as ``"cpu"``
            ``"all"``        all accelerators, then the CPU devices
            ``"cpu"``        all CPU devices (see the head of this file)
            ``"cpu:1"``      the second of them
            ``"cpu*4"``      the CPU cores in four equal groups; more groups than cores is allowed
                             (to try things out: groups then share a core)
            ``"cuda"``       all accelerators of that kind; ``"cuda:0"`` one of them
            an int           the device of that number in ``"auto"``
            ===============  ==================================================================

    Returns:
        The devices in the order of the spec, each once.

    Raises:
        DeviceError: if a word is not understood, names a device that is not there, or names one
            twice, or if the list is empty. The message lists what there is.

    Example:
        >>> [device.label for device in devices("cpu*2")]
        ['cpu:0', 'cpu:1']
    """
    items: list[DeviceSpec]
    if isinstance(spec, (str, int, torch.device, Device)):
        items = [spec]
    elif isinstance(spec, Iterable):
        items = list(spec)
    else:
        raise DeviceError(f"devices={spec!r}: expected a word or a list; {_what_there_is()}")
    words: list[DeviceSpec] = []
    for item in items:
        words.extend(item.split(",") if isinstance(item, str) else [item])
    found = [device for word in words for device in _resolve(word)]
    if not found:
        raise DeviceError(f"devices={spec!r} names no device; {_what_there_is()}")
    seen: set[str] = set()
    for device in found:
        if device.label in seen:
            raise DeviceError(
                f"devices={spec!r} names {device.label} twice; name each device once, or cut the "
                f'CPU finer with "cpu*{2 * len(found)}"; {_what_there_is()}'
            )
        seen.add(device.label)
    return found


# ------------------------------------------------------------------ reading a spec


def _resolve(word: DeviceSpec) -> list[Device]:
    if isinstance(word, Device):
        return [_checked(word)]
    if isinstance(word, torch.device):
        word = str(word)
    if isinstance(word, int) and not isinstance(word, bool):
        there = _accelerators() or _cpu_devices()
        if 0 <= word < len(there):
            return [there[word]]
        raise DeviceError(f"there is no device number {word}; {_what_there_is()}")
    if not isinstance(word, str):
        raise DeviceError(
            f"{word!r} is a {type(word).__name__}, not a device; expected a str, int, "
            f"torch.device or Device; {_what_there_is()}"
        )
    word = word.strip().lower()
    if word == "auto":
        return _accelerators() or _cpu_devices()
    if word == "all":
        return [*_accelerators(), *_cpu_devices()]
    match = re.fullmatch(r"([a-z_]+)(?:(?P<mark>[:*])(?P<number>\d+))?", word)
    if match is None:
        raise DeviceError(f"device {word!r} is not understood; {_what_there_is()}")
    kind, mark, number = match[1], match["mark"], int(match["number"] or 0)
    if mark == "*":
        if kind != "cpu" or number == 0:
            raise DeviceError(
                f"device {word!r}: only the CPU can be cut, into one group or more, "
                f'such as "cpu*2"; {_what_there_is()}'
            )
        return _cpu_devices(number)
    there = [device for device in [*_accelerators(), *_cpu_devices()] if device.kind == kind]
    if mark == ":":
        there = [device for device in there if device.index == number]
    if not there:
        raise DeviceError(f"there is no device {word!r}; {_what_there_is()}")
    return there


def _checked(device: Device) -> Device:
    """Check a record that the user may have made by hand."""
    if device.kind != "cpu":
        return _resolve(device.label)[0]
    allowed = os.sched_getaffinity(0)
    if not device.cores or not allowed.issuperset(device.cores):
        raise DeviceError(
            f"{device!r}: expected cores among {_ranges(sorted(allowed))}, which this process "
            f"may use; {_what_there_is()}"
        )
    return device


def _what_there_is() -> str:
    there = ", ".join(device.label for device in [*_accelerators(), *_cpu_devices()])
    return f'this machine has {there} (words: "auto", "all", "cpu", "cpu*2", "cpu:0,cpu:1")'


# ------------------------------------------------------------------ what the machine has


def _accelerators() -> list[Device]:
    # Asked first: where there is none, torch 2.6 raises instead of returning None.
    if not torch.accelerator.is_available():
        return []
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    kind = accelerator.type
    api = getattr(torch, kind)
    found = []
    for index in range(torch.accelerator.device_count()):
        name, memory_bytes = kind, 0
        if hasattr(api, "get_device_properties"):
            properties = api.get_device_properties(index)
            name, memory_bytes = properties.name, properties.total_memory
        found.append(Device(kind, index, (), memory_bytes, name))
    return found


def _cpu_devices(num_groups: int | None = None) -> list[Device]:
    root = Path("/")
    cores = usable_cores(read_cores(root, os.sched_getaffinity(0)), cpu_quota(root))
    groups = group_cores(cores, num_groups)
    memory_bytes = memory_limit_bytes(root) // len(groups)
    name = cpu_name(root)
    return [Device("cpu", i, group, memory_bytes, name) for i, group in enumerate(groups)]


def _ranges(numbers: Sequence[int]) -> str:
    """Write ``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
