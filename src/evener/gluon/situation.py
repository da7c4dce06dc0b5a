"""Situation: what must be the same when a network is given the next shard of a batch.

The outputs of all shards are computed when the first of them is given. For the others they are
right only as long as nothing has changed that they depend on: the values of the batch, the other
arguments, the network's parameters, buffers and attributes, and the settings of the program.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from evener.gluon.split import Shard, has_batch
from evener.piece import Settings

_values = dict.values
#: Arguments of these types are compared by their values, others by their identity.
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


class Situation:
    """How things are after a joint call.

    Args:
        module: the network.
        leaves: the leaves of its arguments.
        shards: for each leaf its note, or None.
    """

    def __init__(
        self, module: nn.Module, leaves: Sequence[Any], shards: Sequence[Shard | None]
    ) -> None:
        self._settings = Settings.current()
        self._held = [leaf for leaf in leaves if not has_batch(leaf)]  # else an id could be reused
        self._arguments = _arguments(leaves, shards)
        # An inference tensor does not count its changes: only its values tell.
        sources = [shard.split.source for shard in shards if shard is not None]
        self._copies = [s.clone() if s.is_inference() else None for s in sources]
        # All that hangs on the module and its submodules: modes, attributes, parameters, buffers.
        dicts = [vars(m) for m in module.modules()]
        parts = [d[name] for d in dicts for name in ("_parameters", "_buffers", "_modules")]
        self._places = [*dicts, *parts]
        self._objects = self._objects_now()
        self._tensors = [o for o in self._objects if isinstance(o, Tensor)]
        self._versions = list(map(_version, self._tensors))
        self._module = module

    def is_still(
        self, module: nn.Module, leaves: Sequence[Any], shards: Sequence[Shard | None]
    ) -> bool:
        """Whether the outputs of these shards are those that were computed."""
        objects = self._objects_now()
        return (
            module is self._module
            and self._arguments == _arguments(leaves, shards)
            and self._settings == Settings.current()
            and len(self._objects) == len(objects)
            and all(map(is_, self._objects, objects))
            and self._versions == list(map(_version, self._tensors))
            and self._have_values(shard for shard in shards if shard is not None)
        )

    def _objects_now(self) -> list[Any]:
        """The objects themselves, so that none of them can go and another take its identity."""
        return [*chain.from_iterable(map(_values, self._places))]

    def _have_values(self, shards: Iterable[Shard]) -> bool:
        """Whether shards of inference tensors have the values that they had."""
        return all(
            copy is None or torch.equal(copy[rows := shard.rows], shard.split.source[rows])
            for copy, shard in zip(self._copies, shards, strict=True)
        )


def _arguments(leaves: Sequence[Any], shards: Sequence[Shard | None]) -> list[tuple[Any, Any]]:
    """What arguments are compared by: plain values, others' identities and changes."""
    found: list[tuple[Any, Any]] = []
    for leaf, shard in zip(leaves, shards, strict=True):
        if shard is not None:  # weakly: what was computed is kept in the split
            source = shard.split.source
            changes = 0 if source.is_inference() else source._version
            found.append((weakref.ref(shard.split), changes))
        elif type(leaf) in _PLAIN:
            found.append((type(leaf), leaf))
        elif isinstance(leaf, Tensor):  # 0-dim
            found.append((id(leaf), leaf.item() if leaf.is_inference() else leaf._version))
        else:
            found.append((id(leaf), 0))
    return found


def _version(tensor: Tensor) -> int:
    """Counts the changes of a tensor; an inference tensor does not count: never alike."""
    return -time.monotonic_ns() if tensor.is_inference() else tensor._version
