"""Leaves: the ends of nested inputs, outputs and attributes, and how a user calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from evener.contents import MAX_PARTS
from evener.distance import distance
from evener.pickling import COMPILE_NAME, dumps
from evener.watch import is_followed


def named_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Walk through inputs or outputs, as a user writes the way to each leaf.

    Example:
        >>> dict(named_leaves({"a": 1, "b": (2, [3])}))
        {"['a']": 1, "['b'][0]": 2, "['b'][1][0]": 3}
    """
    items: list[tuple[str, Any]]
    if isinstance(tree, dict):
        items = [(f"[{key!r}]", value) for key, value in tree.items()]
    elif is_dataclass(tree) and not isinstance(tree, type):
        items = [(f".{f.name}", getattr(tree, f.name, None)) for f in fields(tree)]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        items = [(f".{name}", getattr(tree, name)) for name in tree._fields]
    elif isinstance(tree, (tuple, list)):
        items = [(f"[{i}]", value) for i, value in enumerate(tree)]
    elif type(tree) in pytree.SUPPORTED_NODES:
        leaves, _ = pytree.tree_flatten(tree)
        items = [(f"<{i}>", leaf) for i, leaf in enumerate(leaves)]
    else:
        yield path, tree
        return
    for step, value in items:
        yield from named_leaves(value, path + step)


def named_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Walk through the plain attributes of all submodules, down to tensors, numbers and words."""
    for path, each in module.named_modules():
        for name, value in list(vars(each).items()):
            if name == "training" or not is_followed(0, name) or name == COMPILE_NAME:
                continue
            rest, seen = [(f"{path}.{name}".lstrip("."), value)], set[int]()
            while rest and len(seen) < MAX_PARTS:
                where, part = rest.pop()
                if _is_plain(part):
                    yield where, part
                    continue
                if isinstance(part, (nn.Module, type)) or callable(part) or id(part) in seen:
                    continue
                seen.add(id(part))
                if isinstance(part, dict):
                    rest += [(f"{where}[{key!r}]", inner) for key, inner in part.items()]
                elif isinstance(part, (list, tuple)):
                    rest += [(f"{where}[{i}]", inner) for i, inner in enumerate(part)]
                else:
                    own = getattr(part, "__dict__", {})
                    rest += [(f"{where}.{key}", inner) for key, inner in own.items()]


def _is_plain(value: Any) -> bool:
    known = (Tensor, int, float, complex, str, bytes, type(None))
    return isinstance(value, known) or type(value).__module__ == "numpy"


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same, bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype) or is_lazy(one):
            return False
        one, other = one.detach(), other.detach()
        return torch.equal(one, other) or distance(one, other) == 0
    if type(one) is not type(other):
        return False
    try:
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 - whatever its == does; NumPy's gives an array
        return dumps(one) == dumps(other)
