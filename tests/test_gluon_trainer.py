"""Trainer: the step of one device, whatever the split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import evener
from evener import gluon
from evener.errors import StaleGradientError


def make() -> tuple[nn.Module, gluon.Trainer]:
    net = nn.Linear(3, 2)
    return net, gluon.Trainer(gluon.collect_params(net), "sgd", {"learning_rate": 0.5})


def test_a_step_takes_the_mean_of_summed_gradients_and_clears_them() -> None:
    net, trainer = make()
    x, before = torch.randn(4, 3), net.weight.detach().clone()
    net(x).sum().backward()

    trainer.step(4)

    torch.testing.assert_close(net.weight.detach(), before - 0.5 * x.mean(0))
    assert net.weight.grad is None


def test_gradients_can_be_clipped_in_between() -> None:
    net = gluon.initialize(nn.Linear(3, 2), None, "cpu*2")
    trainer = gluon.Trainer(gluon.collect_params(net), torch.optim.SGD, {"lr": 1.0})
    xs = gluon.split_and_load(torch.randn(4, 3), "cpu*2")
    losses = [net(x).sum() for x in xs]
    losses[0].backward()  # that of the other shard is not wanted
    before = [p.detach().clone() for p in net.parameters()]

    trainer.allreduce_grads()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 4 * 0.1)
    trainer.update(4)

    assert norm > 0.4
    moved = [p.detach() - old for p, old in zip(net.parameters(), before, strict=True)]
    torch.testing.assert_close(torch.cat([m.flatten() for m in moved]).norm(), torch.tensor(0.1))
    evener.release(net)


def test_parameters_without_a_new_gradient_are_an_error_or_left_alone() -> None:
    net, trainer = make()
    net.bias.requires_grad_(requires_grad=False)
    before = net.weight.detach().clone()

    with pytest.raises(StaleGradientError, match=r"^weight got no gradient.*ignore_stale_grad=Tr"):
        trainer.step(4)
    trainer.step(4, ignore_stale_grad=True)

    assert torch.equal(net.weight, before)


def test_many_names_are_not_all_shown() -> None:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    trainer = gluon.Trainer(gluon.collect_params(net), "sgd")

    with pytest.raises(StaleGradientError, match=r"^0\.weight, 0\.bias, 1\.weight and 5 others"):
        trainer.step(1)


@pytest.mark.parametrize("batch_size", [0, -1, float("nan")])
def test_a_batch_without_samples_changes_nothing(batch_size: float) -> None:
    net, trainer = make()
    net(torch.ones(1, 3)).sum().backward()

    with pytest.raises(ValueError, match=r"batch_size=.*whole batch"):
        trainer.step(batch_size)

    assert net.weight.grad is not None


def test_sparse_gradients() -> None:
    net = nn.Embedding(3, 2, sparse=True)
    before = net.weight.detach().clone()
    trainer = gluon.Trainer(gluon.collect_params(net), "sgd", {"learning_rate": 1.0})
    net(torch.tensor([1, 1])).sum().backward()

    trainer.step(4)

    torch.testing.assert_close(
        before - net.weight.detach(), torch.tensor([[0.0] * 2, [0.5] * 2, [0.0] * 2])
    )


@pytest.mark.parametrize(
    ("optimizer", "options", "kind", "group"),
    [
        (
            "sgd",
            {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        ),
        ("SGD", None, torch.optim.SGD, {}),
        (
            "adam",
            {"learning_rate": 0.1, "beta1": 0.8, "epsilon": 1e-6},
            torch.optim.Adam,
            {"lr": 0.1, "betas": (0.8, 0.999), "eps": 1e-6},
        ),
        (
            torch.optim.AdamW,
            {"lr": 0.2, "beta2": 0.9, "amsgrad": True},
            torch.optim.AdamW,
            {"lr": 0.2, "betas": (0.9, 0.9), "amsgrad": True},
        ),
    ],
)
def test_optimizers_by_name_and_options_by_both_names(
    optimizer: Any, options: dict[str, Any] | None, kind: type, group: dict[str, Any]
) -> None:
    trainer = gluon.Trainer(gluon.collect_params(nn.Linear(2, 1)), optimizer, options)

    assert type(trainer.optimizer) is kind
    assert group.items() <= trainer.optimizer.param_groups[0].items()


def test_the_learning_rate_can_be_read_set_and_scheduled() -> None:
    _, trainer = make()
    trainer.set_learning_rate(0.25)
    assert trainer.learning_rate == 0.25
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
    trainer.step(1, ignore_stale_grad=True)
    scheduler.step()
    assert trainer.learning_rate == 0.125
    with pytest.raises(ValueError, match="learning rate -1"):
        trainer.set_learning_rate(-1)


@pytest.mark.parametrize(
    ("params", "optimizer", "options", "message"),
    [
        (dict, "sgd", {}, "no parameters to train"),
        (lambda: nn.Linear(2, 1).parameters(), "sgd", {}, r"a Parameter among params.*collect"),
        (None, "sdg", {}, r"optimizer='sdg' is not known; expected sgd, adam"),
        (None, torch.optim.SGD([torch.zeros(1)]), {}, r"class of torch\.optim; the trainer makes"),
        (None, "sgd", {"rate": 1}, r"SGD has no option rate; expected some of learning_rate, wd"),
        (None, "sgd", {"beta1": 1}, r"SGD has no option beta1"),
    ],
)
def test_what_cannot_be_used_is_told_with_what_can(
    params: Callable[[], Any] | None, optimizer: Any, options: dict[str, Any], message: str
) -> None:
    given = gluon.collect_params(nn.Linear(2, 1)) if params is None else params()

    with pytest.raises(ValueError, match=message):
        gluon.Trainer(given, optimizer, options)
