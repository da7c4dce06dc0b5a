"""What the main process and a helper say to each other.

Tensors do not travel: a message says where in the arena they lie. Each request is answered by one
reply, a :class:`Failure` if the user's module raised::

    main process                                        helper
      Load        the module as bytes, where its parameters lie ──►
                                             ◄── Done   it has its replica
      Follow      changes in the module, for a device that rests ►
                                             ◄── Done
      Forward     piece 7: inputs, seed, settings, changes ──────►  runs the replica's forward
                                          ◄── Outputs   small ones with values, large ones without
      Write       where the large ones go ───────────────────────►  writes them
                                             ◄── Done
      Backward    piece 7: gradients of the outputs ─────────────►  runs backward
                                        ◄── Gradients   which parameters got one
      Reduce      which segment to sum (three devices or more) ──►  sums it
                                             ◄── Done
                                             ◄── Lost   in its place, if it has died in it
      Read        a parameter's name, where its values go ───────►  writes them as it has them
                                             ◄── Done
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evener import failure
from evener.arena import Place
from evener.batches import TensorForm, is_joinable
from evener.cells import Strip
from evener.exchange.gather import Room
from evener.keeper import Packed
from evener.pickling import dumps
from evener.piece import Settings
from evener.portions import Split
from evener.slots import Sum
from evener.update import Update

Failure = failure.Failure

#: Outputs up to this size travel in the message; it saves a round trip, which costs about as much.
INLINE_BYTES = 1 << 16


class Span(NamedTuple):
    """A region of the arena: its offset and its size, in bytes."""

    offset: int
    num_bytes: int


class Input(NamedTuple):
    """A tensor among the inputs of a piece."""

    place: Place
    wanted: bool  # a gradient with respect to it


class Output(NamedTuple):
    """A tensor among the outputs of a piece; a large one comes without values."""

    form: TensorForm
    values: bytearray | None


@dataclass
class Load:
    """Make a replica.

    Attributes:
        module: the module's bytes.
        layout: the places of its shared tensors from the start of a region; their gradients
            are laid out in the same way in regions of their own.
        shared: the region in which they lie.
        parameters: for each of them whether it is a ``Parameter``.
        requires_grad: for each of them whether a gradient is wanted.
        buffers: where the new values of its private buffers will lie.
        sys_path: where the user's program imports from.
        folder: the working directory of the user's program; None where it has none any more.
        keeps_pieces: whether the pieces that it holds are still needed.
    """

    module: bytes
    layout: list[Place]
    shared: Span
    parameters: list[bool]
    requires_grad: list[bool]
    buffers: list[Place]
    sys_path: list[str]
    folder: str | None
    keeps_pieces: bool = False


@dataclass
class Follow:
    """Follow what changed in the user's module, without a piece to run."""

    update: Update


@dataclass
class Forward:
    """Run a piece.

    Attributes:
        piece: its number.
        update: what changed in the module since the last message.
        structure: the bytes of its inputs' structure; None if as for the last piece.
        leaves: the leaves of its inputs, with each tensor as an ``Input``; bytes where a leaf is
            of a kind that only cloudpickle can send.
        span: the region in which the tensors lie.
        seed: what its random numbers start from.
        settings: the settings of the user's program.
        lead: whether this device's buffers and attributes become the user's afterwards, because
            the first device rests.
        split: how the piece is to be split, where it is too large for the device.
        deferred: whether only a backward is wanted, which will run the forward itself.
        meeting: where the devices meet, and the number of this one there; None if they do not.
        strip: the cells that the piece is computed in, if the batch has a grid.
    """

    piece: int
    update: Update
    structure: bytes | None
    leaves: list[Any] | bytes
    span: Span
    seed: int
    settings: Settings
    lead: bool
    split: Split | None = None
    deferred: bool = False
    meeting: tuple[Room, int] | None = None
    strip: Strip | None = None


@dataclass
class Write:
    """Write outputs of a piece to the arena.

    Attributes:
        piece: its number.
        places: for each joinable tensor among its outputs where it goes; None if it has come.
    """

    piece: int
    places: list[Place | None]


@dataclass
class Backward:
    """Run the backward of a piece.

    Attributes:
        piece: its number.
        gradients: for each joinable tensor among its outputs where its gradient lies, or None.
        target: the region for the gradients of the shared tensors, laid out as they are.
        inputs: where the gradients of the inputs that want one go.
        keep_graph: whether another backward may follow.
        settings: those of the user's program in the forward, with the flags as they are now.
        meeting: as for :class:`Forward`.
        slots: of a piece in cells, in place of ``target``, the regions for sums of gradients.
        common: then the places, from the start of such a region, for the gradients of inputs that
            all cells share, which are behind those of the shared tensors.
    """

    piece: int
    gradients: list[Place | None]
    target: Span
    inputs: list[Place | None]
    keep_graph: bool
    settings: Settings
    meeting: tuple[Room, int] | None = None
    slots: list[Span] = field(default_factory=list)
    common: list[Place] = field(default_factory=list)


@dataclass
class Reduce:
    """Sum one segment of all regions into the first."""

    regions: list[Span]
    segment: list[Place]


@dataclass
class Read:
    """Write the values of a parameter, as the replica has them, to a place."""

    name: str  # what ``named_parameters`` calls it
    place: Place


@dataclass
class Done:
    """A request was carried out."""


@dataclass
class Lost:
    """In the place of an answer: the device is gone, and its part of the sum is not finished."""


@dataclass
class Outputs:
    """The outputs of a piece.

    Attributes:
        structure: the bytes of their structure; None if as for the last piece.
        leaves: the leaves, with each joinable tensor as an ``Output``; bytes where a leaf is of
            a kind that only cloudpickle can send.
        changed: from the device that leads, attributes of the module that its forward changed.
        dirty: whether the forward has changed the inputs in the arena.
        changes: of a piece in cells, (level, number) in the tree and the changes of buffers.
    """

    structure: bytes | None
    leaves: list[Any] | bytes
    changed: Update | None = None
    dirty: bool = False
    changes: list[tuple[int, int, Packed]] = field(default_factory=list)


@dataclass
class Gradients:
    """What a backward gave.

    Attributes:
        present: for each shared tensor whether it got a gradient.
        inputs: for each input that wants one whether it got a gradient.
        others: gradients that have no place in the arena (sparse ones), by number of the tensor.
        sums: of a piece in cells, in place of ``present`` and ``others``, what is in its slots.
    """

    present: list[bool]
    inputs: list[bool]
    others: dict[int, bytes] = field(default_factory=dict)
    sums: list[Sum] = field(default_factory=list)


class Request(NamedTuple):
    """What the main process sends: a message, and pieces that are no longer needed."""

    message: Any
    dropped: list[int]


class Reply(NamedTuple):
    """What a helper sends: the answer, and pieces whose inputs it no longer reads.

    It began and ended in seconds of ``time.perf_counter``, on Linux one clock for all processes,
    and for ``waited_s`` of these it waited for other devices.
    """

    message: Any
    freed: list[int]
    start_s: float = 0.0
    end_s: float = 0.0
    waited_s: float = 0.0


#: Kinds of leaves that pickle sends well; all others are left to cloudpickle.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), Input, Output)


def outgoing(leaf: Any) -> Any:
    """An output as it travels."""
    if not is_joinable(leaf):
        return leaf.detach() if isinstance(leaf, Tensor) else leaf
    form = TensorForm.of(leaf)
    if leaf.nbytes > INLINE_BYTES:
        return Output(form, None)
    values = bytearray(leaf.nbytes)
    if values:
        flat = torch.frombuffer(values, dtype=leaf.dtype)
        flat.view(leaf.shape).copy_(leaf.detach())
    return Output(form, values)


def picklable(leaves: Sequence[Any]) -> list[Any] | bytes:
    """Leaves as a message can carry them: as they are, or as bytes if a kind needs cloudpickle."""
    leaves = list(leaves)
    return leaves if all(type(leaf) in _PLAIN for leaf in leaves) else dumps(leaves)


def unpicklable(leaves: list[Any] | bytes) -> list[Any]:
    """The opposite of :func:`picklable`."""
    if isinstance(leaves, bytes):
        leaves = pickle.loads(leaves)  # noqa: S301 - from a process of our own team
    return list(leaves)
