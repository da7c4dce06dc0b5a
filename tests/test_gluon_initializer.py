"""Initializer: Gluon's rules of what begins how."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evener import gluon
from evener.errors import ModuleError


class Own(nn.Module):
    """A normalisation of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))


def test_weights_are_random_biases_zero_and_scales_one() -> None:
    net = nn.ModuleDict(
        {
            "conv": nn.Conv2d(8, 16, 3),
            "linear": nn.Linear(40, 50),
            "lstm": nn.LSTM(4, 8),
            "batch": nn.BatchNorm2d(4),
            "layer": nn.LayerNorm(4),
            "group": nn.GroupNorm(2, 4),
            "rms": nn.RMSNorm(4),
            "own": Own(),
            "prelu": nn.PReLU(),
            "plain": nn.BatchNorm1d(3, affine=False),
        }
    )
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(7.0)
        net["batch"].running_mean.fill_(7.0)

    gluon.Normal(sigma=0.01)(net)

    for name, p in net.named_parameters():
        if "bias" in name or name.endswith("beta"):
            assert not p.any(), name
        elif name.startswith(("batch", "layer", "group", "rms", "own")):
            assert bool((p == 1).all()), name
        elif name.startswith("prelu"):
            assert p.item() == 7.0
        else:
            assert 0.007 < p.std().item() < 0.013, name
    assert not net["batch"].running_mean.any()
    assert net["batch"].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("init", "check"),
    [
        (gluon.Uniform(), lambda w: w.abs().max() <= 0.07 and w.std() > 0.03),
        (gluon.Uniform(2.0), lambda w: 1.8 < w.abs().max() <= 2.0),
        (gluon.Xavier(), lambda w: 0.1 < w.abs().max() <= (3 / 125) ** 0.5),
        (gluon.Xavier(factor_type="in", magnitude=6), lambda w: w.abs().max() <= 0.2**0.5 * 1.1),
        (gluon.Xavier("gaussian", "out", 2), lambda w: abs(w.std() / (2 / 220) ** 0.5 - 1) < 0.1),
    ],
)
def test_each_draws_what_it_says(init: gluon.Initializer, check: Callable[[Tensor], bool]) -> None:
    layer = nn.Linear(30, 220)

    init(layer)

    assert check(layer.weight.detach())


def test_fans_count_the_kernel() -> None:
    layer = nn.Conv2d(2, 4, 5)

    gluon.Xavier(factor_type="in", magnitude=1.0)(layer)

    assert 0.12 < layer.weight.abs().max() <= (1 / 50) ** 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gluon.Normal(-1.0), "sigma=-1.0: expected"),
        (lambda: gluon.Uniform(float("inf")), "scale=inf: expected"),
        (lambda: gluon.Xavier("normal"), '"uniform" or "gaussian"'),
        (lambda: gluon.Xavier(factor_type="sum"), '"avg", "in" or "out"'),
        (lambda: gluon.Xavier(magnitude=0), "above zero"),
    ],
)
def test_options_that_make_no_sense(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_has_no_shape_or_no_fan_in_is_named() -> None:
    with pytest.raises(ModuleError, match=r"^0\.weight of a LazyLinear has no shape.*one batch"):
        gluon.Normal()(nn.Sequential(nn.LazyLinear(2)))
    odd = nn.Module()
    odd.factors = nn.Parameter(torch.ones(3))
    with pytest.raises(
        ModuleError, match=r"^factors of a Module: Xavier.*\(3,\).*as for net\.app"
    ):
        gluon.Xavier()(odd)
    gluon.Normal()(odd)
    with pytest.raises(NotImplementedError):
        gluon.Initializer()(odd)
