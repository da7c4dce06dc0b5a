"""Trainer: a step of an optimizer with gradients that were summed over all shards.

::

    losses = [loss(net(x), y) for x, y in zip(xs, ys)]     sums over the samples of each shard
    for l in losses: l.backward()                          .grad: the sum over the whole batch
    trainer.step(batch_size)                               divided by the batch size: the mean

So how the batch was split does not matter, and neither does a shard of size zero. That holds for
losses that are sums, as with ``reduction="sum"``. Losses that are means would be divided twice,
and each shard would count the same, whatever its size.

Source: ``Trainer`` of ``mxnet.gluon``. There, gradients of one backward overwrite those of the one
before; here, they add up until the step, as everywhere in PyTorch, and the step clears them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evener.errors import StaleGradientError
from evener.gluon.network import flush
from evener.gluon.parameter import Parameter

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
}
#: Gluon's names of options, and torch's.
OPTIONS = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}


class Trainer:
    """Changes parameters by their gradients.

    Args:
        params: what :func:`collect_params` returned, or some of it.
        optimizer: ``"sgd"``, ``"adam"``, ``"adamw"``, ``"adamax"``, ``"nadam"``, ``"adagrad"``,
            ``"adadelta"`` or ``"rmsprop"``, or a class of ``torch.optim``.
        optimizer_params: its options, by Gluon's names (``learning_rate``, ``momentum``, ``wd``,
            ``beta1``, ``beta2``, ``epsilon``) or torch's. Default: those of ``torch.optim``.

    Attributes:
        optimizer: the optimizer of ``torch.optim``, for schedulers and checkpoints.

    Raises:
        ValueError: if ``params`` is empty or no parameters, ``optimizer`` is not known, or it has
            no such option.

    Example:
        >>> from evener.gluon.parameter import collect_params
        >>> net = torch.nn.Linear(1, 1)
        >>> trainer = Trainer(collect_params(net), "sgd", {"learning_rate": 0.1})
        >>> trainer.learning_rate
        0.1
    """

    def __init__(
        self,
        params: Mapping[str, Parameter] | Iterable[Parameter],
        optimizer: str | type[Optimizer],
        optimizer_params: Mapping[str, Any] | None = None,
    ) -> None:
        self._params = list(params.values() if isinstance(params, Mapping) else params)
        for parameter in self._params:
            if not isinstance(parameter, Parameter):
                raise ValueError(  # noqa: TRY004 - as for all that is given wrongly
                    f"a {type(parameter).__name__} among params; expected what "
                    "evener.gluon.collect_params(net) returns"
                )
        if not self._params:
            raise ValueError("no parameters to train; give evener.gluon.collect_params(net)")
        self._tensors = [parameter.torch for parameter in self._params]
        self._nets = list({id(p.net): p.net for p in self._params}.values())
        self.optimizer = _make(optimizer, self._tensors, dict(optimizer_params or {}))

    @property
    def learning_rate(self) -> float:
        """The learning rate, of the first group of the optimizer's parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate for all parameters.

        Raises:
            ValueError: if it is below zero.
        """
        if not lr >= 0:
            raise ValueError(f"learning rate {lr!r}: expected a number of zero or more")
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(
        self,
        batch_size: float,
        ignore_stale_grad: bool = False,  # noqa: FBT001, FBT002 - Gluon's own signature
    ) -> None:
        """Change the parameters by the mean of the gradients, and clear these.

        The same as :meth:`allreduce_grads` and then :meth:`update`.

        Args:
            batch_size: what the sum of the gradients is divided by: the samples of the whole
                batch, not of a shard. Above zero.
            ignore_stale_grad: whether parameters without a new gradient are left as they are.
                Default: they are an error, for they show that a part of the network was not used.

        Raises:
            ValueError: if ``batch_size`` is not above zero. Nothing is changed.
            StaleGradientError: if a parameter has no gradient from a backward since the last step,
                or had changed before its gradient was complete. No parameter is changed.
        """
        self.update(batch_size, ignore_stale_grad)

    def allreduce_grads(self) -> None:
        """Complete the sums over the devices, for what has to be done with them before the update.

        Such as clipping: the gradients are sums over the batch, so compare with the threshold
        times the batch size. Where each shard's loss has had its backward, they are complete.

        Raises:
            StaleGradientError: if the parameters have changed since the backward.
        """
        for net in self._nets:
            flush(net)

    def update(
        self,
        batch_size: float,
        ignore_stale_grad: bool = False,  # noqa: FBT001, FBT002 - Gluon's own signature
    ) -> None:
        """Change the parameters by their gradients, which are sums; see :meth:`step`."""
        if not batch_size > 0:
            raise ValueError(
                f"batch_size={batch_size!r}: expected the samples of the whole batch, above zero"
            )
        self.allreduce_grads()
        pairs = zip(self._params, self._tensors, strict=True)
        stale = [p.name for p, tensor in pairs if tensor.requires_grad and tensor.grad is None]
        if stale and not ignore_stale_grad:
            raise StaleGradientError(
                f"{_some(stale)} got no gradient from a backward since the last step; if only a "
                "part of the network is meant to be trained, give ignore_stale_grad=True, or "
                "leave the other parameters out of the trainer"
            )
        gradients = [tensor.grad for tensor in self._tensors if tensor.grad is not None]
        dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
        with torch.no_grad():
            if dense:  # a multiplication, for a division takes several times as long
                torch._foreach_mul_(dense, 1.0 / batch_size)
            for gradient in gradients:
                if gradient.layout != torch.strided:
                    gradient.mul_(1.0 / batch_size)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _make(
    optimizer: str | type[Optimizer], params: list[nn.Parameter], options: dict[str, Any]
) -> Optimizer:
    if isinstance(optimizer, str):
        if optimizer.lower() not in OPTIMIZERS:
            raise ValueError(
                f"optimizer={optimizer!r} is not known; expected {', '.join(OPTIMIZERS)}, or a "
                "class of torch.optim"
            )
        make = OPTIMIZERS[optimizer.lower()]
    elif isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        make = optimizer
    else:
        raise ValueError(  # noqa: TRY004 - as for all that is given wrongly
            f'optimizer={optimizer!r}: expected a name such as "sgd", or a class of torch.optim; '
            "the trainer makes the object itself"
        )
    known = inspect.signature(make).parameters
    if {"beta1", "beta2"} & options.keys() and "betas" in known:
        first, second = known["betas"].default
        options["betas"] = (options.pop("beta1", first), options.pop("beta2", second))
    named = {OPTIONS.get(name, name): value for name, value in options.items()}
    unknown = [name for name in named if name not in known or name == "params"]
    if unknown:
        raise ValueError(
            f"{make.__name__} has no option {', '.join(unknown)}; expected some of "
            f"{', '.join([*OPTIONS, *(name for name in known if name != 'params')])}"
        )
    made: Optimizer = make(params, **named)
    return made


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} others"  # noqa: PLR2004
