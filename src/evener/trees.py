"""Trees: nested tuples, lists, dicts, dataclasses and registered types, apart and together.

A tree is a flat list of leaves and a :class:`Structure`, which puts them together again and can be
sent to another process. It is torch's own notion (``torch.utils._pytree``), with one addition: a
dataclass, or a dict of a class of its own, that holds tensors is taken apart without having been
registered. A packed sequence is taken apart into what can be cut: the padded steps of each sample,
(batch, steps, ...), and its length. A mean or a sum over the batch (see :mod:`evener.reductions`)
is taken apart into what can be joined: one row of its total, and one of its weight.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from evener.errors import BatchError
from evener.pickling import dumps
from evener.reductions import Derived, Reduction, put_together, taken_apart


@dataclass(frozen=True)
class Structure:
    """What is left of a tree without its leaves.

    Attributes:
        spec: torch's own, in which a record is one leaf.
        records: for each leaf of ``spec`` the form of the record there, or None; empty where
            there is no record.
    """

    spec: Any
    records: tuple[Record | None, ...] = ()

    def __str__(self) -> str:
        records = [str(record) for record in self.records if record is not None]
        return " ".join(" with ".join([str(self.spec), *records]).split())


@dataclass(frozen=True)
class Record:
    """The form of an instance of a dataclass, of a subclass of dict, or of another kind above.

    Attributes:
        kind: its class.
        names: its fields, and further attributes; of a ``Derived`` the operation.
        keys: its keys, if it is a dict as well (as the outputs of Hugging Face's models are).
        below: the structure of the values of names and keys.
        num_leaves: how many leaves there are below.
    """

    kind: type
    names: tuple[str, ...]
    keys: tuple[Any, ...]
    below: Structure
    num_leaves: int

    def __str__(self) -> str:
        return f"{self.kind.__qualname__}({', '.join(self.names)}: {self.below})"


#: What is below the kinds that have no fields: a list of leaves.
_BELOW = {num: Structure(pytree.tree_flatten([0] * num)[1]) for num in (1, 2)}


def flatten(tree: Any, *, opens_reductions: bool = True) -> tuple[list[Any], Structure]:
    """Take a tree apart.

    Args:
        tree: the tree.
        opens_reductions: whether a mean or a sum is taken apart, and not a leaf. Default: yes.

    An instance of a dataclass, or of a subclass of dict, that holds a tensor somewhere is taken
    apart as well, although torch takes it for a leaf; one without a tensor stays a leaf, for it
    may be anything.

    Example:
        >>> leaves, structure = flatten({"a": 1, "b": (2, 3)})
        >>> leaves
        [1, 2, 3]
        >>> unflatten(structure, [leaf * 10 for leaf in leaves])
        {'a': 10, 'b': (20, 30)}
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_packed)  # it would be a named tuple
    if not any(_is_record(leaf) for leaf in leaves):
        return leaves, Structure(spec)
    flat: list[Any] = []
    records: list[Record | None] = []
    for leaf in leaves:
        if _is_packed(leaf):
            is_sorted = leaf.sorted_indices is None
            records.append(Record(PackedSequence, (), (is_sorted,), _BELOW[2], 2))
            flat.extend(pad_packed_sequence(leaf, batch_first=True))
            continue
        if isinstance(leaf, Reduction) and opens_reductions:
            kind, names, keys, parts = taken_apart(leaf)
            records.append(Record(kind, names, keys, _BELOW[len(parts)], len(parts)))
            flat.extend(parts)
            continue
        if _is_record(leaf) and not isinstance(leaf, Reduction):
            names = tuple(
                {f.name: None for f in _fields(leaf) if hasattr(leaf, f.name)}
                | dict.fromkeys(getattr(leaf, "__dict__", {}))
            )
            keys = tuple(leaf) if isinstance(leaf, dict) else ()
            values = [getattr(leaf, name) for name in names]
            try:
                items = [values, [leaf[key] for key in keys]]
                inner, below = flatten(items, opens_reductions=opens_reductions)
            except RecursionError as error:
                raise BatchError(
                    f"a {type(leaf).__qualname__} among inputs or outputs contains itself"
                ) from error
            if any(isinstance(value, Tensor) for value in inner):
                records.append(Record(type(leaf), names, keys, below, len(inner)))
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
        if issubclass(record.kind, Reduction):
            parts = [next(rest) for _ in range(record.num_leaves)]
            outer.append(put_together(record.kind, record.keys, parts))
            continue
        if record.kind is PackedSequence:
            outer.append(
                pack_padded_sequence(
                    next(rest), next(rest), batch_first=True, enforce_sorted=record.keys[0]
                )
            )
            continue
        values, items = unflatten(record.below, [next(rest) for _ in range(record.num_leaves)])
        # Not through __init__: it may take other arguments, and __post_init__ has run already.
        kind: Any = record.kind
        instance = kind.__new__(kind)
        for name, value in zip(record.names, values, strict=True):
            object.__setattr__(instance, name, value)
        for key, item in zip(record.keys, items, strict=True):
            setter = OrderedDict if isinstance(instance, OrderedDict) else dict
            setter.__setitem__(instance, key, item)
        outer.append(instance)
    return pytree.tree_unflatten(outer, structure.spec)


def ragged(structure: Structure) -> set[int]:
    """The numbers of the leaves whose dimension 1 may differ from part to part of a batch."""
    return {place for place, record in _records(structure) if record.kind is PackedSequence}


def summed(structure: Structure) -> set[int]:
    """The numbers of the leaves that have one row for each device, to be summed."""
    return {
        place + i
        for place, record in _records(structure)
        if issubclass(record.kind, Reduction) and record.kind is not Derived
        for i in range(record.num_leaves)
    }


def derived(structure: Structure) -> dict[int, str]:
    """The numbers of the leaves that were computed from a reduction, and by which operation."""
    found = _records(structure)
    return {place: record.names[0] for place, record in found if record.kind is Derived}


def _records(structure: Structure) -> Iterator[tuple[int, Record]]:
    """All records in a structure, each with the number of its first leaf."""
    place = 0
    for record in structure.records:
        if record is not None:
            yield place, record
            for number, below in _records(record.below):
                yield place + number, below
        place += 1 if record is None else record.num_leaves


def spread(prefix: Any, structure: Structure) -> list[Any] | None:
    """Give each leaf of a tree the value at which a tree that begins alike ends above it.

    Example:
        >>> structure = flatten((1, [2, 3]))[1]
        >>> spread((0, None), structure), spread((0, [1, 2]), structure), spread(5, structure)
        ([0, None, None], [0, 1, 2], [5, 5, 5])

    Returns:
        A value for each leaf; None where the trees do not begin alike.
    """
    values: list[Any] | None = pytree._broadcast_to_and_flatten(prefix, structure.spec)
    if values is None or not structure.records:
        return values
    return [
        _spread_in(record, value)
        for value, record in zip(values, structure.records, strict=True)
        for _ in range(1 if record is None else record.num_leaves)
    ]


def _spread_in(record: Record | None, value: Any) -> Any:
    """What holds in a record: the batch comes first, wherever it is in the tensors beside it."""
    if record is not None and issubclass(record.kind, Reduction) and record.kind is not Derived:
        return 0
    if record is not None and record.kind is PackedSequence and value is not None:
        return 0
    return value


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
    data: bytes = dumps((list(known.items()), plain))
    return data


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
        record
        and (record.kind, record.names, record.keys, _encode(record.below), record.num_leaves)
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
            record and Record(record[0], record[1], record[2], _decode(record[3]), record[4])
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
            yield from _kinds(record[3])


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)


def _is_record(leaf: Any) -> bool:
    if isinstance(leaf, (PackedSequence, Reduction)):
        return True
    # Dicts of the known classes are no leaves; what is left are dicts of classes of their own.
    return isinstance(leaf, dict) or (is_dataclass(leaf) and not isinstance(leaf, type))


def _fields(leaf: Any) -> tuple[Any, ...]:
    return fields(leaf) if is_dataclass(leaf) else ()
