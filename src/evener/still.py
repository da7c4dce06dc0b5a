"""Still: random numbers that stand still, to tell what they do from everything else.

Each device draws its own random numbers, so dropout never has the masks of one device. Whether
that is all that differs is seen when nothing is drawn: every operator that torch marks as random
gives constants then. Dropout lets everything through::

    bernoulli_(1 - p), native_dropout    what it gives on average
    rand, randn, normal_, randint ...    one constant
    randperm                             the numbers in their order

Python's ``random`` and NumPy are not stilled; they begin at the same seed on each device.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map

from evener.helper import HELPER_VARIABLE

#: What stands for a random number. Not zero, of which some distributions take the logarithm.
CONSTANT = 0.5


class _Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives constants for what torch's operators draw."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.native_dropout_backward.default:
            return args[0].clone()
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name.startswith("rrelu"):
            return func(*args[:4], False, *args[5:], **kwargs)  # noqa: FBT003 - training
        result = func(*args, **kwargs)
        if name == "randperm":
            result.copy_(torch.arange(len(result)))
        elif name.startswith("bernoulli"):
            # A p of one half is the default of bernoulli_, and not among the arguments then.
            default = 0.5 if name == "bernoulli_" else args[0]
            _fill(result, args[1] if len(args) > 1 else kwargs.get("p", default))
        else:
            tree_map(lambda each: _fill(each, CONSTANT), result)
        return result


def random_numbers_still() -> AbstractContextManager[Any]:
    """In its block torch draws no random numbers, in this process and this thread."""
    mode: AbstractContextManager[Any] = _Still()  # type: ignore[no-untyped-call]
    return mode


def _fill(tensor: Any, value: Any) -> Any:
    """Make a random tensor constant; whole numbers become those below."""
    if isinstance(tensor, Tensor):
        value = value.to(torch.float64) if isinstance(value, Tensor) else value
        tensor.copy_(torch.as_tensor(value))
    return tensor


class StillForward:
    """A forward that draws no random numbers, on whichever device it runs.

    In a helper that holds until the helper ends: a checkpoint inside of the module runs a part of
    it again in the backward. In the main process the caller sees to that.

    Args:
        forward: a module's own.
        seed: where Python's and NumPy's random numbers begin, on each device.
    """

    def __init__(self, forward: Callable[..., Any], seed: int) -> None:
        self.__wrapped__ = forward  # by this name its arguments are found
        self._seed = seed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if os.environ.get(HELPER_VARIABLE) == str(os.getpid()) and not any(
            isinstance(mode, _Still) for mode in _get_current_dispatch_mode_stack()
        ):
            random_numbers_still().__enter__()
        with generators_kept(self._seed):
            return self.__wrapped__(*args, **kwargs)


@contextmanager
def generators_kept(seed: int | None = None) -> Iterator[None]:
    """Put all generators back at the end of a block: torch's, Python's and NumPy's.

    Args:
        seed: where they begin in the block. Default: where they are.
    """
    numpy = sys.modules.get("numpy")
    python, legacy = random.getstate(), numpy and numpy.random.get_state()
    cuda = torch.cuda
    is_used = cuda.is_initialized()  # type: ignore[no-untyped-call]
    accelerators = range(cuda.device_count()) if is_used else ()
    with torch.random.fork_rng(devices=accelerators):
        try:
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
                if numpy:
                    numpy.random.seed(seed)
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(legacy)


def drawers(module: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Find the submodules in whose own code random numbers are drawn.

    Args:
        module: whose calls are followed, while they run.
        run: calls it.

    Returns:
        Their paths, in the order of the first draw; that of the module itself is empty.
    """
    found: dict[str, None] = {}
    names = {id(each): name for name, each in module.named_modules()}
    stack: list[str] = []
    state = _generators()

    def look() -> None:
        nonlocal state
        now = _generators()
        if now != state and stack:
            found.setdefault(stack[-1])
        state = now

    def begin(each: nn.Module, _args: Any, _kwargs: Any) -> None:
        look()
        stack.append(names[id(each)])

    def end(_module: nn.Module, _args: Any, _kwargs: Any, _outputs: Any) -> None:
        look()
        stack.pop()

    with hooked(module, begin, end):
        run()
    return list(found)


@contextmanager
def hooked(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[None]:
    """Set hooks on all submodules for a block; both get the keyword arguments, too."""
    handles = []
    try:
        for each in module.modules():
            handles.append(each.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(each.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    legacy = () if numpy is None else numpy.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes() if numpy else torch.get_rng_state().tolist(),
        random.getstate(),
        *(each.tobytes() if hasattr(each, "tobytes") else each for each in legacy),
    )
