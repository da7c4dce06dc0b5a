"""Round: rows handed out once, and one backward for all that was handed out."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.errors import EvenerError
from evener.gluon.pending import Pending
from evener.gluon.round import Round, only
from evener.gluon.situation import Situation
from evener.reductions import Means


class Scene:
    """A round over a batch of 7 whose joint call was an ordinary one."""

    def __init__(self, *shares: int, outputs: Any = None) -> None:
        self.net = nn.Linear(2, 3).double()
        self.x = torch.randn(7, 2, dtype=torch.float64)
        self.joint = self.net(self.x)
        self.pending = Pending()
        self.num_backwards = 0
        self.net.weight.register_hook(self._count)
        given = self.joint if outputs is None else outputs(self.joint)
        self.round = Round(self.net, given, shares, self.pending, Situation(self.net, [], []))
        self.parts = list(self.net(self.x).split(shares))

    def _count(self, _: Tensor) -> None:
        self.num_backwards += 1

    def assert_gradients_of(self, loss: Tensor) -> None:
        for p, expected in zip(
            self.net.parameters(),
            torch.autograd.grad(loss, list(self.net.parameters())),
            strict=True,
        ):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)


def loss_of(rows: Tensor) -> Tensor:
    return rows.square().sum()


def test_each_shard_gets_its_rows_once() -> None:
    scene = Scene(3, 4)

    rows = [scene.round.take(i) for i in range(2)]

    assert [torch.equal(a, b) for a, b in zip(rows, scene.parts, strict=True)] == [True, True]
    assert scene.round.is_over
    assert not scene.round.offers(0, (scene.net, [], []))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_last_backward_runs_for_all(order: tuple[int, ...]) -> None:
    scene = Scene(3, 1, 3)
    losses = [loss_of(scene.round.take(i)) for i in range(3)]
    for i in order[:2]:
        losses[i].backward()
        assert scene.num_backwards == 0
    losses[order[2]].backward()

    assert scene.num_backwards == 1
    scene.assert_gradients_of(sum(map(loss_of, scene.parts)))


def test_the_losses_may_be_added_first() -> None:
    scene = Scene(3, 4)

    sum(loss_of(scene.round.take(i)) for i in range(2)).backward()

    assert scene.num_backwards == 1
    scene.assert_gradients_of(sum(map(loss_of, scene.parts)))


def test_a_backward_before_the_next_shard_does_not_wait() -> None:
    scene = Scene(3, 4)
    for i in range(2):
        loss_of(scene.round.take(i)).backward()
        assert scene.num_backwards == i + 1

    scene.assert_gradients_of(sum(map(loss_of, scene.parts)))


def test_who_is_asked_does_not_wait_and_what_comes_later_is_added() -> None:
    scene = Scene(3, 4)
    losses = [loss_of(scene.round.take(i)) for i in range(2)]
    losses[1].backward()
    scene.pending.flush()

    scene.assert_gradients_of(loss_of(scene.parts[1]))
    scene.parts = list(scene.net(scene.x).split((3, 4)))
    losses[0].backward()
    assert scene.num_backwards >= 2
    scene.assert_gradients_of(sum(map(loss_of, scene.parts)))


def test_a_kept_graph_can_be_used_again() -> None:
    scene = Scene(3, 4)
    losses = [loss_of(scene.round.take(i)) for i in range(2)]
    for keep in (True, False):
        for loss in losses:
            loss.backward(retain_graph=keep)

    scene.assert_gradients_of(2 * sum(map(loss_of, scene.parts)))


def test_two_losses_of_each_shard() -> None:
    scene = Scene(3, 4)
    for i in range(2):
        rows = scene.round.take(i)
        loss_of(rows).backward(retain_graph=True)
        rows.sum().backward()

    scene.assert_gradients_of(sum(loss_of(part) + part.sum() for part in scene.parts))


def test_a_graph_that_was_not_kept_is_an_error() -> None:
    scene = Scene(3, 4)
    rows = [scene.round.take(i) for i in range(2)]
    for part in rows:
        part.sum().backward()

    with pytest.raises(RuntimeError, match="second time"):
        rows[0].sum().backward()


def test_second_derivatives_are_refused() -> None:
    scene = Scene(3, 4)

    with pytest.raises(EvenerError, match="create_graph=True"):
        scene.round.take(0).sum().backward(create_graph=True)


def test_a_gradient_that_waits_is_a_copy() -> None:
    scene = Scene(3, 4)
    rows = [scene.round.take(i) for i in range(2)]
    gradient = torch.ones(3, 3, dtype=torch.float64)
    rows[0].backward(gradient)
    gradient.zero_()
    rows[1].sum().backward()

    scene.assert_gradients_of(sum(part.sum() for part in scene.parts))


def test_rows_may_be_changed_in_place() -> None:
    scene = Scene(3, 4)
    rows = [scene.round.take(i) for i in range(2)]
    rows[0].mul_(2)

    assert torch.equal(rows[1], scene.parts[1])
    sum(map(loss_of, rows)).backward()
    scene.assert_gradients_of(loss_of(scene.parts[0] * 2) + loss_of(scene.parts[1]))


def test_cleared_gradients_do_not_come_back() -> None:
    scene = Scene(3, 4)
    losses = [loss_of(scene.round.take(i)) for i in range(2)]
    losses[0].backward()
    scene.net.zero_grad()
    losses[1].backward()

    scene.assert_gradients_of(loss_of(scene.parts[1]))


def test_a_failed_backward_is_over_and_nothing_waits() -> None:
    scene = Scene(3, 4)

    def fail(_: Tensor) -> None:
        raise ValueError("a hook of the user's")

    scene.net.bias.register_hook(fail)
    rows = [scene.round.take(i) for i in range(2)]
    rows[0].sum().backward()
    with pytest.raises(ValueError, match="a hook of the user's"):
        rows[1].sum().backward()

    assert not scene.pending
    with pytest.raises(RuntimeError, match="second time"):
        rows[1].sum().backward()


def test_nested_outputs_means_and_values_that_are_no_tensors() -> None:
    def outputs(joint: Tensor) -> Any:
        means = torch.stack([part.mean() for part in joint.split((3, 4))])
        return {
            "scores": joint,
            "best": joint.argmax(1),
            "loss": Means(means),
            "name": ("a", 1),
            "count": torch.tensor(5),
        }

    scene = Scene(3, 4, 0, outputs=outputs)
    taken = [scene.round.take(i) for i in range(3)]

    for i in range(2):
        assert torch.equal(taken[i]["scores"], scene.parts[i])
        assert torch.equal(taken[i]["best"], scene.parts[i].argmax(1))
        assert taken[i]["loss"].shape == ()
        assert (taken[i]["name"], int(taken[i]["count"])) == (("a", 1), 5)
        assert not taken[i]["best"].requires_grad
        (taken[i]["loss"] + taken[i]["scores"].sum()).backward()
    scene.assert_gradients_of(sum(part.mean() + part.sum() for part in scene.parts[:2]))
    empty = taken[2]
    assert empty["scores"].shape == (0, 3)
    assert empty["loss"].isnan()
    (empty["scores"].sum() + empty["loss"]).backward()


def test_an_unused_output_gets_no_gradient() -> None:
    scene = Scene(3, 4, outputs=lambda joint: (joint, joint * 2))
    for i in range(2):
        scene.round.take(i)[0].sum().backward()

    scene.assert_gradients_of(sum(part.sum() for part in scene.parts))


def test_one_shard_with_all_samples_has_the_networks_own_graph() -> None:
    scene = Scene(0, 7)
    empty, rows = scene.round.take(0), scene.round.take(1)

    assert rows is scene.joint
    assert empty.shape == (0, 3)
    (rows.square().sum() + empty.sum()).backward()
    scene.assert_gradients_of(loss_of(scene.parts[1]))
    mean = torch.ones(1, requires_grad=True)
    assert only((Means(mean), 3))[0].shape == ()


def test_without_gradients_rows_are_plain() -> None:
    with torch.no_grad():
        scene = Scene(3, 4)
        rows = [scene.round.take(i) for i in range(2)]

    assert not any(part.requires_grad for part in rows)
    assert torch.equal(torch.cat(rows), torch.cat(scene.parts))


def test_the_joint_values_are_the_users_alone_and_nothing_lives_longer_than_its_graph() -> None:
    gc.disable()
    try:
        scene = Scene(3, 4)
        rows = [scene.round.take(i) for i in range(2)]
        losses = [part.sum() for part in rows]
        round_ = weakref.ref(scene.round)
        del scene.round

        # One number stands for all of them now.
        assert scene.joint.untyped_storage().nbytes() == 8
        assert rows[0].untyped_storage().nbytes() == 7 * 3 * 8
        assert round_() is not None
        for loss in losses:
            loss.backward()
        del rows, losses, loss
        assert round_() is None
    finally:
        gc.enable()
