"""Dims: in which dimension of each input and output the batch lies, as ``torch.vmap`` says it.

A user gives one number for all, ``None`` for what has no batch, or a tree of them that begins like
the arguments or the outputs; where it ends, its number holds for all that is below::

    in_dims = (0, None)              model(x, mask)               x is cut, mask is not
    in_dims = {"mask": None}         model(x, mask=mask)          by name; all others are cut
    out_dims = (0, (1, 1))           return y, (hidden, cell)     as an LSTM does

A tensor of dimension 0 never has a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from evener.errors import BatchError
from evener.trees import Structure, spread


class Dims:
    """Where the batch lies.

    Args:
        in_dims: an int, None, a tuple or list with an entry for each positional argument, or a
            dict with an entry for each argument of ``forward`` that differs from 0, by its name.
        out_dims: an int, None, or a tree of them that begins like the outputs.

    Raises:
        TypeError: if there is anything else in them.
    """

    def __init__(self, in_dims: Any = 0, out_dims: Any = 0) -> None:
        self._in_dims = in_dims
        self._out_dims = out_dims
        for name, dims in (("in_dims", in_dims), ("out_dims", out_dims)):
            for dim in pytree.tree_leaves(dims):
                if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
                    raise TypeError(
                        f"{name}={dims!r}: {dim!r} is a {type(dim).__name__}; expected the number "
                        "of the batch's dimension, None where there is no batch, or a tuple, list "
                        "or dict of them"
                    )

    @property
    def is_first(self) -> bool:
        """Whether the batch lies in dimension 0 of everything."""
        return bool(self._in_dims == 0 and self._out_dims == 0)

    @property
    def by_name(self) -> bool:
        """Whether the names of the arguments have to be known."""
        return isinstance(self._in_dims, dict)

    def of_inputs(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        structure: Structure,
        forward: Callable[..., Any] | None = None,
    ) -> list[int | None]:
        """The batch's dimension in each input.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            leaves: the leaves of both.
            structure: their structure.
            forward: the module's own; asked for its arguments' names where they are needed.

        Returns:
            For each leaf a number from zero; None for what is not cut.

        Raises:
            BatchError: if ``in_dims`` does not fit the arguments, or a tensor has no such
                dimension.
        """
        if self._in_dims == 0:  # the usual
            return [0 if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
        if isinstance(self._in_dims, dict):
            given = self._by_name(args, kwargs, forward)
        elif isinstance(self._in_dims, (tuple, list)):
            given = (tuple(self._in_dims), dict.fromkeys(kwargs, 0))
        else:
            given = self._in_dims
        dims = spread(given, structure)
        if dims is None:
            raise BatchError(
                f"in_dims={self._in_dims!r} does not fit the inputs, {len(args)} positional "
                f"arguments and {sorted(kwargs)} by name: {structure}; expected one entry for "
                "each positional argument, or a dict by the arguments' names"
            )
        return [
            _checked(dim, leaf, "in_dims", i)
            for i, (dim, leaf) in enumerate(zip(dims, leaves, strict=True))
        ]

    def of_outputs(self, leaves: Sequence[Any], structure: Structure) -> list[int | None]:
        """The batch's dimension in each output.

        Args:
            leaves: the leaves of the outputs on one device, or their forms.
            structure: their structure.

        Returns:
            For each leaf a number from zero; None for what has no batch.

        Raises:
            BatchError: if ``out_dims`` does not fit the outputs, or a tensor has no such
                dimension.
        """
        if self._out_dims == 0:
            return [0 if getattr(leaf, "shape", ()) else None for leaf in leaves]
        dims = spread(self._out_dims, structure)
        if dims is None:
            raise BatchError(
                f"out_dims={self._out_dims!r} does not fit the outputs: {structure}; expected a "
                "number for all, or a tree that begins like the outputs"
            )
        return [
            _checked(dim, leaf, "out_dims", i)
            for i, (dim, leaf) in enumerate(zip(dims, leaves, strict=True))
        ]

    def _by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Callable[..., Any] | None
    ) -> Any:
        names: list[str] = []
        if forward is not None:
            for parameter in signature(forward).parameters.values():
                if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
                    names.append(parameter.name)
                elif parameter.kind is Parameter.VAR_POSITIONAL:
                    names += [parameter.name] * (len(args) - len(names))
        unknown = [name for name in self._in_dims if name not in names and name not in kwargs]
        if unknown and not _takes_any_name(forward):
            raise BatchError(
                f"in_dims={self._in_dims!r} names {unknown[0]!r}, and forward has the arguments "
                f"{', '.join(names)}"
            )
        dims = [self._in_dims.get(name, 0) for name in names[: len(args)]]
        dims += [0] * (len(args) - len(dims))
        return tuple(dims), {name: self._in_dims.get(name, 0) for name in kwargs}


def _takes_any_name(forward: Callable[..., Any] | None) -> bool:
    return forward is None or any(
        parameter.kind is Parameter.VAR_KEYWORD
        for parameter in signature(forward).parameters.values()
    )


def _checked(dim: int | None, leaf: Any, name: str, number: int) -> int | None:
    """A dimension of a leaf, counted from its first."""
    shape = getattr(leaf, "shape", None)
    if dim is None or not shape or not hasattr(leaf, "dtype"):
        return None
    if not -len(shape) <= dim < len(shape):
        what = "input" if name == "in_dims" else "output"
        raise BatchError(
            f"{name} says that the batch of {what} {number} is in dimension {dim}, and its shape "
            f"is {tuple(shape)}; give None for what has no batch"
        )
    return dim % len(shape)
