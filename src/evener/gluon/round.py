"""Round: one joint call for all shards of a batch, handed out shard by shard.

::

    joint call   all shards, each on its own device, at the same time
      take(0) ─► rows of shard 0 ─► the user's loss ─► backward ─► deliver(0) ┐
      take(1) ─► rows of shard 1 ─► the user's loss ─► backward ─► deliver(1) ┴─► joint backward

The graph of the joint call and those of the losses are apart. An autograd function at the head of
each shard's rows hands over the rows' gradients. When those of all shards that were handed out
are there, they are put together and one backward of the joint call runs, in the middle of the
last loss's own. So ``.grad`` gets the sum over the devices in one go, and hooks on parameters run
once, with the full gradient.

A shard that was not handed out yet may still come, as one may whose backward has not come when
others' must not wait any longer. The graph of the joint call is then kept, for another backward,
in which the gradients of the others are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener.batches import TensorForm
from evener.errors import EvenerError
from evener.gluon.pending import Pending
from evener.gluon.situation import Situation
from evener.piece import run_backward
from evener.reductions import Means
from evener.trees import Structure, flatten, unflatten


class Round:
    """The outputs of a joint call, and the gradients that come back.

    Args:
        module: the network.
        outputs: what it returned for the whole batch.
        shares: the samples of each shard.
        pending: where gradients wait.
        situation: how things are now.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Any,
        shares: Sequence[int],
        pending: Pending,
        situation: Situation,
    ) -> None:
        self._situation: Situation | None = situation
        self._module = module
        self._pending = pending
        self._shares = tuple(shares)
        self._working = [i for i, share in enumerate(shares) if share]
        self._leaves: list[Any] = [outputs]
        self._structure: Structure | None = None
        if type(outputs) is not Tensor:  # else the same, sooner
            self._leaves, self._structure = flatten(outputs)
        #: Those that a gradient flows back through, as they are in the joint graph.
        self._joint = list(filter(_flows, self._leaves))
        self._to_take = set(range(len(shares)))
        self._taken: set[int] = set()
        self._spent: set[int] = set()  # had a backward that keeps no graph
        self._due: set[int] = set()  # those whose gradients are waited for
        #: For each of the joint outputs its gradient, and whose part of it is there.
        self._gradients: dict[int, tuple[Tensor, set[int]]] = {}

    def offers(self, index: int, now: tuple[nn.Module, Sequence[Any], Sequence[Any]]) -> bool:
        """Whether the outputs of a shard are there, and right.

        Args:
            index: the shard.
            now: what :class:`Situation` compares.
        """
        return (
            index in self._to_take
            and self._situation is not None
            and self._situation.is_still(*now)
        )

    @property
    def is_over(self) -> bool:
        """Whether all outputs have been handed out."""
        return not self._to_take

    # -------------------------------------------------------------- handing out

    def take(self, index: int) -> Any:
        """What the network returns for a shard; once."""
        self._to_take.discard(index)
        if index not in self._working:
            leaves = [_empty(leaf) for leaf in self._leaves]
        elif len(self._working) == 1:  # it has all samples, and its outputs their own graph
            leaves = list(map(_whole, self._leaves))
        else:
            leaves = [self._part(leaf, index) for leaf in self._leaves]
            self._attach(leaves, index)
        if self.is_over:
            self._let_go()
        return leaves[0] if self._structure is None else unflatten(self._structure, leaves)

    def _part(self, leaf: Any, index: int) -> Any:
        """A shard's part of a leaf, without a graph. It is no view, for it is the user's."""
        tensor = _tensor(leaf)
        if tensor is None or tensor.dim() == 0:
            return leaf
        with torch.no_grad():
            part = tensor[self._place(leaf, index)]
        alias = torch.empty(0, dtype=part.dtype)
        return alias.set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())

    def _attach(self, leaves: list[Any], index: int) -> None:
        """Let gradients flow back from a shard's parts of the outputs, in place."""
        where = [i for i, leaf in enumerate(self._leaves) if _flows(leaf)]
        if not where:
            return
        self._taken.add(index)
        self._due.add(index)
        anchor = torch.empty(0, requires_grad=True)  # so that autograd has something to lead to
        parts = _Head.apply(self, index, [leaves[i] for i in where], anchor)  # type: ignore[no-untyped-call]
        for i, part in zip(where, parts, strict=True):
            leaves[i] = part

    def _let_go(self) -> None:
        """Keep of the joint outputs only their graph: the values are the user's."""
        self._situation = None
        self._leaves = []
        if len(self._working) == 1:
            self._joint = []
        for leaf in self._joint:
            tensor = _tensor(leaf)
            tensor.data = tensor.new_empty(()).expand(tensor.shape)

    # -------------------------------------------------------------- going back

    def deliver(self, index: int, gradients: Sequence[Tensor | None], *, keep_graph: bool) -> None:
        """The gradients of a shard's outputs have come.

        Args:
            index: the shard.
            gradients: one for each tensor that a gradient flows back through, or None.
            keep_graph: whether others may come for this shard.

        Raises:
            RuntimeError: if they came before, and the graph was not kept.
        """
        with self._pending.lock:
            if index in self._spent:
                raise RuntimeError(
                    "Trying to backward through the graph of a shard a second time; give "
                    "retain_graph=True to the first backward"
                )
            self._pending.forget_if_cleared()
            if not keep_graph:
                self._spent.add(index)
            self._collect(index, gradients)
            self._due.discard(index)
            if self._due:
                self._pending.add(self, self._module.parameters())
            else:
                self.run()

    def run(self) -> None:
        """Run the joint backward with what has come."""
        self._pending.remove(self)
        gradients, self._gradients = self._gradients, {}
        if not self._due:  # all have come; who keeps its graph may come again
            self._due = self._taken - self._spent
        for number, (joined, there) in gradients.items():
            for index in set(self._working) - there:
                joined[self._place(self._joint[number], index)] = 0
        keep_graph = bool(set(self._working) & self._to_take or self._taken - self._spent)
        try:
            if gradients:
                roots = [_tensor(self._joint[number]) for number in gradients]
                joint = [joined for joined, _ in gradients.values()]
                run_backward(roots, joint, keep_graph=keep_graph)
        except BaseException:
            self._spent, keep_graph = set(self._working), False
            raise
        finally:
            if not keep_graph:
                self._joint = []
            self._pending.ran()

    def drop(self) -> None:
        """Forget the gradients that have come."""
        self._pending.remove(self)
        self._gradients = {}

    def _collect(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy a shard's gradients to their places; what has come there before is added to."""
        for number, (leaf, gradient) in enumerate(zip(self._joint, gradients, strict=True)):
            if gradient is None:
                continue
            if number not in self._gradients:
                self._gradients[number] = torch.empty_like(_tensor(leaf)), set()
            joined, there = self._gradients[number]
            place = self._place(leaf, index)
            if index in there:
                joined[place] += gradient
            else:
                joined[place] = gradient
                there.add(index)

    def _place(self, leaf: Any, index: int) -> int | slice:
        """Where a shard's part of a joint output is."""
        if isinstance(leaf, Means):
            return self._working.index(index)
        start = sum(self._shares[:index])
        return slice(start, start + self._shares[index])


class _Head(torch.autograd.Function):
    """Hands over the gradients of a shard's outputs."""

    @staticmethod
    def forward(
        ctx: Any, round_: Round, index: int, parts: list[Tensor], _anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.round, ctx.index = round_, index
        ctx.set_materialize_grads(False)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise EvenerError(
                "create_graph=True through a parallel module is not possible: its devices' graphs "
                "are in several processes; evener.release(module) for second derivatives"
            )
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.round.deliver(ctx.index, gradients, keep_graph=keep_graph)
        return None, None, None, None


def _tensor(leaf: Any) -> Any:
    """The tensor of a leaf of joint outputs; None where there is none."""
    if isinstance(leaf, Means):
        return leaf.values
    return leaf if isinstance(leaf, Tensor) else None


def _flows(leaf: Any) -> bool:
    tensor = _tensor(leaf)
    return tensor is not None and tensor.requires_grad


def only(outputs: Any) -> Any:
    """Outputs of one device alone, with a mean as it is."""
    leaves, structure = flatten(outputs)
    return unflatten(structure, map(_whole, leaves))


def _whole(leaf: Any) -> Any:
    return leaf.values[0] if isinstance(leaf, Means) else leaf


def _empty(leaf: Any) -> Any:
    """What the network returns for no samples, where others have some."""
    tensor = _tensor(leaf)
    if tensor is None or (tensor.dim() == 0 and not TensorForm.of(tensor).is_mean):
        return leaf
    if isinstance(leaf, Means):  # the mean over nothing
        empty = torch.full(tensor.shape[1:], leaf.empty, dtype=tensor.dtype)
    elif tensor.dim() == 0:
        empty = torch.full((), torch.nan, dtype=tensor.dtype)
    else:
        empty = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
    return empty.requires_grad_().clone() if tensor.requires_grad else empty
