"""Parts: nested inputs cut into one part for each device, nested outputs joined.

A nest is a tuple, list, dict, named tuple, dataclass or a type registered with torch's pytree, or
a subclass of these, with others in it; all else is a leaf. (:mod:`evener.trees` leaves subclasses
of dicts and lists alone; torch's own functions open them, so these do.)
"""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.parallel as torchs
from torch import Tensor
from torch.nn.parallel.scatter_gather import scatter_kwargs as _torchs_scatter_kwargs
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from evener.batches import TensorForm, agree, check_outputs, narrow
from evener.devices import DevicesSpec
from evener.errors import BatchError
from evener.parallel_functions.places import on_cpu, places_of, torch_devices
from evener.reductions import Reduction
from evener.shares import share_out
from evener.trees import flatten, unflatten

# torch's own, as they are now: `evener run` puts ours in their place.
_torchs_scatter, _torchs_gather = torchs.scatter, torchs.gather


def scatter(inputs: Any, target_gpus: DevicesSpec, dim: int = 0) -> Sequence[Any]:
    """Cut the tensors in nested inputs into one near-equal part for each device.

    Args:
        inputs: a tensor, or tuples, lists, dicts, named tuples and dataclasses with tensors or
            packed sequences.
        target_gpus: the devices, as in :func:`evener.devices`; one may be given twice.
        dim: the dimension that is cut. In a packed sequence it is that of the sequences.

    Returns:
        One part for each device, but no more than there are samples (at least one). A tuple for a
        tensor, else a list. Each part is nested as the inputs are. Tensors are views on CPU
        devices; 0-dim tensors and other objects are in every part.

    Raises:
        DeviceError: if a device is not there, or if CPU and accelerators are mixed.
        BatchError: if a tensor has no such dimension or is not dense, or if tensors give
            different numbers of parts.

    Example:
        >>> [part.shape[0] for part in scatter(torch.ones(5, 2), "cpu*2")]
        [3, 2]
        >>> scatter({"x": torch.tensor([7]), "name": "a"}, "cpu*2")
        [{'x': tensor([7]), 'name': 'a'}]
    """
    places = places_of(target_gpus)
    if not on_cpu(places):
        return cast("Sequence[Any]", _torchs_scatter(inputs, torch_devices(places), dim))
    counts: dict[int, tuple[int, ...]] = {}
    for leaf in leaves_of(inputs):
        shape = _shape(leaf, dim)
        if shape is not None:
            size = shape[0] if isinstance(leaf, PackedSequence) else shape[dim]
            counts.setdefault(max(1, min(size, len(places))), shape)
    if len(counts) > 1:
        (one, shape), (other, other_shape) = list(counts.items())[:2]
        raise BatchError(
            f"a tensor of shape {shape} gives {one} parts along dimension {dim}, one of "
            f"{other_shape} gives {other}; expected one batch size, and 0-dim tensors or other "
            "objects for what every device gets as it is"
        )
    num_parts = next(iter(counts), len(places))

    def part(i: int) -> Any:
        def cut(leaf: Any) -> Any:
            if isinstance(leaf, PackedSequence):
                padded, lengths = pad_packed_sequence(leaf, batch_first=True)
                return _packed(cut_along(padded, 0), cut_along(lengths, 0))
            is_cut = isinstance(leaf, Tensor) and leaf.dim()
            return cut_along(leaf, dim).to("cpu") if is_cut else leaf

        def cut_along(tensor: Tensor, dim: int) -> Tensor:
            shares = share_out(tensor.shape[dim], [1] * num_parts)
            start = sum(shares[:i])
            return narrow(tensor, dim, start, start + shares[i])

        return _mapped(cut, inputs)

    parts = [part(i) for i in range(num_parts)]
    return tuple(parts) if isinstance(inputs, Tensor) else parts


def scatter_kwargs(
    inputs: tuple[Any, ...] | None,
    kwargs: dict[str, Any] | None,
    target_gpus: DevicesSpec,
    dim: int = 0,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Cut positional and keyword arguments as :func:`scatter` does, both into as many parts.

    Returns:
        The positional and the keyword arguments of each part; none if there are no arguments.

    Raises:
        DeviceError: as :func:`scatter`.
        BatchError: as :func:`scatter`.
    """
    places = places_of(target_gpus)
    if not on_cpu(places):
        ids = torch_devices(places)
        found = _torchs_scatter_kwargs(inputs or (), kwargs, ids, dim)
        return cast("tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]", found)
    if not inputs and not kwargs:
        return (), ()
    parts = scatter((tuple(inputs or ()), kwargs or {}), places, dim)
    return tuple(part[0] for part in parts), tuple(part[1] for part in parts)


def _shape(leaf: Any, dim: int) -> tuple[int, ...] | None:
    """The shape of what is cut; None for what is not."""
    if isinstance(leaf, PackedSequence):
        return (int(leaf.batch_sizes[0]),)
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return None
    shape = tuple(leaf.shape)
    if leaf.layout != torch.strided:
        raise BatchError(f"a tensor of layout {leaf.layout} cannot be cut; give a dense one")
    if not -leaf.dim() <= dim < leaf.dim():
        raise BatchError(
            f"a tensor of shape {shape} cannot be cut along dimension {dim}; expected "
            f"{-leaf.dim()} to {leaf.dim() - 1}"
        )
    return shape


def _packed(padded: Tensor, lengths: Tensor) -> PackedSequence:
    is_sorted = bool((lengths[:-1] >= lengths[1:]).all())
    return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=is_sorted)


def gather(outputs: Sequence[Any], target_device: Any = None, dim: int = 0) -> Any:
    """Join what the replicas returned.

    Args:
        outputs: what each returned, nested alike: tensors, packed sequences, None, strings and
            numbers, and tuples, lists, dicts, named tuples and dataclasses of them.
        target_device: where outputs on accelerators go. CPU tensors stay.
        dim: the dimension along which tensors are concatenated.

    Returns:
        The same nest. Tensors are concatenated; 0-dim ones become a vector with one entry for each
        replica (with a warning, as in torch); an ``evener.Mean`` or ``Sum`` becomes that over all
        replicas. What is no tensor must be the same on all.

    Raises:
        BatchError: if outputs are nested differently, their shapes do not fit, or values that are
            no tensors differ.

    Example:
        >>> gather([{"y": torch.ones(2, 1), "n": 3}, {"y": torch.zeros(1, 1), "n": 3}])
        {'y': tensor([[1.],
                [1.],
                [0.]]), 'n': 3}
    """
    outputs = list(outputs)
    if not outputs:
        raise BatchError("there is no output to join; expected one for each replica")
    if any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves_of(outputs)):
        return _torchs_gather(outputs, target_device, dim)
    return _joined(outputs, dim, "the output")


def _joined(values: Sequence[Any], dim: int, where: str) -> Any:
    first = values[0]
    if any(isinstance(value, Reduction) for value in values):
        return _joined_reductions(values)
    if all(isinstance(value, Tensor) for value in values):
        return _joined_tensors(values, dim, where)
    if all(isinstance(value, PackedSequence) for value in values):
        length = max(len(value.batch_sizes) for value in values)
        each = [pad_packed_sequence(v, batch_first=True, total_length=length) for v in values]
        padded, lengths = ([one[i] for one in each] for i in (0, 1))
        return _packed(_joined_tensors(padded, 0, where), torch.cat(lengths))
    opened = [_opened(value) for value in values]
    if opened[0] is None:
        for i, value in enumerate(values):
            if not agree(value, first):
                raise BatchError(
                    f"{where} differs among the replicas: {first!r} from the first, {value!r} "
                    f"from replica {i}; expected the same on all, or a tensor with the batch"
                )
        return first
    keys, _, remake = opened[0]
    by_key = [dict(zip(one[0], one[1], strict=True)) if one else {} for one in opened]
    for i, (value, items) in enumerate(zip(values, by_key, strict=True)):
        if type(value) is not type(first) or items.keys() != by_key[0].keys():
            raise BatchError(
                f"{where} is not nested alike on all replicas: {type(first).__name__} with "
                f"{keys} from the first, {type(value).__name__} with {list(items)} from "
                f"replica {i}"
            )
    return remake(
        [_joined([items[key] for items in by_key], dim, f"{where}[{key!r}]") for key in keys]
    )


def _joined_reductions(values: Sequence[Any]) -> Any:
    """The mean or the sum over all replicas, as a plain tensor."""
    answers = [(structure, leaves) for leaves, structure in map(flatten, values)]
    forms = [
        (structure, [TensorForm.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        for structure, leaves in answers
    ]
    labels = [f"replica {i}" for i in range(len(values))]
    check_outputs(forms, [1] * len(values), labels, [0] * len(answers[0][1]))
    parts = zip(*(leaves for _, leaves in answers), strict=True)
    return unflatten(
        answers[0][0], [torch.cat(each) if len(each) > 1 else each[0] for each in parts]
    )


def _joined_tensors(tensors: Sequence[Tensor], dim: int, where: str) -> Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        # torch's words: programs that have turned its warning off find ours by them.
        warnings.warn(
            f"Was asked to gather along dimension {dim}, but all input tensors were scalars; will "
            "instead unsqueeze and return a vector.",
            stacklevel=2,
        )
        return torch.stack(list(tensors))
    try:
        return torch.cat(list(tensors), dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise BatchError(
            f"{where} cannot be joined along dimension {dim}: the shapes are {shapes}; expected "
            "such that differ in that dimension only"
        ) from error


# ------------------------------------------------------------------ nests


def leaves_of(nest: Any) -> Iterator[Any]:
    """The leaves of a nest, in order."""
    opened = _opened(nest)
    if opened is None:
        yield nest
        return
    for item in opened[1]:
        yield from leaves_of(item)


def _mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """Another nest, with what a function makes of each leaf."""
    opened = _opened(nest)
    if opened is None:
        return function(nest)
    _, items, remake = opened
    return remake([_mapped(function, item) for item in items])


def _opened(nest: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """What is in a nest, by which keys, and how another is made like it; None for a leaf."""
    if isinstance(nest, (Tensor, PackedSequence)):
        return None
    if isinstance(nest, (dict, UserDict)) and not is_dataclass(nest):
        keys = list(nest)

        def remake(items: list[Any]) -> Any:
            made = copy.copy(nest)  # a default factory, and what a subclass has besides, stay
            made.update(zip(keys, items, strict=True))
            return made

        return keys, [nest[key] for key in keys], remake
    if isinstance(nest, (list, tuple)):
        kind: Any = type(nest)
        return list(range(len(nest))), list(nest), getattr(kind, "_make", kind)
    leaves, structure = flatten(nest, opens_reductions=False)
    if len(leaves) == 1 and leaves[0] is nest:
        return None
    return list(range(len(leaves))), leaves, partial(unflatten, structure)
