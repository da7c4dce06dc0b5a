"""The contenders: what each makes of a plain model and optimizer. Imports torch.

Each is what its own documentation shows, with its defaults. The loop is the same for all:
zero_grad, forward, loss, backward, step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from workloads import (
    WORKLOADS,
    WithLoss,
    cross_entropy,
    make_batches,
    make_model,
    summed_cross_entropy,
)


@dataclass(frozen=True)
class Setup:
    """A prepared model and optimizer, how to go backward, and how to end.

    `step` is a whole training step where that is not the loop of all others.
    """

    model: nn.Module
    optimizer: Optimizer
    backward: Callable[[Tensor], Any] = Tensor.backward
    close: Callable[[], Any] = lambda: None
    step: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Place:
    """Where a process stands in its group."""

    rank: int
    num_ranks: int
    num_cores: int


def one_core(model: nn.Module, optimizer: Optimizer, _: Place) -> Setup:
    torch.set_num_threads(1)
    return Setup(model, optimizer)


def all_threads(model: nn.Module, optimizer: Optimizer, place: Place) -> Setup:
    torch.set_num_threads(place.num_cores)
    return Setup(model, optimizer)


def ddp(model: nn.Module, optimizer: Optimizer, _: Place) -> Setup:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel = nn.parallel.DistributedDataParallel(model)
    return Setup(parallel, optimizer, close=torch.distributed.destroy_process_group)


def ddp_tuned(model: nn.Module, optimizer: Optimizer, _: Place) -> Setup:
    """`ddp` with the options that its documentation offers for speed and memory."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel = nn.parallel.DistributedDataParallel(
        model, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
    )
    return Setup(parallel, optimizer, close=torch.distributed.destroy_process_group)


def accelerate(model: nn.Module, optimizer: Optimizer, _: Place) -> Setup:
    from accelerate import Accelerator  # noqa: PLC0415 (only its own processes pay for it)

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    return Setup(prepared, prepared_optimizer, accelerator.backward, accelerator.end_training)


def fabric(model: nn.Module, optimizer: Optimizer, place: Place) -> Setup:
    from lightning_fabric import Fabric  # noqa: PLC0415 (only its own processes pay for it)

    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=place.num_ranks, strategy="ddp")
    fabric.launch()
    prepared, prepared_optimizer = fabric.setup(model, optimizer)
    close = torch.distributed.destroy_process_group
    return Setup(prepared, prepared_optimizer, fabric.backward, close)


def evener(model: nn.Module, optimizer: Optimizer, _: Place, **options: Any) -> Setup:
    import evener  # noqa: PLC0415 (the peers run without it)

    evener.parallelize(model, **options)
    return Setup(model, optimizer, close=lambda: evener.release(model))


def gluon(model: nn.Module, optimizer: Optimizer, _: Place, *, measured: bool) -> Setup:
    """The explicit style of evener, with even or with measured shares."""
    import evener  # noqa: PLC0415 (the peers run without it)
    from evener import gluon  # noqa: PLC0415

    devices = evener.devices("cpu")
    gluon.initialize(model, None, devices)
    options = {
        "learning_rate": optimizer.defaults["lr"],
        "momentum": optimizer.defaults["momentum"],
    }
    trainer = gluon.Trainer(gluon.collect_params(model), "sgd", options)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        shares = gluon.shares(model, len(inputs)) if measured else None
        xs = gluon.split_and_load(inputs, devices, even_split=False, shares=shares)
        ys = gluon.split_and_load(targets, devices, even_split=False, shares=shares)
        losses = [summed_cross_entropy(model(x), y) for x, y in zip(xs, ys, strict=True)]
        for loss in losses:
            loss.backward()
        trainer.step(targets.numel())
        return torch.stack([loss.detach() for loss in losses]).sum() / targets.numel()

    return Setup(model, optimizer, close=lambda: evener.release(model), step=step)


CONTENDERS: dict[str, Callable[[nn.Module, Optimizer, Place], Setup]] = {
    "one_core": one_core,
    "all_threads": all_threads,
    "ddp": ddp,
    "ddp_tuned": ddp_tuned,
    "accelerate": accelerate,
    "fabric": fabric,
    "evener": evener,
    "evener_even": partial(evener, shares="even"),
    "evener_auto": partial(evener, shares="auto"),
    "evener_grid4": partial(evener, grid=4),
    "evener_grid16": partial(evener, grid=16),
    "gluon_even": partial(gluon, measured=False),
    "gluon_auto": partial(gluon, measured=True),
}


class Training:
    """One process's training loop of a workload, run a number of steps at a time."""

    def __init__(self, contender: str, workload: str, place: Place, *, loss_inside: bool) -> None:
        self._work = WORKLOADS[workload]
        self._loss_inside = loss_inside
        batches = make_batches(self._work, place.rank, place.num_ranks)
        self._batches = itertools.cycle(batches)
        self.plain = make_model(self._work)
        model = WithLoss(self.plain) if loss_inside else self.plain
        optimizer = torch.optim.SGD(model.parameters(), lr=self._work.lr, momentum=0.9)
        self.setup = CONTENDERS[contender](model, optimizer, place)

    def skip(self, num_steps: int) -> None:
        """Passes over the batches of so many steps."""
        for _ in range(num_steps):
            next(self._batches)

    def step(self) -> Tensor:
        inputs, targets = next(self._batches)
        if self.setup.step is not None:
            return self.setup.step(inputs, targets)
        self.setup.optimizer.zero_grad()
        if self._loss_inside:
            loss: Tensor = self.setup.model(inputs, targets)
        else:
            loss = cross_entropy(self.setup.model(inputs), targets)
        self.setup.backward(loss)
        self.setup.optimizer.step()
        return loss

    @torch.no_grad()
    def moved(self) -> float:
        """How far all parameters together are from where they started: the Euclidean norm.

        It tells a wrong gradient or learning rate much sooner than the loss does.
        """
        start = make_model(self._work).parameters()
        pairs = zip(self.plain.parameters(), start, strict=True)
        squares = [(now.double() - then).square().sum() for now, then in pairs]
        return float(torch.stack(squares).sum().sqrt())
