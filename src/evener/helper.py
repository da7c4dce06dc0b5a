"""A helper: what drives one further device of a team, and what it does with each message.

It holds a replica of the user's module and, between a forward and its backward, its pieces with
their part of the autograd graph. As a rule it is in a process of its own (see ``process``); as a
guest it works in the main process, for a device that cannot (see ``deputy``).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import Arena, Place, Region, moved
from evener.batches import is_joinable
from evener.batchnorm import over_all
from evener.cells import Cells
from evener.collector import Collector
from evener.compiling import Compiler
from evener.exchange import host
from evener.exchange.gather import Gather, Room
from evener.keeper import pack
from evener.piece import Piece, own_saved_tensors, run_backward, seed_others, set_flags
from evener.portions import Portions
from evener.replica import complete_main, from_bytes, private_buffers
from evener.slots import Slots, Sum
from evener.trees import Structure, structure_from_bytes, structure_to_bytes
from evener.update import Update
from evener.watch import Watch

#: Tells the code of the user's program that it runs in a helper, by the helper's process number.
HELPER_VARIABLE = "EVENER_HELPER"


class Helper:
    """What a helper knows, and what it does with each message.

    Args:
        arena: the team's arena.
        is_guest: whether it works in the main process, where it changes nothing but what it is
            told to, and an interrupt is the user's. Default: no.
    """

    def __init__(self, arena: Arena, *, is_guest: bool = False) -> None:
        self._arena = arena
        self._is_guest = is_guest
        self._whole = arena.whole
        # The replica.
        self._module = nn.Module()
        self._modules: list[nn.Module] = []
        self._compiler = Compiler()
        self._shared: list[Tensor] = []
        self._layout: list[Place] = []
        self._buffers: list[Tensor] = []
        self._is_seeded = False
        # The pieces, and the regions of their inputs until nothing reads them any more.
        self._pieces: dict[int, Piece] = {}
        self._regions: dict[int, Region] = {}
        self._structure: Structure | None = None
        self._sent_structure: Structure | None = None
        self._collector = Collector(arena.whole)

    def answer(self, request: messages.Request) -> messages.Reply:
        """Carry out a request. What the user's module raises becomes a ``Failure``."""
        start_s = time.perf_counter()
        for number in request.dropped:
            self._pieces.pop(number, None)
        actions: dict[type, Callable[[Any], Any]] = {
            messages.Load: self._load,
            messages.Follow: self._follow,
            messages.Forward: self._forward,
            messages.Write: self._write,
            messages.Backward: self._backward,
            messages.Reduce: self._reduce,
            messages.Read: self._read,
        }
        message = request.message
        gather = self._gather(getattr(message, "meeting", None))
        try:
            with over_all(gather, self._modules):
                reply = actions[type(message)](message)
        except BaseException as error:
            if self._is_guest and not isinstance(error, Exception):
                raise
            self._pieces.pop(getattr(message, "piece", -1), None)
            reply = messages.Failure.of(error)
        if isinstance(reply, messages.Failure) and reply.is_memory:
            gc.collect()  # what the traceback has held, for a smaller attempt
        freed = [number for number, region in self._regions.items() if not region.in_use]
        for number in freed:
            del self._regions[number]
        waited_s = 0.0 if gather is None else gather.waited_s
        return messages.Reply(reply, freed, start_s, time.perf_counter(), waited_s)

    def _gather(self, meeting: tuple[Room, int] | None) -> Gather | None:
        if meeting is None:
            return None
        room, index = meeting
        return Gather(self._arena.region(room.offset, room.num_bytes), room, index)

    def _load(self, message: messages.Load) -> messages.Done:
        if not self._is_guest:
            sys.path[:] = message.sys_path
            if message.folder is not None:
                os.chdir(message.folder)
        if not message.keeps_pieces:
            self._pieces.clear()
        self._layout = message.layout
        self._shared = [
            nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            for is_parameter, tensor in zip(
                message.parameters,
                map(self._whole.tensor, moved(message.layout, message.shared.offset)),
                strict=True,
            )
        ]
        for i, tensor in enumerate(self._shared):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_()
                tensor.register_post_accumulate_grad_hook(self._collector.hook(i))  # type: ignore[no-untyped-call]
            tensor.requires_grad_(message.requires_grad[i])
        self._buffers = [self._whole.tensor(place) for place in message.buffers]
        self._module = from_bytes(message.module, self._shared)
        self._modules = list(self._module.modules())
        self._compiler = Compiler()
        self._is_seeded = self._is_guest
        if not self._is_guest:
            complete_main(self._module)
            # What is there now will stay: the garbage collector need not look at it each time.
            gc.freeze()
        return messages.Done()

    def _follow(self, message: messages.Follow) -> messages.Done:
        self._apply(message.update)
        return messages.Done()

    def _apply(self, update: Update) -> None:
        update.apply(self._modules, self._shared, self._whole.tensor)

    def _forward(self, message: messages.Forward) -> messages.Outputs:
        if message.structure is not None:
            self._structure = structure_from_bytes(message.structure)
        assert self._structure is not None  # noqa: S101 - the first message brings it
        self._apply(message.update)
        leaves = messages.unpicklable(message.leaves)
        region = self._regions[message.piece] = self._arena.region(*message.span)
        with message.settings.applied(), self._own_hooks():
            inputs = [
                region.tensor(leaf.place) if isinstance(leaf, messages.Input) else leaf
                for leaf in leaves
            ]
            wanted = [isinstance(leaf, messages.Input) and leaf.wanted for leaf in leaves]
            grad = message.settings.grad
            given = (inputs, wanted, self._structure, message.seed)
            piece: Piece
            if message.strip is not None:
                piece = Cells(
                    inputs,
                    wanted,
                    self._structure,
                    message.strip,
                    self._module,
                    grad=grad,
                    is_frugal=message.split is not None,
                )
            elif message.split is not None:
                piece = Portions(*given, grad=grad, split=message.split)
            else:
                piece = Piece(*given, grad=grad)
            if message.deferred:
                self._pieces[message.piece] = piece
                return messages.Outputs(None, [])
            watch = Watch(self._module, self._shared) if message.lead else None
            if not self._is_seeded:
                seed_others(message.seed)
                self._is_seeded = True
            structure = piece.forward(self._function())
        changed = None
        if watch is not None:
            watch.is_stale()
            changed = watch.update()
            own = private_buffers(self._module).values()
            for values, buffer in zip(self._buffers, own, strict=True):
                values.copy_(buffer)
        outputs = [messages.outgoing(leaf) for leaf in piece.outputs]
        if grad or any(isinstance(o, messages.Output) and o.values is None for o in outputs):
            self._pieces[message.piece] = piece
        data = None if structure == self._sent_structure else structure_to_bytes(structure)
        self._sent_structure = structure
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        dirty = any(tensor.is_inference() or tensor._version for tensor in tensors)
        reply = messages.Outputs(data, messages.picklable(outputs), changed, dirty)
        if isinstance(piece, Cells):
            reply.changes = [(level, i, pack(value)) for level, i, value in piece.changes]
        return reply

    def _write(self, message: messages.Write) -> messages.Done:
        piece = self._pieces[message.piece]
        outputs = filter(is_joinable, piece.outputs)
        with torch.no_grad():
            for place, output in zip(message.places, outputs, strict=True):
                if place is not None:
                    self._whole.tensor(place).copy_(output)
        if not piece.grad:
            del self._pieces[message.piece]
        return messages.Done()

    def _backward(self, message: messages.Backward) -> messages.Gradients:
        piece = self._pieces[message.piece]
        set_flags(message.settings.flags)
        collector = self._collector
        collector.begin(moved(self._layout, message.target.offset))
        gradients = [place and self._whole.tensor(place) for place in message.gradients]
        for tensor in piece.inputs:
            tensor.grad = None
        sums: list[Sum] = []
        if isinstance(piece, Cells):
            with message.settings.applied(), self._own_hooks():
                sums = self._backward_cells(piece, message, gradients)
        elif isinstance(piece, Portions):
            with message.settings.applied(), self._own_hooks():
                piece.backward(self._function(), gradients)
        else:
            roots = piece.roots(gradients)
            if roots[0]:
                run_backward(*roots, keep_graph=message.keep_graph)
        for tensor, place in zip(piece.inputs, message.inputs, strict=True):
            if tensor.grad is not None and place is not None:
                self._whole.tensor(place).copy_(tensor.grad)
        reached = [tensor.grad is not None for tensor in piece.inputs]
        if not message.keep_graph:
            del self._pieces[message.piece]
        return messages.Gradients(collector.present, reached, collector.others, sums)

    def _backward_cells(
        self, piece: Cells, message: messages.Backward, gradients: Sequence[Tensor | None]
    ) -> list[Sum]:
        layout = [*self._layout, *message.common]
        places = [moved(layout, span.offset) for span in message.slots]
        slots = Slots(piece.strip, lambda slot, i: self._whole.tensor(places[slot][i]))
        for number, cell, its in piece.backward(self._function(), gradients):
            self._collector.begin_cell()
            for tensor in cell.inputs:
                tensor.grad = None
            roots = cell.roots(its)
            if roots[0]:
                run_backward(*roots, keep_graph=message.keep_graph)
            found = self._collector.taken(len(self._shared))
            common = piece.keep_inputs(number, [tensor.grad for tensor in cell.inputs])
            slots.push(number, [*found, *common])
        return slots.sums

    def _function(self) -> Callable[..., Any]:
        """The replica's forward, compiled as the user's module is."""
        return self._compiler.forward(self._module, self._module.forward)

    def _own_hooks(self) -> contextlib.AbstractContextManager[None]:
        return own_saved_tensors() if self._is_guest else contextlib.nullcontext()

    def _reduce(self, message: messages.Reduce) -> messages.Done:
        host.add_up([self._arena.region(*span) for span in message.regions], message.segment)
        return messages.Done()

    def _read(self, message: messages.Read) -> messages.Done:
        parameter = self._module.get_parameter(message.name)
        self._whole.tensor(message.place).copy_(parameter.detach())
        return messages.Done()
