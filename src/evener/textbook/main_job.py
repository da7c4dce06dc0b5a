"""The main job: ResNet-18 learns Fashion-MNIST, on one device or on several.

:func:`train` is the loop as any PyTorch user writes it, and knows nothing of devices.
:func:`run` is what one has to do around it: nothing for one device, one line for several::

    evener.parallelize(model, devices)

Two runs with the same settings start from the same weights and see the same batches in the same
order, whatever they run on, so they can be compared step by step. The run on one device is
confined to the cores of that device, with one thread for each: what one device reaches alone.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import evener
from evener.textbook.fashion_mnist import FashionMNIST, Part
from evener.textbook.record import Epoch, Recorder, Run, Settings, Step
from evener.textbook.resnet import ResNet18, init_tutorial

__all__ = ["batches", "build", "evaluate", "run", "train"]

# Of all 60000 training images, with pixels from 0 to 1.
MEAN, STD = 0.2860, 0.3530
#: How often the shares are looked at, in seconds.
LOOK_S = 0.25
TEST_BATCH_SIZE = 256


def train(model: nn.Module, data: FashionMNIST, settings: Settings, recorder: Recorder) -> None:
    """Train a model and test it after each epoch.

    Args:
        model: takes (batch, 1, 28, 28), gives (batch, 10); changed in place.
        data: what to learn from and to test with.
        settings: epochs, batch size, learning rate, momentum and seed are read here.
        recorder: is told of each step and each epoch.
    """
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    shuffler = torch.Generator().manual_seed(settings.seed)
    device = next(model.parameters()).device

    for _ in range(settings.epochs):
        model.train()
        with recorder.epoch():
            for pictures, labels in batches(data.train, settings.batch_size, device, shuffler):
                optimizer.zero_grad()
                loss = criterion(model(pictures), labels)
                loss.backward()
                optimizer.step()
                recorder.step(loss.item(), len(labels))
        recorder.tested(evaluate(model, data.test, device))


@torch.no_grad()
def evaluate(model: nn.Module, part: Part, device: torch.device) -> float:
    """Give the part of the images, 0 to 1, for which the model finds the right label."""
    model.eval()
    num_right = 0
    for pictures, labels in batches(part, TEST_BATCH_SIZE, device):
        num_right += int((model(pictures).argmax(dim=1) == labels).sum())
    return num_right / len(part)


def batches(
    part: Part, batch_size: int, device: torch.device, shuffler: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through images and labels once.

    Args:
        part: what to go through.
        batch_size: images in a batch; the last batch may have fewer.
        device: where the batches are wanted.
        shuffler: decides the order. Default: as they lie.

    Yields:
        Pictures (batch, 1, 28, 28) float32, with mean 0 and deviation 1 over the whole training
        set, and labels (batch,) int64.
    """
    num = len(part)
    order = torch.arange(num) if shuffler is None else torch.randperm(num, generator=shuffler)
    for chosen in torch.split(order, batch_size):
        pictures = part.images[chosen].float().div_(255.0).sub_(MEAN).div_(STD)
        yield pictures.to(device), part.labels[chosen].to(device)


def build(settings: Settings) -> ResNet18:
    """Make the model; equal settings give equal weights. Nobody else's random numbers change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = ResNet18(settings.width)
        if settings.init == "tutorial":
            init_tutorial(model)
    return model


def run(
    devices: Sequence[evener.Device],
    data: FashionMNIST,
    settings: Settings,
    *,
    on_step: Callable[[Step], None] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Run:
    """Train on the given devices, and clean up.

    Args:
        devices: one or more. With one, plain PyTorch trains on the cores of that device alone.
        data: what to learn from and to test with.
        settings: how to learn.
        on_step: called after each batch. Default: nobody is told.
        on_epoch: called after each epoch. Default: nobody is told.

    Returns:
        What was measured. The helpers have ended, and threads and cores of this process are as
        they were before, also after an error.

    Raises:
        EvenerError: if the devices cannot be used or a helper fails.
    """
    first, num_devices = devices[0], len(devices)
    home = torch.device("cpu") if first.kind == "cpu" else torch.device(first.kind, first.index)
    model = build(settings).to(home)
    uses_batch_norm = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    record = Run(tuple(devices), uses_batch_norm=uses_batch_norm)
    with contextlib.ExitStack() as stack:
        started_s = time.perf_counter()
        if num_devices == 1:
            stack.enter_context(confined_to(first.cores))
        else:
            evener.parallelize(model, list(devices))
            stack.callback(evener.release, model)
            on_step = on_step and _with_shares(on_step, model)
        # The first call starts the helpers. In eval mode, so that the training starts from the
        # same running statistics in every run.
        evaluate(model, data.limited(settings.batch_size).train, home)
        record.start_s = time.perf_counter() - started_s
        train(model, data, settings, Recorder(record, on_step, on_epoch))
        if num_devices > 1:
            report = evener.report(model)
            record.own_images_per_s, record.reached = report.own_samples_per_s, report.reached
    return record


def _with_shares(on_step: Callable[[Step], None], model: nn.Module) -> Callable[[Step], None]:
    """Tell with each step the shares of lately: a report takes too long for every step."""
    next_s = 0.0
    shares: tuple[int, ...] = ()

    def told(step: Step) -> None:
        nonlocal next_s, shares
        if time.perf_counter() >= next_s:
            shares = evener.report(model).shares
            next_s = time.perf_counter() + LOOK_S
        on_step(dataclasses.replace(step, shares=shares))

    return told


@contextlib.contextmanager
def confined_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Compute on these cores only, with one thread for each; on any, where there are none."""
    if not cores:  # an accelerator
        yield
        return
    num_threads, allowed = torch.get_num_threads(), os.sched_getaffinity(0)
    _move_threads(set(cores))
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        _move_threads(allowed)


def _move_threads(cores: set[int]) -> None:
    """Let all threads of this process run on these cores.

    All, since torch keeps its threads: those that it made while confined would stay confined.
    """
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(entry.name), cores)
