"""The data way: each device a share of the batch.

One autograd function joins the main process's graph with those of the devices. Its inputs are the
module's differentiable inputs and its parameters, so everything around it is ordinary autograd::

    x ──────────┐   forward: cut x by the shares          ┌──► out ── the user's loss
                ├── each device runs its piece ── join ───┤                │
    parameters ─┘                                         └────────────────┘ backward
          ▲         cut the gradient of out by the same shares
          │         each device runs its piece's backward
          └──────── add up the gradients, once for each parameter

On the first device the user's own module object runs, in the user's own process. Its part of the
backward is a ``torch.autograd.grad`` inside the function's backward: it touches no ``.grad`` and
runs no hook of a parameter, for these belong to the full gradient that the function returns.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evener import allocator
from evener.advice import Advice
from evener.alone import run_alone, settled
from evener.batches import Batch, Cut
from evener.batchnorm import uses_statistics
from evener.call import Call
from evener.coupled import CoupledCall
from evener.devices import Device
from evener.dims import Dims
from evener.faults import Faults
from evener.joined import Joined
from evener.journal import Journal
from evener.piece import (
    Seeds,
    Settings,
    check_transforms,
    own_saved_tensors,
    refusing_to_redraw,
)
from evener.policies import Policies, Policy
from evener.run import Run, labelled
from evener.shares import Choice
from evener.team import Team
from evener.thread import Mark, on_cores, restored, seeded
from evener.timing import Timing
from evener.together import Together


class DataWay:
    """Runs the calls of one module on several devices, each a share of the batch.

    Args:
        devices: two devices or more, all of them CPU devices; the first is the main process's.
        policies: what decides the shares, in training and in inference: the second has no
            backward, and devices may differ more in one than in the other.
        timeout_s: how long one answer of a helper may take; None: as measured.
        restarts: how many times a device gets a new helper after a death.
        dims: where the batch lies in inputs and outputs. Default: in dimension 0.
        is_exact: whether batch norm takes its statistics over all devices. Default: no.

    Attributes:
        dims: where the batch lies.
        journal: what each device did.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        policies: tuple[Policy, Policy],
        timeout_s: float | None,
        restarts: int,
        dims: Dims | None = None,
        *,
        is_exact: bool = False,
    ) -> None:
        self._is_exact = is_exact
        self._devices = list(devices)
        self._policies = Policies(self._devices, *policies)
        self.dims = dims or Dims()
        self.journal = Journal(len(devices))
        self._faults = Faults(self._devices, self.journal, restarts)
        self._num_calls = 0
        self._timeout_s = timeout_s
        self._main_pid = os.getpid()
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._num_threads: int | None = None  # the user's, while a team runs
        self._keeps_memory = False
        self._inside = Mark()  # where the first device's piece runs; a call in it is plain
        self._advice = Advice()
        self._seeds = Seeds()

    def is_plain(self, module: nn.Module) -> bool:
        """Whether a call is the plain call for now, whatever its batch."""
        return (
            self._inside.is_here  # the module calls itself
            or os.getpid() != self._main_pid  # a process that the user forked
            or (self._run is None and any(map(is_lazy, module.parameters())))
        )

    def call(  # noqa: PLR0915 - one call, from cut to outputs
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        shares: Sequence[int] | None = None,
    ) -> Any:
        """Call the module on all devices.

        Args:
            module: the user's module.
            forward: its own forward, bound.
            args: what the user gave.
            kwargs: what the user gave.
            shares: the samples of each device. Outputs that are means (or reductions) then stay
                apart, as ``Means`` (not in the plain call). Default: as the policy chooses.

        Returns:
            What the module returns on one device.
        """
        if self.is_plain(module):
            return forward(*args, **kwargs)
        check_transforms()
        batch = Batch(args, kwargs, self.dims, forward)
        if batch.size is None:  # nothing to cut
            return settled(forward(*args, **kwargs), means_apart=shares is not None)
        forward = refusing_to_redraw(forward)
        with self._lock, self._faults.telling(), restored(self._inside), ExitStack() as stack:
            self._attend()
            seed = self._seeds.next()
            grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            choice = (
                self._choose(batch.size, grad=grad)
                if shares is None
                else self._advice.follow((batch.size, grad), shares)
            )
            self._num_calls += 1
            if self._is_alone(choice, grad=grad):
                if self._run is not None:
                    self._run.mirror.catch_up(module)  # a helper that comes would wait for it
                    if self._num_calls % 8 == 0:  # once there, it stays; the others may be slow
                        stack.enter_context(on_cores(self._devices[0].cores))
                stack.enter_context(self._inside.marked())
                stack.enter_context(seeded(seed(0)))
                plain, apart = partial(forward, *args, **kwargs), shares is not None
                about = (self.journal, self._num_calls, choice.shares)
                outputs, seconds = run_alone(plain, *about, grad=grad, means_apart=apart)
                if choice.measured:
                    self._policies.learn_alone(choice.shares, seconds)
                return outputs
            run = self._ready(module)
            stack.enter_context(on_cores(self._devices[0].cores))
            run.settle()
            own, number, is_apart = self._own(forward), self._num_calls, shares is not None
            size = batch.size
            is_exact = self._is_exact and not is_apart and uses_statistics(module)

            def made(shares: Sequence[int]) -> Call:
                timing = Timing(self.journal, number, shares)
                timing.num_faults = self._faults.num
                cut = Cut(shares, means_apart=is_apart)
                if not is_exact or len(cut.parts) == 1:
                    return self._new_call(run, module, own, batch, (cut, seed, timing))
                seeds = {device: seed(device) for device in cut.parts}
                run.team.summon(cut.helpers)
                return CoupledCall(run, module, own, batch, cut, seeds=seeds, timing=timing)

            def made_again(before: Call | None) -> Call:
                if before is not None:
                    return made(before.timing.shares)
                self._attend()
                return made(self._choose(size, grad=grad).shares)

            call: Call | Together = made(choice.shares)
            if isinstance(call, CoupledCall):
                call = Together(call, module, made_again)
            grad = grad and bool(call.inputs or call.trainable)
            settings = Settings.current()._replace(grad=grad)
            if settings.grad:
                tensors = Joined.apply(  # type: ignore[no-untyped-call]
                    self, call, settings, *call.inputs, *call.trainable
                )
            else:
                call.forward(settings)
                tensors = call.outputs.tensors
                self._learn(run, call.timing, grad=False)
            return call.outputs.tree(tensors)

    def backward(
        self, call: Call | Together, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> list[Tensor | None]:
        """Run the backward of a call; see :meth:`Call.backward`."""
        cores = self._devices[0].cores
        with self._lock, self._faults.telling(), restored(self._inside), on_cores(cores):
            if self._run is not None and self._run.team.is_running:
                self._run.settle()
            with self._inside.marked(), labelled("evener: backward"):
                found = call.backward(gradients, keep_graph=keep_graph)
            if call.timing.num_phases == 2:  # noqa: PLR2004 - a forward, and its first backward
                self._learn(call.run, call.timing, grad=True)
            return found

    def advise(self, batch: int) -> tuple[int, ...]:
        """The shares that the policy would choose for the next call; see :class:`Advice`."""
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with self._lock:
            return self._advice.ask((batch, grad), lambda: self._choose(batch, grad=grad, level=6))

    def read(self, device: int, name: str, like: Tensor) -> Tensor | None:
        """What a helper has as a parameter, or None; see :meth:`Mirror.read`."""
        with self._lock:
            self._attend()
            if self._run is None or not self._run.team.present[device]:
                return None
            self._run.settle()
            return self._run.mirror.read(device, name, like)

    def stop(self) -> None:
        """End the helpers, and give the parameters memory of their own again."""
        if os.getpid() != self._main_pid:  # in a process that the user forked
            return
        if not self._lock.acquire(blocking=threading.main_thread().is_alive()):
            return  # the program ends, a thread of its in a call; the helpers end with the process
        with self._lock:
            self._lock.release()
            if self._run is not None:
                run, self._run = self._run, None
                try:
                    run.mirror.dissolve()
                finally:
                    run.team.stop()
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
                self._num_threads = None
            if self._keeps_memory:
                allocator.return_memory()
                self._keeps_memory = False

    def _choose(self, batch: int, *, grad: bool, level: int = 7) -> Choice:
        """The shares of the next call."""
        forwards = deque[Timing]() if self._run is None else self._run.forwards
        return self._policies.choose(batch, forwards, grad=grad, level=level + 1)

    def _is_alone(self, choice: Choice, *, grad: bool) -> bool:
        """Whether a call with this choice is the plain call."""
        return sum(choice.shares[1:]) == 0 and not (choice.measured and grad)

    def _new_call(
        self,
        run: Run,
        module: nn.Module,
        function: Callable[..., Any],
        batch: Batch,
        rest: tuple[Cut, Callable[[int], int], Timing],
    ) -> Call:
        cut, seed, timing = rest
        seeds = {device: seed(device) for device in cut.parts}
        return Call(run, module, function, batch, cut, seeds=seeds, timing=timing)

    def _learn(self, run: Run, timing: Timing, *, grad: bool) -> None:
        # What takes longer because a device has failed says nothing about the devices' speeds.
        if timing.num_faults == self._faults.num and not run.team.is_warming:
            self._policies.learn(timing, grad=grad)

    def _attend(self) -> None:
        """Look after the helpers; who is not there gets no share."""
        self._faults.call = self._num_calls + 1
        if self._run is None:
            return
        team = self._run.team
        team.tend()
        # With fixed shares the main process does the part of a device whose helper is yet to
        # come: the same pieces, the same results.
        there = team.expected if self._policies.are_fixed else team.present
        pairs = zip(there, self._faults.caps, strict=True)
        self._policies.limit([cap if there else 0 for there, cap in pairs])

    def _ready(self, module: nn.Module) -> Run:
        """The running team; a new one at the first call."""
        if self._run is None:
            team = Team(self._devices, self._timeout_s, self._faults)
            try:
                self._run = Run(module, team)
            except BaseException:
                team.stop()
                raise
            self._keeps_memory = allocator.keep_memory()
        # One thread for each core of the first device; the other cores belong to the helpers.
        num_threads = len(self._devices[0].cores)
        if torch.get_num_threads() != num_threads:
            if self._num_threads is None:
                self._num_threads = torch.get_num_threads()
            torch.set_num_threads(num_threads)
        return self._run

    def _own(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The module's forward as the first device runs it."""

        def own_forward(*args: Any, **kwargs: Any) -> Any:
            with self._inside.marked(), own_saved_tensors():
                return forward(*args, **kwargs)

        return own_forward
