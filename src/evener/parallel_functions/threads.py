"""Threads: each replica's call in a thread of its own, with the settings of the caller."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.nn.parallel as torchs
from torch import Tensor, nn
from torch._utils import KeyErrorMessage

from evener.errors import BatchError
from evener.parallel_functions.parts import leaves_of
from evener.parallel_functions.places import on_cpu, places_of, torch_devices
from evener.piece import Settings

_torchs_parallel_apply = torchs.parallel_apply  # as it is now: see `evener run`


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Any] | None = None,
) -> list[Any]:
    """Call each module with its inputs, each in a thread of its own.

    Grad mode, inference mode and autocast are those of the caller. Random numbers come from the
    process's one generator, in the order in which the threads ask.

    Args:
        modules: the modules, as from :func:`replicate`.
        inputs: for each its positional arguments, a tuple or list; or its only argument.
        kwargs_tup: for each its keyword arguments. Default: none.
        devices: for each its device, as in :func:`evener.devices`. Default: that of its inputs.

    Returns:
        What each module returned, in order.

    Raises:
        BatchError: if there are not as many inputs, keyword arguments and devices as modules.
        Exception: what a module raises, with its own type (RuntimeError if one cannot be made from
            a message), the text naming replica and device, and the original traceback in it.
    """
    kwargs_tup = [{}] * len(modules) if kwargs_tup is None else kwargs_tup
    places = None if devices is None else places_of(devices)
    given = {"inputs": inputs, "kwargs_tup": kwargs_tup, "devices": places}
    for name, values in given.items():
        if values is not None and len(values) != len(modules):
            raise BatchError(f"{len(values)} {name} for {len(modules)} modules; expected as many")
    if places is None:
        on_accelerator = any(
            isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves_of(inputs)
        )
    else:
        on_accelerator = bool(places) and not on_cpu(places)
    if on_accelerator:
        ids = None if places is None else torch_devices(places)
        return _torchs_parallel_apply(modules, inputs, kwargs_tup, ids)
    labels = ["cpu"] * len(modules) if places is None else [place.label for place in places]
    calls = [
        partial(_call, Settings.current(), module, args, kwargs)
        for module, args, kwargs in zip(modules, inputs, kwargs_tup, strict=True)
    ]
    results: list[Any] = [None] * len(calls)
    if len(calls) == 1:
        _keep(results, 0, calls[0], labels[0], Exception)
    else:
        threads = [
            threading.Thread(target=_keep, args=(results, i, call, label, BaseException))
            for i, (call, label) in enumerate(zip(calls, labels, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, _Raised):
            raise result.remade()
    return results


class _Raised(NamedTuple):
    """What is kept of an exception: not itself, for it would hold the frames of the call."""

    kind: type[BaseException]
    text: str

    def remade(self) -> BaseException:
        # A KeyError shows its argument as repr does: with this kind of str, as it is.
        text = KeyErrorMessage(self.text) if self.kind is KeyError else self.text
        try:
            return self.kind(text)
        except Exception:  # noqa: BLE001 - one that wants other arguments
            return RuntimeError(text)


def _call(settings: Settings, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    with settings.applied():
        return module(*(args if isinstance(args, (list, tuple)) else (args,)), **kwargs)


def _keep(
    results: list[Any], i: int, call: Callable[[], Any], label: str, caught: type[BaseException]
) -> None:
    """Keep what a call returned, or raised."""
    try:
        results[i] = call()
    except caught as error:
        text = f"Caught {type(error).__name__} in replica {i} on device {label}.\nOriginal "
        results[i] = _Raised(type(error), text + traceback.format_exc())
