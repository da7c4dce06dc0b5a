"""Batches: cutting the inputs of a call by shares, and joining the outputs of the devices.

Inputs and outputs are trees: nested tuples, lists, dicts, dataclasses and what is registered with
``torch.utils._pytree``. A tree is a flat list of leaves and a :class:`Structure` that puts them
back together. What becomes of a leaf is decided by its form alone:

=====================  =========================  ===============================================
leaf                   as an input                as an output
=====================  =========================  ===============================================
tensor (batch, ...)    cut along dimension 0      concatenated along dimension 0
0-dim tensor, floats   given to every device      a mean over the batch: mean weighted by share
0-dim tensor, others   given to every device      must be equal on all devices
anything else          given to every device      must be equal on all devices
=====================  =========================  ===============================================

Weighting happens here and nowhere else: a concatenated output makes the gradient of any loss a plain
sum over the devices, and a weighted mean passes its weights on to the gradients by the chain rule.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evener.errors import BatchError

# ------------------------------------------------------------------ trees


@dataclass(frozen=True)
class Structure:
    """What is left of a tree without its leaves.

    Attributes:
        spec: torch's own, in which a dataclass is one leaf.
        records: for each leaf of ``spec`` the form of the dataclass there, or None; empty where
            there is no dataclass.
    """

    spec: Any
    records: tuple[Record | None, ...] = ()


@dataclass(frozen=True)
class Record:
    """The form of a dataclass instance: its class, its fields, and the structure below them."""

    kind: type
    names: tuple[str, ...]
    below: Structure
    num_leaves: int


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Take a tree apart.

    A dataclass instance that holds a tensor somewhere is taken apart as well, although torch takes
    it for a leaf; one without a tensor stays a leaf, for it may be anything.

    Example:
        >>> leaves, structure = flatten({"a": 1, "b": (2, 3)})
        >>> leaves
        [1, 2, 3]
        >>> unflatten(structure, [leaf * 10 for leaf in leaves])
        {'a': 10, 'b': (20, 30)}
    """
    leaves, spec = pytree.tree_flatten(tree)
    if not any(_is_record(leaf) for leaf in leaves):
        return leaves, Structure(spec)
    flat: list[Any] = []
    records: list[Record | None] = []
    for leaf in leaves:
        if _is_record(leaf):
            names = tuple(f.name for f in fields(leaf) if hasattr(leaf, f.name))
            inner, below = flatten([getattr(leaf, name) for name in names])
            if any(isinstance(value, Tensor) for value in inner):
                records.append(Record(type(leaf), names, below, len(inner)))
                flat.extend(inner)
                continue
        records.append(None)
        flat.append(leaf)
    return flat, Structure(spec, tuple(records))


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Put a tree together; the opposite of :func:`flatten`."""
    if not structure.records:
        return pytree.tree_unflatten(leaves, structure.spec)
    rest = iter(leaves)
    outer: list[Any] = []
    for record in structure.records:
        if record is None:
            outer.append(next(rest))
            continue
        values = unflatten(record.below, [next(rest) for _ in range(record.num_leaves)])
        # Not through __init__: it may take other arguments, and __post_init__ has run already.
        instance = object.__new__(record.kind)
        for name, value in zip(record.names, values, strict=True):
            object.__setattr__(instance, name, value)
        outer.append(instance)
    return pytree.tree_unflatten(outer, structure.spec)


def structure_to_bytes(structure: Structure) -> bytes:
    """Pickle a structure, together with what this process knows of the node types in it.

    A user's own type that was registered with ``torch.utils._pytree`` in the main program is not
    registered in another process until it is told how.
    """
    plain = _encode(structure)
    known = {
        kind: (node.flatten_fn, node.unflatten_fn)
        for kind in _kinds(plain)
        if (node := pytree.SUPPORTED_NODES.get(kind)) is not None
        and kind.__module__ not in ("builtins", "collections")
    }
    return cloudpickle.dumps((list(known.items()), plain))


def structure_from_bytes(data: bytes) -> Structure:
    """The opposite of :func:`structure_to_bytes`; registers what is not registered here."""
    known, plain = pickle.loads(data)  # noqa: S301 - from a process of our own team
    for kind, (flatten_fn, unflatten_fn) in known:
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(kind, flatten_fn, unflatten_fn)
    return _decode(plain)


# torch's specs are not made to be pickled; as nested tuples they are, in every version.


def _encode(structure: Structure) -> Any:
    def spec(node: Any) -> Any:
        if node.type is None:
            return None
        # Up to torch 2.8 the children are an attribute.
        children = node.children() if hasattr(node, "children") else node.children_specs
        return (node.type, node.context, [spec(child) for child in children])

    return spec(structure.spec), [
        record and (record.kind, record.names, _encode(record.below), record.num_leaves)
        for record in structure.records
    ]


def _decode(plain: Any) -> Structure:
    def spec(node: Any) -> Any:
        if node is None:
            return pytree.tree_flatten(0)[1]
        kind, context, children = node
        return pytree.TreeSpec(kind, context, [spec(child) for child in children])

    return Structure(
        spec(plain[0]),
        tuple(
            record and Record(record[0], record[1], _decode(record[2]), record[3])
            for record in plain[1]
        ),
    )


def _kinds(plain: Any) -> Iterator[type]:
    def below(node: Any) -> Iterator[type]:
        if node is not None:
            yield node[0]
            for child in node[2]:
                yield from below(child)

    yield from below(plain[0])
    for record in plain[1]:
        if record is not None:
            yield from _kinds(record[2])


def _is_record(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


# ------------------------------------------------------------------ inputs


class Batch:
    """The inputs of one call, ready to be cut.

    Attributes:
        leaves: the leaves of ``(args, kwargs)``.
        structure: their structure.
        size: number of samples; None where no input has a batch dimension.
        wanted: for each leaf whether a gradient with respect to it is wanted.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.structure = flatten((args, kwargs))
        self.wanted = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self.leaves]
        self.size: int | None = None
        for i, leaf in enumerate(self.leaves):
            if not has_batch(leaf):
                continue
            if self.size is None:
                self.size, first = leaf.shape[0], i
            elif leaf.shape[0] != self.size:
                names = _names(args, kwargs, len(self.leaves))
                raise BatchError(
                    f"the inputs do not have one batch size: {names[first]} has "
                    f"{tuple(self.leaves[first].shape)} and {names[i]} has {tuple(leaf.shape)}; "
                    "expected the same number in the first dimension of each tensor (a 0-dim "
                    "tensor or a number goes to every device as it is)"
                )

    def piece(self, start: int, stop: int) -> list[Any]:
        """The leaves with every batch dimension cut to ``start:stop``; views, not copies."""
        return [
            leaf[start:stop] if has_batch(leaf) else leaf
            for leaf in self.leaves
        ]


def has_batch(leaf: Any) -> bool:
    """Whether an input is a tensor that is cut along its first dimension."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _names(args: tuple[Any, ...], kwargs: dict[str, Any], num_leaves: int) -> list[str]:
    """How a user would call each leaf: ``args[0]``, ``kwargs['mask']``."""
    paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    if len(paths) != num_leaves:  # dataclasses: torch's paths end at them
        return [f"input {i}" for i in range(num_leaves)]
    return [("args", "kwargs")[path[0].idx] + pytree.keystr(path[1:]) for path in paths]


# ------------------------------------------------------------------ outputs


@dataclass(frozen=True)
class TensorForm:
    """What the main process must know of a tensor that lies in a helper.

    Attributes:
        shape: its shape, dimension 0 the device's share (or none at all).
        dtype: its dtype.
        differentiable: whether a gradient can flow back through it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def is_mean(self) -> bool:
        """Whether an output of this form stands for a mean over the batch."""
        return self.shape == () and (self.dtype.is_floating_point or self.dtype.is_complex)


def is_joinable(leaf: Any) -> bool:
    """Whether an output is a tensor that is concatenated or averaged."""
    return isinstance(leaf, Tensor) and (leaf.dim() > 0 or TensorForm.of(leaf).is_mean)


def check_outputs(
    outputs: Sequence[tuple[Structure, Sequence[Any]]],
    shares: Sequence[int],
    labels: Sequence[str],
) -> None:
    """Check that the outputs of the devices can be joined.

    Args:
        outputs: for each device its structure and its leaves, with tensors as ``TensorForm``.
        shares: the share of each.
        labels: the label of each, for messages.

    Raises:
        BatchError: if structures differ, a tensor's first dimension is not the device's share,
            the other dimensions or dtypes differ, or values that must agree do not.
    """
    structure, leaves = outputs[0]
    for (other_structure, other_leaves), label in zip(outputs[1:], labels[1:], strict=True):
        if other_structure != structure or len(other_leaves) != len(leaves):
            raise BatchError(
                f"the outputs of the devices differ in structure: {structure.spec} on {labels[0]}, "
                f"{other_structure.spec} on {label}; a parallel module must return the same "
                "structure for every part of a batch"
            )
    for i, first in enumerate(leaves):
        for (_, own_leaves), share, label in zip(outputs, shares, labels, strict=True):
            leaf = own_leaves[i]
            if isinstance(first, TensorForm) and isinstance(leaf, TensorForm):
                _check_tensor(i, leaf, first, (share, label, labels[0]))
            elif not _agree(leaf, first):
                raise BatchError(
                    f"output {i} differs among the devices: {first!r} on {labels[0]}, {leaf!r} on "
                    f"{label}; return it as a tensor with the batch in its first dimension"
                )


def _check_tensor(
    i: int, form: TensorForm, first: TensorForm, about: tuple[int, str, str]
) -> None:
    share, label, first_label = about
    if form.shape != () and form.shape[0] != share:
        raise BatchError(
            f"output {i} has the shape {form.shape} on {label}, whose share of the batch is "
            f"{share}; expected the batch in the first dimension, ({share}, ...), or a 0-dim mean "
            "over the batch; transpose it inside the module, or keep it out of the outputs"
        )
    if form.shape[1:] != first.shape[1:] or (form.shape == ()) != (first.shape == ()):
        raise BatchError(
            f"output {i} has the shape {first.shape} on {first_label} and {form.shape} on {label}; "
            "only the first dimension may differ; pad to one length that does not depend on the "
            "part of the batch"
        )
    if form.dtype != first.dtype:
        raise BatchError(
            f"output {i} has the dtype {first.dtype} on {first_label} and {form.dtype} on {label}"
        )


def _agree(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, ValueError, TypeError):  # an == that gives no truth value
        return False
