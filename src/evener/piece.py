"""A piece: one device's part of one call, the same object in the main process and in a helper.

It knows its inputs, its seed and the settings of the user's program, so it can be run anywhere.
Between forward and backward it holds its own piece of the autograd graph::

    inputs, cut out of the batch ──detach──► leaves ──module──► outputs
                                                │                  │ gradients of the outputs,
                         gradients of the inputs ◄──── backward ───┘ cut by the same shares
                                      and of the parameters
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from evener.batches import is_joinable
from evener.errors import EvenerError
from evener.thread import seeded
from evener.trees import Structure, flatten, unflatten

#: The smallest number that is not denormal.
_TINY = sys.float_info.min
#: What holds for a whole process and changes what is computed, or which errors are found: how to
#: ask for it, and how to set it.
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda flag: torch.use_deterministic_algorithms(flag[0], warn_only=flag[1]),
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda flag: torch.set_anomaly_enabled(*flag),
    ),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._check_sparse_tensor_invariants, torch._C._set_check_sparse_tensor_invariants),
    (lambda: _TINY / 2 == 0, torch.set_flush_denormal),  # torch does not tell; arithmetic does
)


def current_flags() -> tuple[Any, ...]:
    """The flags of this process."""
    return tuple(get() for get, _ in _FLAGS)


def set_flags(flags: tuple[Any, ...]) -> None:
    """Make the flags of another process those of this one."""
    for (get, put), flag in zip(_FLAGS, flags, strict=True):
        if get() != flag:
            put(flag)


class Settings(NamedTuple):
    """The settings of the user's program that change what a module computes."""

    grad: bool
    inference: bool
    autocast: tuple[bool, torch.dtype, bool]  # on, dtype, cache
    flags: tuple[Any, ...]

    @classmethod
    def current(cls) -> Settings:
        """Those in force in this thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            (
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
            ),
            current_flags(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put them in force in this process; grad and autocast end with the block."""
        set_flags(self.flags)
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            on, dtype, cache = self.autocast
            if on:
                stack.enter_context(torch.autocast("cpu", dtype=dtype, cache_enabled=cache))
            yield


def seed_of_piece(seed: int, call: int, device: int) -> int:
    """The seed of a piece: a hash of the process's torch seed, the call's number and the device's.

    Nothing is drawn from a generator, so a parallel module changes no other random number.

    Example:
        >>> seed_of_piece(0, 0, 0) == seed_of_piece(0, 0, 0) != seed_of_piece(0, 1, 0)
        True
    """
    text = f"{seed} {call} {device}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class Seeds:
    """The seeds of a module's calls: they follow torch's seed, and the calls since it was set."""

    def __init__(self) -> None:
        self._seed = self._num_calls = 0

    def next(self) -> Callable[[int], int]:
        """A seed for each piece of the next call, by the piece's number."""
        if self._seed != torch.initial_seed():
            self._seed, self._num_calls = torch.initial_seed(), 0
        self._num_calls += 1
        return partial(seed_of_piece, self._seed, self._num_calls - 1)


def refusing_to_redraw(function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that refuses to draw random numbers inside of a backward.

    There a checkpoint around the module runs it for the second time, and would have to draw what
    it drew the first time.
    """
    if torch._C._current_graph_task_id() == -1:
        return function

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        outputs = function(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            raise EvenerError(
                "a checkpoint around a parallel module would draw other random numbers (dropout) "
                "when it runs the module again, and its gradients would be wrong; use the "
                "checkpoint inside the module"
            )
        return outputs

    return forward


def seed_others(seed: int) -> None:
    """Seed the generators that are not torch's; in a helper they are nobody else's.

    Once for a replica, not for each piece: it takes longer than the rest of a small piece's
    preparation.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def check_transforms() -> None:
    """Refuse what would silently be lost on the way to the helpers."""
    if torch._C._get_tracing_state() is not None:
        raise EvenerError(
            "a parallel module cannot be traced; evener.release(module) first, and trace the "
            "plain module"
        )
    if forward_ad._current_level >= 0:
        raise EvenerError(
            "forward-mode derivatives through a parallel module are not possible; "
            "evener.release(module) first"
        )
    if torch._C._functorch.maybe_current_level() is not None:
        raise EvenerError(
            "torch.func transforms (grad, vmap, ...) of a parallel module are not possible; "
            "evener.release(module) first"
        )


@contextmanager
def own_saved_tensors() -> Iterator[None]:
    """Keep the hooks that a user has set on saved tensors out of the first device's piece.

    They are for the graph around the module. A checkpoint around it, for example, would run the
    module again from inside the piece's backward, while the helpers are in theirs.
    """
    # An older torch does not tell whether there are such hooks: then it costs a call a tensor.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or top(False):  # noqa: FBT003 - its only form
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            yield
    else:
        yield


class Piece:
    """One device's part of one call.

    Args:
        leaves: the leaves of its inputs.
        wanted: for each leaf whether a gradient with respect to it is wanted.
        structure: their structure.
        seed: what its random numbers start from.
        grad: whether a backward may follow.

    Attributes:
        grad: whether a backward may follow.
        outputs: the leaves of the outputs, after :meth:`forward`; tensors with their graphs.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        wanted: Sequence[bool],
        structure: Structure,
        seed: int,
        *,
        grad: bool,
    ) -> None:
        self._structure = structure
        self._seed = seed
        self.grad = grad
        self._leaves = [
            leaf.detach().requires_grad_(grad and want) if isinstance(leaf, Tensor) else leaf
            for leaf, want in zip(leaves, wanted, strict=True)
        ]
        self.outputs: list[Any] = []

    def forward(self, function: Callable[..., Any]) -> Structure:
        """Run the module's forward on the inputs.

        Returns:
            The structure of the outputs; their leaves are in ``outputs``.
        """
        with torch.set_grad_enabled(self.grad), seeded(self._seed):
            leaves = [
                _Given.apply(leaf)  # type: ignore[no-untyped-call]
                if isinstance(leaf, Tensor) and leaf.requires_grad
                else leaf
                for leaf in self._leaves
            ]
            args, kwargs = unflatten(self._structure, leaves)
            self.outputs, structure = flatten(function(*args, **kwargs))
        return structure

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs that a gradient is wanted for, in order."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def roots(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Pair those tensors of the outputs that a backward starts from with their gradients.

        Args:
            gradients: one for each joinable tensor among ``outputs``, or None.

        Returns:
            The outputs and their gradients, as ``torch.autograd`` takes them.
        """
        tensors = [leaf for leaf in self.outputs if is_joinable(leaf)]
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]


def run_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, keep_graph: bool
) -> None:
    """As ``torch.autograd.backward``, whose check of shapes imports 0.3 s of modules first."""
    torch.autograd.graph._engine_run_backward(
        tuple(outputs),
        tuple(gradients),
        keep_graph,
        False,  # noqa: FBT003 - create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _Given(torch.autograd.Function):
    """The same memory as a tensor that is no leaf.

    A module may change its input in place if that was computed; a leaf that requires a gradient
    may not be changed, and neither may a view of one.
    """

    @staticmethod
    def forward(_ctx: Any, leaf: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return alias.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
