"""Situation: every change that outputs depend on is seen, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from evener import gluon
from evener.gluon.situation import Situation
from evener.gluon.split import Shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = 1.0


class Scene:
    def __init__(self) -> None:
        self.net = Net()
        self.batch = torch.randn(4, 2)
        self.shards = gluon.split_and_load(self.batch, "cpu*2")
        self.flag: Any = 1
        self.weight = torch.tensor(2.0)
        self.situation = Situation(self.net, *self.arguments(0))

    def arguments(self, index: int) -> tuple[Sequence[Any], Sequence[Shard | None]]:
        shard = self.shards[index]
        return [shard, self.flag, self.weight], [Shard.of(shard), None, None]

    def is_still(self) -> bool:
        return self.situation.is_still(self.net, *self.arguments(1))


def test_without_a_change_it_is_still_the_same() -> None:
    scene = Scene()
    scene.net.linear(scene.shards[0]).sum().backward()  # gradients decide nothing

    assert scene.is_still()
    scene.flag = int("1")
    assert scene.is_still()


def _set(scene: Scene, name: str, value: Any) -> None:
    setattr(scene, name, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.batch.add_(1),
        lambda s: s.shards[1].zero_(),
        lambda s: _set(s, "flag", True),
        lambda s: _set(s, "flag", 2),
        lambda s: _set(s, "weight", torch.tensor(2.0)),
        lambda s: s.weight.add_(1),
        lambda s: _set(s, "shards", gluon.split_and_load(s.batch, "cpu*2")),
        lambda s: _set(s, "net", Net()),
        lambda s: s.net.eval(),
        lambda s: setattr(s.net, "scale", 2.0),
        lambda s: setattr(s.net, "new", 2.0),
        lambda s: setattr(s.net, "linear", nn.Linear(2, 2)),
        lambda s: setattr(s.net.linear, "bias", None),
        lambda s: nn.init.zeros_(s.net.linear.weight),
        lambda s: s.net.norm.running_mean.add_(1),
        lambda s: torch.set_grad_enabled(False),
        lambda s: torch.set_default_dtype(torch.float64),
    ],
)
def test_a_change_is_seen(change: Callable[[Scene], Any]) -> None:
    scene = Scene()
    try:
        change(scene)
        assert not scene.is_still()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


def test_of_inference_tensors_the_values_are_compared() -> None:
    net = nn.Identity()  # one without parameters: those made in inference mode are never alike
    with torch.inference_mode():
        scene = Scene()
        situation = Situation(net, *scene.arguments(0))
        for change, is_still in [
            (lambda: None, True),
            (lambda: scene.batch[0].add_(1), True),  # another shard's rows
            (lambda: scene.batch[3].add_(1), False),
            (lambda: scene.batch.copy_(situation._copies[0]), True),
            (lambda: scene.weight.add_(1), False),
        ]:
            change()
            assert situation.is_still(net, *scene.arguments(1)) == is_still
