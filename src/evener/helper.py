"""A helper: the process that drives one further device of a team.

It is started as a plain interpreter that runs :func:`main`, and knows its main process by two
inherited descriptors alone, the channel's and the arena's. It holds a replica of the user's module
and, between a forward and its backward, its pieces with their part of the autograd graph. It ends
when the channel closes or the main process ends, however that happens: a thread of its own waits
for the main process's descriptor, even while the user's module computes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import Arena, Place, Region, moved
from evener.batches import is_joinable
from evener.channel import Channel, ChannelClosedError
from evener.compiling import Compiler
from evener.exchange import host
from evener.piece import Piece, run_backward, set_flags
from evener.printing import redirect
from evener.replica import complete_main, from_bytes, private_buffers
from evener.trees import Structure, structure_from_bytes, structure_to_bytes
from evener.watch import Watch

#: Tells the code of the user's program that it runs in a helper, by the helper's process number.
HELPER_VARIABLE = "EVENER_HELPER"
#: The main process may rest as long as it likes between two calls.
_FOREVER_S = 1e9


class Helper:
    """What a helper knows, and what it does with each message.

    Args:
        arena: the team's arena.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
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
        # The backward that runs.
        self._targets: list[Place] = []
        self._present: list[bool] = []
        self._others: dict[int, bytes] = {}

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
        }
        message = request.message
        try:
            reply = actions[type(message)](message)
        except BaseException as error:  # noqa: BLE001 - the main process raises it again
            self._pieces.pop(getattr(message, "piece", -1), None)
            reply = messages.Failure.of(error)
        freed = [number for number, region in self._regions.items() if not region.in_use]
        for number in freed:
            del self._regions[number]
        return messages.Reply(reply, freed, start_s, time.perf_counter())

    def _load(self, message: messages.Load) -> messages.Done:
        sys.path[:] = message.sys_path
        if message.folder is not None:
            os.chdir(message.folder)
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
                tensor.register_post_accumulate_grad_hook(self._collector(i))  # type: ignore[no-untyped-call]
            tensor.requires_grad_(message.requires_grad[i])
        self._buffers = [self._whole.tensor(place) for place in message.buffers]
        self._module = from_bytes(message.module, self._shared)
        complete_main(self._module)
        self._modules = list(self._module.modules())
        self._compiler = Compiler()
        self._is_seeded = False
        # What is there now will stay: the garbage collector need not look at it again and again.
        gc.freeze()
        return messages.Done()

    def _follow(self, message: messages.Follow) -> messages.Done:
        message.update.apply(self._modules, self._shared, self._buffers)
        return messages.Done()

    def _forward(self, message: messages.Forward) -> messages.Outputs:
        if message.structure is not None:
            self._structure = structure_from_bytes(message.structure)
        assert self._structure is not None  # noqa: S101 - the first message brings it
        message.update.apply(self._modules, self._shared, self._buffers)
        leaves = messages.unpicklable(message.leaves)
        region = self._regions[message.piece] = self._arena.region(*message.span)
        with message.settings.applied():
            inputs = [
                region.tensor(leaf.place) if isinstance(leaf, messages.Input) else leaf
                for leaf in leaves
            ]
            wanted = [isinstance(leaf, messages.Input) and leaf.wanted for leaf in leaves]
            grad = message.settings.grad
            piece = Piece(inputs, wanted, self._structure, message.seed, grad=grad)
            watch = Watch(self._module, self._shared) if message.lead else None
            if not self._is_seeded:
                _seed_others(message.seed)
                self._is_seeded = True
            forward = self._compiler.forward(self._module, self._module.forward)
            structure = piece.forward(forward)
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
        return messages.Outputs(data, messages.picklable(outputs), changed)

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
        set_flags(message.flags)
        self._targets = moved(self._layout, message.target.offset)
        self._present = [False] * len(self._shared)
        self._others = {}
        outputs, gradients = piece.roots(
            [place and self._whole.tensor(place) for place in message.gradients]
        )
        for tensor in piece.inputs:
            tensor.grad = None
        if outputs:
            run_backward(outputs, gradients, keep_graph=message.keep_graph)
        for tensor, place in zip(piece.inputs, message.inputs, strict=True):
            if tensor.grad is not None:
                self._whole.tensor(place).copy_(tensor.grad)
        reached = [tensor.grad is not None for tensor in piece.inputs]
        if not message.keep_graph:
            del self._pieces[message.piece]
        return messages.Gradients(self._present, reached, self._others)

    def _collector(self, number: int) -> Callable[[Tensor], None]:
        """A hook that moves the gradient of a shared tensor to its place.

        It runs as soon as the gradient is ready, while that is still in the core's cache.
        """

        def collect(tensor: Tensor) -> None:
            gradient = tensor.grad
            tensor.grad = None
            if gradient is None:
                return
            if gradient.layout != torch.strided:
                total = gradient
                if number in self._others:
                    total = pickle.loads(self._others[number]) + gradient  # noqa: S301 - our own
                self._others[number] = pickle.dumps(total.coalesce())
                return
            target = self._whole.tensor(self._targets[number])
            if self._present[number]:  # a checkpoint inside may reach it several times
                target.add_(gradient)
            else:
                target.copy_(gradient)
                self._present[number] = True

        return collect

    def _reduce(self, message: messages.Reduce) -> messages.Done:
        host.add_up([self._arena.region(*span) for span in message.regions], message.segment)
        return messages.Done()


def _seed_others(seed: int) -> None:
    """Seed the generators that are not torch's; in a helper they are nobody else's.

    Once for a replica, not for each piece: it takes longer than the rest of a small piece's
    preparation.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


# ------------------------------------------------------------------ the process


def main(
    channel_fd: int, arena_fd: int, main_pid: int, cores: list[int], *, spin_s: float
) -> None:
    """Serve the main process until it ends or closes the channel.

    Args:
        channel_fd: the inherited descriptor of the channel's socket.
        arena_fd: the inherited descriptor of the arena.
        main_pid: the main process.
        cores: the CPU cores to compute on, one thread on each.
        spin_s: how long a wait looks before it sleeps.
    """
    os.environ[HELPER_VARIABLE] = str(os.getpid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which tells us
    pidfd = _watch_main_process(main_pid)
    # The cores may have been taken away, or pinning forbidden: then it is slower, not wrong.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    helper = Helper(Arena(arena_fd))
    channel = Channel(socket.socket(fileno=channel_fd), pidfd, spin_s)
    flush = redirect(channel, _FOREVER_S)
    channel.send(messages.Reply(messages.Done(), []), _FOREVER_S)
    while True:
        try:
            reply = helper.answer(channel.receive(_FOREVER_S))
            flush()
            channel.send(reply, _FOREVER_S)
        except ChannelClosedError:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: a thread that the user's module left behind must not keep us.
            os._exit(0)


def _watch_main_process(main_pid: int) -> int:
    """End this process as soon as the main process ends; returns its process descriptor, or -1."""
    try:
        pidfd = os.pidfd_open(main_pid)
    except (AttributeError, OSError):
        pidfd = -1
    if os.getppid() != main_pid:  # it ended before it could be watched
        os._exit(0)

    def watch() -> None:
        if pidfd >= 0:
            select.select([pidfd], [], [])
        else:
            while os.getppid() == main_pid:
                time.sleep(0.5)
        os._exit(0)

    threading.Thread(target=watch, name="evener-watch", daemon=True).start()
    return pidfd
