"""A deputy: the main process in a helper's place leaves nothing of the user's changed."""

from __future__ import annotations

import gc
import os
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import Arena, lay_out, moved, put
from evener.deputy import Deputy
from evener.piece import Settings
from evener.replica import shared_tensors, to_bytes
from evener.trees import flatten, structure_to_bytes
from evener.update import Update


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.drop = nn.Dropout(0.5)
        self.num_calls = 0
        self.interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.interrupted:
            raise KeyboardInterrupt
        random.random()  # noqa: S311 - the user's module draws
        return self.drop(self.linear(x))


class Scene:
    """A deputy for a device that has lost its helper."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.module = Net()
        self.shared = shared_tensors(self.module)
        self.layout, self.num_bytes = lay_out(self.shared)
        self.region = self.arena.take(self.num_bytes)
        for place, tensor in zip(moved(self.layout, self.region.offset), self.shared, strict=True):
            self.region.tensor(place).copy_(tensor.detach())
        self.worked: list[tuple[int, float, float]] = []
        self.deputy = Deputy(self.arena, 1, self.worked)

    def step(self) -> tuple[Any, Any, Tensor]:
        load = messages.Load(
            module=to_bytes(self.module, self.shared),
            layout=self.layout,
            shared=messages.Span(self.region.offset, self.region.num_bytes),
            parameters=[True, True],
            requires_grad=[True, True],
            buffers=[],
            sys_path=["/of/the/user"],
            folder="/",
        )
        self.deputy.ask(load)
        x = torch.ones(4, 2)
        _, structure = flatten(((x,), {}))
        (place,), region = put(self.arena, [x])
        forward = self.deputy.ask(
            messages.Forward(
                piece=1,
                update=Update(),
                structure=structure_to_bytes(structure),
                leaves=[messages.Input(place, wanted=False)],
                span=messages.Span(region.offset, region.num_bytes),
                seed=5,
                settings=Settings.current(),
                lead=False,
            )
        )
        (gradient,), _ = put(self.arena, [torch.ones(4, 3)])
        target = self.arena.take(self.num_bytes)
        backward = self.deputy.ask(
            messages.Backward(
                piece=1,
                gradients=[gradient],
                target=messages.Span(target.offset, target.num_bytes),
                inputs=[],
                keep_graph=False,
                settings=Settings.current(),
            )
        )
        return forward, backward, target.tensor(moved(self.layout, target.offset)[1])


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    arena = scene.arena
    del scene.deputy, scene.region
    gc.collect()
    arena.close()


def test_it_does_the_work_and_its_time_is_noted(scene: Scene) -> None:
    forward, backward, bias_gradient = scene.step()

    assert isinstance(forward, messages.Outputs)
    assert backward.present == [True, True]
    assert bias_gradient.sum() > 0
    assert [device for device, *_ in scene.worked] == [1, 1, 1]


def test_nothing_of_the_users_changes(scene: Scene) -> None:
    def state() -> Any:
        return (
            [scene.module.num_calls, [p.grad for p in scene.module.parameters()]],
            [torch.get_rng_state().tolist(), os.getcwd(), list(sys.path), gc.get_freeze_count()],
            [p._post_accumulate_grad_hooks for p in scene.module.parameters()],
        )

    before = pickle.dumps(state())
    scene.step()

    assert pickle.dumps(state()) == before


def test_an_interrupt_is_the_users(scene: Scene) -> None:
    scene.module.interrupted = True

    with pytest.raises(KeyboardInterrupt):
        scene.step()
