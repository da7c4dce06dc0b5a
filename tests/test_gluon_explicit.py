"""Explicit: shard after shard, with the result of one device and the devices at work at once."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import evener
from evener import gluon
from evener.data_parallel import DataWay
from evener.errors import BatchError, FaultWarning, NotOnDeviceError
from evener.gluon import explicit
from evener.gluon.explicit import Explicit
from evener.gluon.split import Shard
from evener.pickling import STATE_NAME

# ------------------------------------------------------------------ which calls are made


class FakeWay:
    """Runs every call in this process, and notes with which shares."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def is_plain(self, module: nn.Module) -> bool:
        return False

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        shares: Sequence[int] | None = None,
    ) -> Any:
        self.calls.append(shares if shares is None else tuple(shares))
        return forward(*args, **kwargs)


class Scene:
    def __init__(self, module: nn.Module | None = None) -> None:
        self.net = (module or nn.Linear(2, 3)).double()
        self.way = FakeWay()
        self.explicit = Explicit(self.way, ["cpu:0", "cpu:1"])  # type: ignore[arg-type]
        self.x = torch.randn(5, 2, dtype=torch.float64)

    def split(self, x: Tensor | None = None, **options: Any) -> list[Tensor]:
        options = {"shares": (3, 2)} | options
        return gluon.split_and_load(self.x if x is None else x, "cpu*2", **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.explicit.call_for(args, kwargs)
        return call(self.net, self.net.forward, args, kwargs)


def test_all_shards_are_computed_by_the_first_call() -> None:
    scene = Scene()
    xs = scene.split()

    for order in ((0, 1), (1, 0)):
        outputs = {i: scene(xs[i]) for i in order}
        for i in order:
            assert_close(outputs[i], scene.net(xs[i]))

    assert scene.way.calls == [(3, 2), (3, 2)]


@pytest.mark.parametrize(
    "change",
    [
        lambda s, xs: s.x.add_(1),
        lambda s, xs: xs[1].mul_(2),
        lambda s, xs: nn.init.zeros_(s.net.weight),
        lambda s, xs: s.net.eval(),
        lambda s, xs: setattr(s.net, "bias", None),
    ],
)
def test_after_a_change_what_was_computed_is_not_used(change: Callable[..., Any]) -> None:
    scene = Scene()
    xs = scene.split()
    scene(xs[0])
    change(scene, xs)

    assert_close(scene(xs[1]), scene.net(xs[1]))
    assert scene.way.calls == [(3, 2), (3, 2)]


def test_another_mode_other_arguments_and_the_same_shard_again_are_new_calls() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

    scene = Scene(Scaled())
    xs = scene.split()
    scene(xs[0], 2.0)
    with torch.no_grad():
        scene(xs[1], 2.0)
    assert torch.equal(scene(xs[1], scale=3.0), xs[1] * 3)
    assert torch.equal(scene(xs[1], scale=3.0), xs[1] * 3)
    assert torch.equal(scene(xs[0], scale=3.0), xs[0] * 3)

    assert len(scene.way.calls) == 4


def test_what_is_no_shard_is_the_transparent_call() -> None:
    scene = Scene()
    xs = scene.split()
    for x in (scene.x, xs[0] * 1, xs[1].clone()):
        assert_close(scene(x), scene.net(x))

    assert scene.way.calls == [None] * 3


def test_several_inputs_find_their_batches_each() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, masks: list[Tensor], power: Tensor) -> Tensor:
            return x * masks[0] ** power

    scene = Scene(Two())
    mask, power = torch.randn_like(scene.x), torch.tensor(2)
    xs, masks = scene.split(), scene.split(mask)
    outputs = [scene(x, masks=[m], power=power) for x, m in zip(xs, masks, strict=True)]

    assert torch.equal(torch.cat(outputs), scene.x * mask**2)
    assert scene.way.calls == [(3, 2)]
    scene(xs[0], masks=[mask[:3]], power=power)  # one of them is no shard
    assert scene.way.calls == [(3, 2), None]


def test_a_network_may_be_called_for_two_batches_in_turns() -> None:
    scene = Scene()
    ones, others = scene.split(), scene.split(scene.x + 1)
    for one, other in zip(ones, others, strict=True):
        scene(one)
        scene(other)

    assert scene.way.calls == [(3, 2)] * 2


def test_two_networks_may_get_the_same_shards_in_turns() -> None:
    one, other = Scene(), Scene()
    for x in one.split():
        assert_close(one(x), one.net(x))
        assert_close(other(x), other.net(x))

    assert one.way.calls == other.way.calls == [(3, 2)]


def test_shards_that_want_gradients_are_computed_alone_and_get_them() -> None:
    scene = Scene()
    for make in (lambda x: x.requires_grad_(), lambda x: x.requires_grad_() * 2):
        x = scene.x.clone()
        xs = scene.split(make(x))
        losses = [scene(shard).square().sum() for shard in xs]
        losses[0].backward()

        assert x.grad is not None
        assert x.grad[:3].all()
        assert not x.grad[3:].any()
    with torch.no_grad():
        [scene(shard) for shard in xs]

    assert scene.way.calls == [(3, 0), (0, 2)] * 2 + [(3, 2)]


def test_other_devices_than_the_networks() -> None:
    scene = Scene()
    (x,) = gluon.split_and_load(scene.x, "cpu:1")
    assert_close(scene(x), scene.net(x))
    assert scene.way.calls == [(0, 5)]

    swapped = evener.devices("cpu*2")[::-1]
    for x in gluon.split_and_load(scene.x, swapped, shares=(1, 4)):
        assert_close(scene(x), scene.net(x))
    assert scene.way.calls[1:] == [(0, 1), (4, 0)]

    (*_, x) = gluon.split_and_load(scene.x, "cpu*3", even_split=False)
    with pytest.raises(
        NotOnDeviceError, match=r"not on cpu:2, only on cpu:0, cpu:1.*force_reinit"
    ):
        scene(x)


def test_a_split_along_another_axis_is_an_error_with_the_way_out() -> None:
    scene = Scene()
    xs = gluon.split_and_load(scene.x, "cpu*2", batch_axis=1)

    with pytest.raises(BatchError, match=r"along axis 1.*data\.movedim\(1, 0\)"):
        scene(xs[0])


def test_an_empty_batch_and_empty_shards() -> None:
    scene = Scene()
    empty = scene.split(scene.x[:0], shares=(0, 0))
    assert [tuple(scene(x).shape) for x in empty] == [(0, 3)] * 2
    xs = scene.split(shares=(0, 5))
    outputs = [scene(x) for x in xs]

    assert_close(torch.cat(outputs), scene.net(scene.x))
    assert scene.way.calls == [None, None, (0, 5)]
    sum(output.sum() for output in outputs).backward()
    assert scene.net.weight.grad is not None


def test_what_is_kept_goes_with_the_shards_and_is_never_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explicit, "NUM_KEPT", 2)
    scene = Scene()
    splits = [scene.split() for _ in range(4)]
    for first, _ in splits:
        scene(first)

    notes = [Shard.of(first) for first, _ in splits]
    assert [len(note.split.rounds) for note in notes if note is not None] == [0, 0, 1, 1]
    scene(splits[3][1])
    assert notes[3] is not None
    assert len(notes[3].split.rounds) == 0


def test_threads_may_have_a_shard_each() -> None:
    scene = Scene()
    xs = scene.split()

    def work(x: Tensor) -> None:
        scene(x).square().sum().backward()

    threads = [threading.Thread(target=work, args=(x,)) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scene.explicit.flush()

    (expected,) = torch.autograd.grad(scene.net(scene.x).square().sum(), [scene.net.weight])
    torch.testing.assert_close(scene.net.weight.grad, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ on devices


class Net(nn.Module):
    """With a buffer that counts, an unused parameter, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        self.count += 1
        if y is not None and bool((y < 0).any()):
            raise ValueError("a negative label")
        scores = self.layers(x)
        if y is None:
            return scores
        return {"scores": scores, "loss": functional.cross_entropy(scores, y)}


@pytest.fixture
def plain() -> nn.Module:
    return Net().double()


@pytest.fixture
def net(plain: nn.Module) -> Iterator[nn.Module]:
    made = gluon.initialize(copy.deepcopy(plain), None, "cpu*3")
    yield made
    evener.release(made)


def assert_close(one: Tensor | None, other: Tensor | None) -> None:
    assert (one is None) == (other is None)
    if one is not None:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_training_and_evaluation_equal_those_of_one_device(
    net: nn.Module, plain: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = evener.devices("cpu*3")
    calls: list[Any] = []
    call = DataWay.call
    monkeypatch.setattr(
        DataWay, "call", lambda *a, **k: (calls.append(k["shares"]), call(*a, **k))[1]
    )
    trainer = gluon.Trainer(
        gluon.collect_params(net), "sgd", {"learning_rate": 0.3, "momentum": 0.9}
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    hooked: list[Tensor] = []
    net.layers[0].weight.register_hook(hooked.append)
    splits = [(3, 4, 4), (0, 5, 6), (11, 0, 0), (0, 0, 11), (1, 10, 0), (1, 1, 1), (0, 0, 1)]
    for shares in splits:
        x = torch.randn(sum(shares), 4, dtype=torch.float64)
        y = torch.randint(3, (sum(shares),))
        xs, ys = (gluon.split_and_load(t, devices, shares=shares) for t in (x, y))
        losses = [
            functional.cross_entropy(net(a), b, reduction="sum")
            for a, b in zip(xs, ys, strict=True)
        ]
        for loss in losses:
            loss.backward()
        expected = functional.cross_entropy(plain(x), y)
        optimizer.zero_grad()
        expected.backward()

        assert_close(sum(losses) / len(y), expected)
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert_close(one.grad if one.grad is None else one.grad / len(y), other.grad)
        trainer.step(len(y), ignore_stale_grad=True)
        optimizer.step()
        for one, other in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
            assert_close(one, other)
    assert len(hooked) == len(splits)
    assert calls == [list(shares) for shares in splits]

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.randn(10, 4, dtype=torch.float64)
            outputs = [net(a) for a in gluon.split_and_load(x, devices, even_split=False)]
            assert_close(torch.cat(outputs), plain(x))
    assert calls[len(splits) :] == [[4, 3, 3]] * 2


def test_a_mean_inside_is_that_of_the_shard_and_whole_batches_still_work(
    net: nn.Module, plain: nn.Module
) -> None:
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))
    for shares in ((4, 0, 3), (0, 7, 0), (1, 4, 2)):
        net.zero_grad()
        plain.zero_grad()
        xs, ys = (gluon.split_and_load(t, "cpu*3", shares=shares) for t in (x, y))
        outputs = [net(a, y=b) for a, b in zip(xs, ys, strict=True) if len(a)]
        expected = [plain(a, b) for a, b in zip(xs, ys, strict=True) if len(a)]
        for one, other in zip(outputs, expected, strict=True):
            assert_close(one["loss"], other["loss"])
            assert_close(one["scores"], other["scores"])
            one["loss"].backward()
            other["loss"].backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert_close(one.grad, other.grad)
    whole, expected = net(x, y), plain(x, y)
    assert_close(whole["loss"], expected["loss"])


def test_after_an_error_the_network_works_on(net: nn.Module, plain: nn.Module) -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, -1])
    xs, ys = (gluon.split_and_load(t, "cpu*3") for t in (x, y))
    with pytest.raises(ValueError, match="a negative label"):
        net(xs[0], ys[0])  # the shard of another device is wrong
    losses = [net(a).square().sum() for a in xs]
    losses[0].backward()
    child = psutil.Process().children()[0]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    losses[1].backward()
    with pytest.warns(FaultWarning, match="in the backward"):
        losses[2].backward()

    assert not vars(net)[STATE_NAME].explicit.pending
    plain(x).square().sum().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad)
