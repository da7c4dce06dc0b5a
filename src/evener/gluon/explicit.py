"""Explicit: what a network does that is given one shard after the other.

::

    net(xs[0])   a shard? its batch is found by its note     ──► one joint call for all shards
                                                                 │ rows of 0
    net(xs[1])   its rows are there, and nothing has changed ◄───┘ rows of 1

Nothing is put off: the outputs that are returned are computed. A call whose inputs are no shards
is the call as :func:`evener.parallelize` makes it, on all devices. Shards that require a gradient
themselves are computed one after the other, each on its own device, in an ordinary graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evener.data_parallel import DataWay
from evener.errors import BatchError, NotOnDeviceError
from evener.gluon.pending import Pending
from evener.gluon.round import Round, only
from evener.gluon.situation import Situation
from evener.gluon.split import Shard, Split, has_batch
from evener.trees import Structure, flatten, unflatten

#: Of how many batches outputs are kept for shards that the network was not given yet. A network
#: may be called with shards of two batches in turns (``net(a), net(b)`` for each device).
NUM_KEPT = 8


class _Given(NamedTuple):
    """Arguments among which there are shards.

    Attributes:
        leaves: their leaves.
        structure: their structure; None for one tensor.
        shards: for each leaf its note, or None.
        first: the first of these.
    """

    leaves: list[Any]
    structure: Structure | None
    shards: list[Shard | None]
    first: Shard


class Explicit:
    """Answers the calls of one network.

    Args:
        way: runs them on the devices.
        labels: the labels of the devices, in order.

    Attributes:
        pending: the gradients that wait.
    """

    def __init__(self, way: DataWay, labels: Sequence[str]) -> None:
        self.pending = Pending()
        self._way = way
        self._labels = tuple(labels)
        self._recent: deque[weakref.ref[Split]] = deque()

    def flush(self) -> None:
        """Run the backward of the gradients that wait; see :meth:`Pending.flush`."""
        with self.pending.lock:
            self.pending.flush()

    def call_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """What to call with these arguments in the place of :meth:`DataWay.call`."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # the same, sooner
            leaves, structure = [args[0]], None
        else:
            leaves, structure = flatten((args, kwargs), opens_reductions=False)
        shards = [Shard.of(leaf) if has_batch(leaf) else None for leaf in leaves]
        first = next(filter(None, shards), None)
        if first is None or not _belong_together(leaves, shards, first):
            return self._way.call
        return partial(self._call, _Given(leaves, structure, shards, first))

    def _call(
        self,
        given: _Given,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """As :meth:`DataWay.call`, with shards."""
        if self._way.is_plain(module):
            return forward(*args, **kwargs)
        leaves, structure, shards, first = given
        split, index = first.split, first.index
        places = self._places(split)
        if places != sorted(places) or _require_gradients(leaves):
            shares = self._spread(places[index : index + 1], split.shares[index : index + 1])
            return only(self._way.call(module, forward, args, kwargs, shares=shares))
        with self.pending.lock:
            round_: Round | None = split.rounds.get(self)
            if round_ is None or not round_.offers(index, (module, leaves, shards)):
                if torch.is_grad_enabled():
                    self.pending.flush()
                whole = [
                    leaf if shard is None else shard.split.source
                    for leaf, shard in zip(leaves, shards, strict=True)
                ]
                args, kwargs = (whole, {}) if structure is None else unflatten(structure, whole)
                shares = self._spread(places, split.shares)
                outputs = self._way.call(module, forward, tuple(args), kwargs, shares=shares)
                situation = Situation(module, leaves, shards)
                round_ = Round(module, outputs, split.shares, self.pending, situation)
                self._keep(split, round_)
            outputs = round_.take(index)
            if round_.is_over:
                split.rounds.pop(self, None)
            return outputs

    def _places(self, split: Split) -> list[int]:
        """Where the devices of a split are among the network's."""
        if split.batch_axis != 0:
            raise BatchError(
                f"a shard that was split along axis {split.batch_axis}: the devices of a network "
                "share batches along the first dimension; move it there, "
                f"split_and_load(data.movedim({split.batch_axis}, 0), devices), and back inside "
                "the network"
            )
        missing = [label for label in split.labels if label not in self._labels]
        if missing:
            raise NotOnDeviceError(
                f"a shard of a batch that was split among {', '.join(split.labels)} for a network "
                f"that is not on {', '.join(missing)}, only on {', '.join(self._labels)}; split "
                "among these, or evener.gluon.initialize(net, devices=..., force_reinit=True)"
            )
        return [self._labels.index(label) for label in split.labels]

    def _spread(self, places: Sequence[int], shares: Sequence[int]) -> list[int]:
        """Shares of some devices as shares of all."""
        spread = [0] * len(self._labels)
        for place, share in zip(places, shares, strict=True):
            spread[place] = share
        return spread

    def _keep(self, split: Split, round_: Round) -> None:
        """Keep a round as long as its shards live, and not too many of them."""
        split.rounds[self] = round_
        self._recent.append(weakref.ref(split))
        if len(self._recent) > NUM_KEPT:
            oldest = self._recent.popleft()()
            if oldest is not None and oldest is not split:
                oldest.rounds.pop(self, None)


def _belong_together(leaves: Sequence[Any], shards: Sequence[Shard | None], first: Shard) -> bool:
    """Whether all inputs with a batch are the same shard, of batches that were split alike."""
    return sum(first.split.shares) > 0 and all(
        not has_batch(leaf)
        if shard is None
        else shard.index == first.index
        and shard.split.shares == first.split.shares
        and shard.split.labels == first.split.labels
        and shard.split.batch_axis == first.split.batch_axis
        for leaf, shard in zip(leaves, shards, strict=True)
    )


def _require_gradients(leaves: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    )
