"""Batches: cutting the inputs of a call by shares, and joining the outputs of the devices.

Inputs and outputs are trees (see :mod:`evener.trees`). What becomes of a leaf is decided by its
form, and where the batch lies in it (see :mod:`evener.dims`):

==========================  =======================  ==========================================
leaf                        as an input              as an output
==========================  =======================  ==========================================
tensor with a batch         cut along its dimension  concatenated along its dimension
tensor without, of floats   given to every device    a mean over the batch, weighted by share
tensor without, others      given to every device    must be equal on all devices
evener.Mean, evener.Sum     as its plain value       totals and weights are summed
anything else               given to every device    must be equal on all devices
==========================  =======================  ==========================================

As a rule the batch is in dimension 0, and a 0-dim tensor has none.

Weighting happens here and nowhere else: a concatenated output makes the gradient of any loss a
plain sum over the devices, and a weighted mean passes its weights on by the chain rule.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evener.dims import Dims
from evener.errors import BatchError
from evener.pickling import dumps
from evener.reductions import Reduction, plain
from evener.trees import Structure, derived, flatten, ragged, summed

# ------------------------------------------------------------------ inputs


_ONE_TENSOR = flatten(((0,), {}))[1]


class Batch:
    """The inputs of one call, ready to be cut.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        dims: where the batch lies. Default: in dimension 0.
        forward: the module's own, for the names of its arguments.

    Attributes:
        dims: as given.
        cut_dims: for each leaf the dimension that is cut; None for what goes to every device.
        leaves: the leaves of ``(args, kwargs)``.
        structure: their structure.
        size: number of samples; None where no input has a batch dimension.
        wanted: for each leaf whether a gradient with respect to it is wanted.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: Dims | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # the same, 20 us sooner
            self.leaves, self.structure = [args[0]], _ONE_TENSOR
        else:
            leaves, self.structure = flatten((args, kwargs), opens_reductions=False)
            self.leaves = [plain(leaf) if isinstance(leaf, Reduction) else leaf for leaf in leaves]
        self.wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self.leaves]
        self.size: int | None = None
        self.dims = dims or Dims()
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
                raise BatchError(
                    f"{_names(args, kwargs, len(self.leaves))[i]} is a tensor of layout "
                    f"{leaf.layout}, which cannot be cut; give a dense one"
                )
        self.cut_dims = self.dims.of_inputs(args, kwargs, self.leaves, self.structure, forward)
        for i, (leaf, dim) in enumerate(zip(self.leaves, self.cut_dims, strict=True)):
            if dim is None:
                continue
            if self.size is None:
                self.size, first = leaf.shape[dim], i
            elif leaf.shape[dim] != self.size:
                names = _names(args, kwargs, len(self.leaves))
                raise BatchError(
                    f"the inputs do not have one batch size: {names[first]} has "
                    f"{tuple(self.leaves[first].shape)} and {names[i]} has {tuple(leaf.shape)}; "
                    f"expected the same number in dimension {self.cut_dims[first]} of the one and "
                    f"{dim} of the other; say with in_dims= where the batch lies, None for what "
                    "every device gets as it is"
                )

        for value in (*args, *kwargs.values()):
            if type(value) is list and len(value) == self.size and self.size > 1:
                self._warn_of_list(value)

    def _warn_of_list(self, value: list[Any]) -> None:
        if not any(isinstance(leaf, Tensor) for leaf in flatten(value)[0]):
            warnings.warn(
                f"a list of {self.size} values, as many as the batch has samples, goes to every "
                "device as a whole; if it has one for each sample, give a tensor, else a tuple",
                stacklevel=2,
            )

    def piece(self, start: int, stop: int) -> list[Any]:
        """The leaves with every batch dimension cut to ``start:stop``; views, not copies."""
        return [
            leaf if dim is None else narrow(leaf, dim, start, stop)
            for leaf, dim in zip(self.leaves, self.cut_dims, strict=True)
        ]


class Cut:
    """Which part of a batch each device has.

    Args:
        shares: samples for each device.
        means_apart: whether outputs that are means over the batch stay apart, one a device.

    Attributes:
        means_apart: whether they do.
        size: samples in all.
        parts: for each device that works (start, stop) of its part, in order.
        helpers: the devices that work but for the first of the team, which is device 0.
    """

    def __init__(self, shares: Sequence[int], *, means_apart: bool = False) -> None:
        self.means_apart = means_apart
        stops = list(accumulate(shares))
        self.size = stops[-1]
        self.parts = {
            device: (stop - share, stop)
            for device, (share, stop) in enumerate(zip(shares, stops, strict=True))
            if share
        }
        self.helpers = [device for device in self.parts if device != 0]

    @property
    def lead(self) -> int:
        """The first device that works."""
        return min(self.parts)

    def share(self, device: int) -> int:
        """The samples of a device."""
        start, stop = self.parts.get(device, (0, 0))
        return stop - start


def narrow(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """A part of a tensor along a dimension: a view, unless it would be less dense than the whole.

    A module may take the ``view`` of an input that it could take of the whole.
    """
    if dim == 0:
        return tensor[start:stop]
    part = tensor.narrow(dim, start, stop - start)
    return part.contiguous() if tensor.is_contiguous() else part


def _names(args: tuple[Any, ...], kwargs: dict[str, Any], num_leaves: int) -> list[str]:
    """How a user would call each leaf: ``args[0]``, ``kwargs['mask']``."""
    paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    if len(paths) != num_leaves:  # dataclasses: torch's paths end at them
        return [f"input {i}" for i in range(num_leaves)]
    return [
        re.sub(r"^\[(\d)\]", lambda m: ("args", "kwargs")[int(m[1])], pytree.keystr(path))
        for path in paths
    ]


# ------------------------------------------------------------------ outputs


@dataclass(frozen=True)
class TensorForm:
    """What the main process must know of a tensor that lies in a helper.

    Attributes:
        shape: its shape, with the device's share in the dimension of the batch.
        dtype: its dtype.
        differentiable: whether a gradient can flow back through it.
        dim: the dimension of the batch; None where there is none.
        lengths: of a joined tensor how long each device's part is in dimension 1, where that
            differs.
        is_summed: of a joined tensor whether it has one row for each device, to be summed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    dim: int | None = 0
    lengths: Mapping[int, int] | None = None
    is_summed: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def is_mean(self) -> bool:
        """Whether an output of this form stands for a mean over the batch."""
        has_no_batch = self.shape == () or self.dim is None
        return has_no_batch and (self.dtype.is_floating_point or self.dtype.is_complex)


def is_joinable(leaf: Any) -> bool:
    """Whether an output is a tensor that is concatenated or averaged."""
    return isinstance(leaf, Tensor) and (leaf.dim() > 0 or TensorForm.of(leaf).is_mean)


def check_outputs(
    outputs: Sequence[tuple[Structure, Sequence[Any]]],
    shares: Sequence[int],
    labels: Sequence[str],
    dims: Sequence[int | None],
) -> None:
    """Check that the outputs of the devices can be joined.

    Args:
        outputs: for each device its structure and its leaves, with tensors as ``TensorForm``.
        shares: the share of each.
        labels: the label of each, for messages.
        dims: for each leaf the dimension of the batch.

    Raises:
        BatchError: if structures, other dimensions, dtypes or values that must agree differ, a
            tensor has not the device's share in it, or was computed from a device's own mean.
    """
    structure, leaves = outputs[0]
    for number, operation in derived(structure).items() if len(outputs) > 1 else ():
        raise BatchError(
            f"output {number} was made by {operation} of an evener.Mean or evener.Sum of each "
            "device's own part, and cannot be joined; compute before, evener.Mean(2 * total, "
            "weight), or return the Mean itself and compute outside of the module"
        )
    uneven, one_each = ragged(structure), summed(structure)
    for (other_structure, other_leaves), label in zip(outputs[1:], labels[1:], strict=True):
        if other_structure != structure or len(other_leaves) != len(leaves):
            raise BatchError(
                f"the outputs of the devices differ in structure: {structure} on "
                f"{labels[0]}, {other_structure} on {label}; a parallel module must return "
                "the same structure for every part of a batch"
            )
    for i, first in enumerate(leaves):
        for (_, own_leaves), share, label in zip(outputs, shares, labels, strict=True):
            leaf = own_leaves[i]
            if i in one_each and (leaf.shape, leaf.dtype) != (first.shape, first.dtype):
                raise BatchError(
                    f"a total or weight (output {i}) is {first.shape[1:]}, {first.dtype} on "
                    f"{labels[0]} and {leaf.shape[1:]}, {leaf.dtype} on {label}; expected the same"
                )
            if isinstance(first, TensorForm) and isinstance(leaf, TensorForm):
                if i in uneven and len(leaf.shape) == len(first.shape):
                    leaf = replace(leaf, shape=(leaf.shape[0], *first.shape[1:2], *leaf.shape[2:]))
                about = (1 if i in one_each else share, label, labels[0])
                _check_tensor(i, dims[i], (leaf, first), about)
            elif not agree(leaf, first):
                raise BatchError(
                    f"output {i} differs among the devices: {_shown(first)} on {labels[0]}, "
                    f"{_shown(leaf)} on {label}; return it as a tensor with the batch in its "
                    "first dimension"
                )


def _shown(leaf: Any) -> str:
    return f"a tensor of {leaf.shape}" if isinstance(leaf, TensorForm) else repr(leaf)


def _check_tensor(
    i: int, dim: int | None, forms: tuple[TensorForm, TensorForm], about: tuple[int, str, str]
) -> None:
    (form, first), (share, label, first_label) = forms, about
    if dim is not None and form.shape[dim : dim + 1] not in ((share,), ()):
        raise BatchError(
            f"output {i} has the shape {form.shape} on {label}, whose share of the batch is "
            f"{share}; expected the batch in dimension {dim}, or a 0-dim mean over the batch; say "
            "with out_dims= of parallelize where the batch lies (None: nowhere), or transpose it "
            "inside the module"
        )
    one, other = list(form.shape), list(first.shape)
    if dim is not None and len(one) == len(other) and one:
        one[dim] = other[dim]
    if one != other:
        raise BatchError(
            f"output {i} has the shape {first.shape} on {first_label} and {form.shape} on "
            f"{label}; only the dimension of the batch may differ; pad to one length that does "
            "not depend on the part of the batch"
        )
    if form.dtype != first.dtype:
        raise BatchError(
            f"output {i} has the dtype {first.dtype} on {first_label} and {form.dtype} on {label}"
        )


def agree(one: Any, other: Any) -> bool:
    """Whether two devices mean the same value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        if bool(one == other):
            return True
    except Exception:  # noqa: BLE001, S110 - whatever a user's == does; numpy's gives an array
        pass
    try:  # not-a-numbers, arrays and objects without an == of their own
        data: bool = dumps(one) == dumps(other)
    except Exception:  # noqa: BLE001 - what cannot be told equal is not
        return False
    return data
