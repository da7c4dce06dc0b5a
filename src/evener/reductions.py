"""Reductions: a mean or a sum over the batch that a team joins exactly, whatever the shares.

A mean over tokens that are not padding is no mean over samples: a device whose samples are short
counts few tokens. So a module says what its mean is made of. Each device returns its own total
and its own weight as one row each; the rows of all devices are concatenated like any output, and
summed and divided in the graph of the user's program::

    device 0   Mean(total, weight) ──► total[None]  ┐ rows of all devices
    device 1   Mean(total, weight) ──► total[None]  ┴──► sum(0) ──► total ┐
               (weights likewise)                                  weight ┴──► total / weight

So the gradient of each device's total and weight is what autograd makes of this, and nothing is
weighted by hand. What a module computes from its part's mean, such as twice the mean, cannot be
joined any more: it is a :class:`Derived`, which remembers the operation for the error message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions


class Reduction(Tensor):
    """A tensor whose value belongs to one device's part of a batch.

    It behaves as a plain tensor; what is computed from it is a :class:`Derived`.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func in get_default_nowrap_functions():
                return result
            return _derived(result, func)

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)  # torch's own formats nothing but its own class


class Derived(Reduction):
    """A result of an operation on a mean or a sum; its copies and pickles are plain tensors."""

    operation: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = deepcopy(plain(self), memo)
        return copied


class _Whole(Reduction):
    """A mean or a sum."""

    made_of: tuple[Tensor, ...]  # its total, and its weight if it has one
    value_dtype: torch.dtype
    _versions: list[Any]

    @classmethod
    def make(cls, made_of: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """Make one of plain tensors, with a value of this dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            self = cls.value(dtype, *made_of).as_subclass(cls)
            self.made_of, self.value_dtype = tuple(made_of), dtype
            self._versions = _versions(self, *made_of)
        return self

    @staticmethod
    def value(dtype: torch.dtype, *made_of: Tensor) -> Tensor:
        """What the tensors that it is made of come to."""
        raise NotImplementedError

    @property
    def total(self) -> Tensor:
        """The total, as it was given; integers as int64."""
        return self.made_of[0]

    @property
    def is_changed(self) -> bool:
        """Whether it, or what it is made of, was changed in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._versions != _versions(self, *self.made_of)

    def detach(self) -> Any:
        """The same without a graph; it can still be joined."""
        if self.is_changed:
            return super().detach()
        return self.make([tensor.detach() for tensor in self.made_of], self.value_dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.is_changed:
            return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return type(self).make, (self.made_of, self.value_dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.is_changed:
            return deepcopy(plain(self), memo)
        return self.make(deepcopy(self.made_of, memo), self.value_dtype)


class Mean(_Whole):
    """A mean over something else than samples, such as the tokens that are not padding.

    A parallel module returns it from ``forward``, anywhere in its outputs. What your program gets
    is a plain tensor: the sum of the totals of all devices by the sum of their weights, with the
    gradient that it has on one device. (A mean that is returned as a plain 0-dim tensor is joined
    weighted by the number of samples.) In a module that is not parallel, or has one device, it is
    a tensor of the value ``total / weight``.

    The result of an operation on it inside of the module cannot be joined, and is an error that
    names the operation: for ``2 * Mean(total, weight)`` return ``Mean(2 * total, weight)``. Only
    ``detach()`` gives what can be.

    Args:
        total: the sum over the device's part of the batch: a tensor with the same shape on all
            devices, 0-dim as a rule, or a number. A gradient flows back through it.
        weight: what it is divided by, such as the number of tokens: a number, or a tensor of a
            shape that broadcasts with ``total``; with a gradient if it has one. Integers are
            summed as int64. A part of the batch without weight gives ``Mean(0, 0)`` and counts
            nothing; where no device has any, the value is ``nan``, as ``0 / 0`` is in torch.

    Attributes:
        total: as given.
        weight: as given, as a tensor.

    Raises:
        TypeError: if one of them is neither a tensor nor a number, or was computed from another
            mean.
        BatchError: at the call, if totals differ in shape or dtype among the devices, or a result
            of an operation on a mean is returned by more than one of them.

    Example:
        >>> losses, mask = torch.tensor([2.0, 4.0, 9.0]), torch.tensor([1, 1, 0])
        >>> Mean((losses * mask).sum(), mask.sum())
        Mean(3.)
    """

    def __new__(cls, total: Any, weight: Any) -> Any:  # noqa: D102 - that of the class
        return _new(cls, total, weight)

    @staticmethod
    def value(dtype: torch.dtype, *made_of: Tensor) -> Tensor:
        """Total by weight."""
        total, weight = made_of
        return (total / weight).to(dtype)

    @property
    def weight(self) -> Tensor:
        """The weight as a tensor; integers as int64."""
        return self.made_of[1]


class Sum(_Whole):
    """A sum over the batch: the number of right answers, or a loss that you divide yourself.

    A parallel module returns it from ``forward``, anywhere in its outputs; your program gets a
    plain tensor, the sum over all devices. With gradient accumulation it is the way to an exact
    mean over the tokens of several batches: divide each sum by the tokens of all of them. As for
    :class:`Mean`, an operation on it inside of the module gives what cannot be joined.

    Args:
        total: the sum over the device's part of the batch: a tensor with the same shape on all
            devices, 0-dim as a rule, or a number. Integers are summed as int64.

    Attributes:
        total: as given.

    Raises:
        TypeError: if it is neither a tensor nor a number, or was computed from a mean.
        BatchError: at the call, as for :class:`Mean`.

    Example:
        >>> Sum(torch.tensor([True, False, True]).sum())
        Sum(2)
    """

    def __new__(cls, total: Any) -> Any:  # noqa: D102 - that of the class
        return _new(cls, total)

    @staticmethod
    def value(dtype: torch.dtype, *made_of: Tensor) -> Tensor:
        """The total; another tensor, so that its changes in place are its own."""
        return made_of[0].to(dtype, copy=True)


class Means:
    """An output that is a mean, or a sum, over each device's own part, where these stay apart.

    Args:
        values: (devices that work, ...), in order.
        empty: its value for a part without samples.

    Attributes:
        values: the same.
        empty: the same.
    """

    def __init__(self, values: Tensor, empty: float = math.nan) -> None:
        # not a dataclass, which would be taken apart
        self.values = values
        self.empty = empty


def plain(tensor: Tensor) -> Tensor:
    """The same values and graph as a tensor of torch's own class."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def taken_apart(
    value: Reduction,
) -> tuple[type[Reduction], tuple[str, ...], tuple[Any, ...], list[Tensor]]:
    """Take a mean or a sum apart into rows, and what is computed from one into itself.

    Returns:
        Its kind, of a ``Derived`` the operation, of others their dtype, and plain tensors.
    """
    if isinstance(value, _Whole) and not value.is_changed:
        return type(value), (), (value.value_dtype,), [tensor[None] for tensor in value.made_of]
    operation = value.operation if isinstance(value, Derived) else "a change in place"
    return Derived, (operation,), (), [plain(value)]


def put_together(kind: type[Any], keys: tuple[Any, ...], parts: Sequence[Any]) -> Any:
    """A mean or a sum as a plain tensor, in the graph of its parts.

    Args:
        kind: as :func:`taken_apart` gave it.
        keys: likewise.
        parts: what it is made of, joined: one row for each device that works. As ``Means`` the
            devices stay apart.
    """
    if kind is Derived:
        return parts[0]
    (dtype,) = keys
    if isinstance(parts[0], Means):
        devices = zip(*(part.values for part in parts), strict=True)
        values = torch.stack([kind.value(dtype, *rows) for rows in devices])
        return Means(values, 0 if kind is Sum else math.nan)
    return kind.value(dtype, *(part.sum(0, dtype=part.dtype) for part in parts))


def _derived(result: Any, func: Callable[..., Any]) -> Any:
    """The results of an operation, marked; what has a class of ours has its mark."""
    if type(result) is Tensor:
        name: str = func.__name__
        if name == "__get__":  # an attribute of tensors
            name = func.__self__.__name__  # type: ignore[attr-defined]
        marked = result.as_subclass(Derived)
        marked.operation = name.strip("_")
        return marked
    if isinstance(result, (tuple, list)):
        items = [_derived(item, func) for item in result]
        kind: Any = type(result)
        return kind.make(items) if hasattr(kind, "_make") else kind(items)
    return result


def _new(kind: Any, total: Any, *weights: Any) -> Any:
    if torch.compiler.is_compiling():  # a tensor that is an attribute of another loses gradients
        return torch.compiler.disable(_new)(kind, total, *weights)  # type: ignore[no-untyped-call]
    total = _summand(total, "total")
    made_of, dtype = [total], total.dtype
    for weight in weights:
        made_of.append(_summand(weight, "weight", like=total))
        dtype = (total / (weight if isinstance(weight, Number) else made_of[1])).dtype
    return kind.make(made_of, dtype)


def _versions(*tensors: Tensor) -> list[Any]:
    """What tells whether tensors were changed in place; an inference tensor counts no changes."""
    return [
        bytes(each.contiguous().flatten().view(torch.uint8).tolist())
        if each.is_inference()
        else each._version
        for each in tensors
    ]


def _summand(value: Any, name: str, like: Tensor | None = None) -> Tensor:
    """A total or a weight as it is summed: a plain tensor."""
    if isinstance(value, Sum) and not value.is_changed:
        value = value.total
    if isinstance(value, Reduction):
        operation = value.operation if isinstance(value, Derived) else type(value).__name__
        raise TypeError(
            f"the {name} is a result of {operation!r}, computed from an evener.Mean or "
            "evener.Sum, and cannot be summed over devices; make it of plain tensors"
        )
    if isinstance(value, Number):
        dtype = None
        if like is not None and isinstance(value, float):  # as exact as beside a tensor
            is_double = like.dtype in (torch.float64, torch.complex128)
            dtype = torch.float64 if is_double else torch.float32
        value = torch.tensor(value, dtype=dtype)
    if not isinstance(value, Tensor):
        raise TypeError(f"the {name} is a {type(value).__name__}; expected a tensor or a number")
    summand = value if type(value) is Tensor else plain(value)
    if summand.dtype is torch.bool:
        raise TypeError(
            f"the {name} is bool, which does not add up over the parts of a batch; give a count, "
            "such as mask.sum()"
        )
    is_counted = not (summand.is_floating_point() or summand.is_complex())
    return summand.to(torch.int64) if is_counted else summand
