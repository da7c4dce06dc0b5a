"""What a worker does in each of its roles. Imports torch."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

from channel import Channel
from contenders import Place, Training


def train(channel: Channel, task: dict[str, Any]) -> None:
    """Says the losses of the first steps, then runs as many steps as it is told each time."""
    place = Place(task["rank"], task["num_ranks"], len(task["cores"]))
    training = Training(
        task["contender"], task["workload"], place, loss_inside=task["loss_inside"]
    )
    losses = [float(training.step()) for _ in range(task["num_checked"])]
    channel.say(losses=losses, moved=training.moved() if losses else 0.0)
    for request in channel.requests():
        for _ in range(request["num_lead_in"]):
            training.step()
        start_s = time.perf_counter()
        for _ in range(request["num_steps"]):
            training.step()
        channel.say(seconds=time.perf_counter() - start_s)
    training.setup.close()


def first_step(channel: Channel, task: dict[str, Any]) -> None:
    """Says the seconds from before `parallelize` to after the first training step."""
    import evener  # noqa: PLC0415 (the other roles must not load it)

    plain = Training("one_core", task["workload"], Place(0, 1, 1), loss_inside=False)
    # The plain setup was a way to the model only; what it set is undone.
    torch.set_num_threads(len(task["cores"]))
    start_s = time.perf_counter()
    evener.parallelize(plain.setup.model)
    plain.step()
    channel.say(seconds=time.perf_counter() - start_s)
    evener.release(plain.setup.model)


def one_device(channel: Channel, task: dict[str, Any]) -> None:
    """Says the ratios of a step's time, on one device to plain, in alternating blocks."""
    import evener  # noqa: PLC0415 (the other roles must not load it)

    place = Place(0, 1, 1)
    plain = Training("one_core", task["workload"], place, loss_inside=False)
    single = Training("one_core", task["workload"], place, loss_inside=False)
    evener.parallelize(single.setup.model, "cpu:0")

    def block_s(training: Training) -> float:
        training.step()
        start_s = time.perf_counter()
        for _ in range(task["num_steps"]):
            training.step()
        return time.perf_counter() - start_s

    block_s(plain)
    block_s(single)
    ratios = []
    for block in range(task["num_blocks"]):
        # Each of the two is first in every other block, so that neither profits from its place.
        if block % 2:
            plain_s, single_s = block_s(plain), block_s(single)
        else:
            single_s, plain_s = block_s(single), block_s(plain)
        ratios.append(single_s / plain_s)
    evener.release(single.setup.model)
    channel.say(ratios=ratios, median=statistics.median(ratios))


def neighbour(channel: Channel, task: dict[str, Any]) -> None:
    """Slows its cores to the speed that it is told each time; null lets them be."""
    from evener.neighbour import Neighbour  # noqa: PLC0415 (the other roles must not load it)

    channel.say()
    with ExitStack() as there:
        for request in channel.requests():
            there.close()
            if request["speed"] is not None:
                there.enter_context(Neighbour(task["cores"], request["speed"]))
            channel.say()


ROLES = {
    "train": train,
    "first-step": first_step,
    "one-device": one_device,
    "neighbour": neighbour,
}
