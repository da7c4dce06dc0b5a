"""Batch norm over all devices: one mean and one variance, as on one device.

While a device runs its part of a call, torch's ``functional.batch_norm`` is another function:
it gathers from all devices (see ``exchange.gather``) what the layer needs to know of the batch::

    forward     n, mean and variance of each device's part
                mean = sum n mean_i / N      variance = sum n (var_i + (mean_i - mean)^2) / N
    backward    S = sum dy and D = sum dy x^ of each device's part, x^ = (x - mean) / std
                dx = weight / std (dy - S / N - x^ D / N)

(Ioffe and Szegedy, 2015, with the sums over the whole batch.) A part may have any size, none
included. The gradients of weight and bias are those of the part: they are added up as all others
are. Each replica updates its own running statistics, with the same numbers.

Only what a layer asks for is over all devices, a ``BatchNorm1d/2d/3d`` or ``SyncBatchNorm``: a
module that calls ``functional.batch_norm`` for something else gets what it asks for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from evener.exchange.gather import Gather


def uses_statistics(module: nn.Module) -> bool:
    """Whether a forward now takes mean and variance of the batch in some layer.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> uses_statistics(nn.Sequential(norm)), uses_statistics(norm.eval())
        (True, False)
    """
    return any(
        isinstance(each, _BatchNorm) and (each.training or each.running_mean is None)
        for each in module.modules()
    )


def most_values(module: nn.Module) -> int:
    """How many numbers a layer gives at once, at most."""
    sizes = [each.num_features for each in module.modules() if isinstance(each, _BatchNorm)]
    return 1 + 2 * max(sizes, default=0)


class _Scene(threading.local):
    """In which gather this thread is, with which layers."""

    gather: Gather | None = None
    layers: list[nn.Module] = []  # noqa: RUF012 - each thread sets its own


_scene = _Scene()
_plain: Callable[..., Tensor] = functional.batch_norm
_lock = threading.Lock()
_num_inside = 0  # how many threads need the other function


@contextmanager
def over_all(gather: Gather | None, layers: list[nn.Module]) -> Iterator[None]:
    """Take the statistics of batch norm in a block over all devices.

    Args:
        gather: where they meet; None: this device's own. It is left, or failed, with the block.
        layers: the submodules of this device's replica, in order.
    """
    if gather is None:
        yield
        return
    before = _scene.gather, _scene.layers
    _enter()
    _scene.gather, _scene.layers = gather, layers
    try:
        with _eagerly():
            yield
    except BaseException:
        gather.fail()
        raise
    else:
        gather.leave()
    finally:
        _scene.gather, _scene.layers = before
        _exit()


def _enter() -> None:
    global _num_inside, _plain  # noqa: PLW0603 - torch's function is there once for all, too
    with _lock:
        if _num_inside == 0:
            _plain = functional.batch_norm
            functional.batch_norm = _batch_norm
        _num_inside += 1


def _exit() -> None:
    global _num_inside  # noqa: PLW0603
    with _lock:
        _num_inside -= 1
        if _num_inside == 0:
            functional.batch_norm = _plain


def _eagerly() -> Any:
    """Code that was compiled has torch's own batch norm inside, or none that can wait."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _batch_norm(  # noqa: PLR0917 - torch's form
    input: Tensor,  # noqa: A002 - torch's name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002 - torch's form
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    gather = _scene.gather
    layer = sys._getframe(1).f_locals.get("self") if training and gather is not None else None
    if gather is None or not isinstance(layer, _BatchNorm):
        return _plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if eps <= 0.0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    outputs: Tensor = _OverAll.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, (running_mean, running_var), momentum, eps, _number(layer)
    )
    return outputs


def _number(layer: nn.Module) -> int:
    """The number of a layer, the same on all devices."""
    return next((i for i, each in enumerate(_scene.layers) if each is layer), -1)


def _name(number: int) -> str:
    if number < 0:
        return "a batch norm that is not registered"
    layer = _scene.layers[number]
    path = next((name for name, each in _scene.layers[0].named_modules() if each is layer), "")
    return f"{type(layer).__name__} {path!r}" if path else type(layer).__name__


def _gathered(number: int, values: Tensor) -> Tensor:
    gather = _scene.gather
    assert gather is not None  # noqa: S101 - a backward is in one, as its forward was
    return gather.all(number, values, _name)


class _OverAll(torch.autograd.Function):
    """Batch norm of this device's part, by the statistics of all."""

    @staticmethod
    def forward(  # noqa: PLR0917 - as autograd calls it
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        number: int,
    ) -> Tensor:
        mean, var, count = _statistics(x, number)
        for old, new in zip(running, (mean, var * (count / (count - 1))), strict=True):
            if old is not None:  # through .data: torch's own does not count these changes either
                old.data.mul_(1 - momentum).add_(new, alpha=momentum)
        weight, bias = _as(weight, mean), _as(bias, mean)
        ctx.save_for_backward(x, weight)
        ctx.statistics = mean, var
        ctx.eps, ctx.number, ctx.count = eps, number, count
        return _scaled(x, weight, bias, mean, var, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (mean, var) = ctx.saved_tensors, ctx.statistics
        if x.numel():
            is_training, wanted = False, [False, True, True]
            _, dots, sums = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, mean, var, None, None, is_training, ctx.eps, wanted
            )
        else:  # torch's own cannot
            dots, sums = torch.zeros_like(mean), torch.zeros_like(mean)
        dx = None
        if ctx.needs_input_grad[0]:
            total = _gathered(ctx.number, torch.cat((sums, dots)).double()).sum(0) / ctx.count
            mean_dy, mean_dot = total.chunk(2)
            wide = mean.double()
            inverse = (var.double() + ctx.eps).rsqrt()
            scale = inverse if weight is None else inverse * weight.double()
            slope = -scale * inverse * mean_dot
            shift = -scale * mean_dy - slope * wide
            zero, one = torch.zeros_like(mean), torch.ones_like(mean)
            dx = _scaled(x, slope.to(mean.dtype), shift.to(mean.dtype), zero, one, 0.0)
            shape = (1, -1, *[1] * (x.dim() - 2))
            dx.addcmul_(dy, scale.to(dy.dtype).view(shape))
        return (
            dx,
            dots if ctx.needs_input_grad[1] else None,
            sums if ctx.needs_input_grad[2] else None,
            *[None] * 4,
        )


def _statistics(x: Tensor, number: int) -> tuple[Tensor, Tensor, float]:
    """Mean and (biased) variance of each channel over all devices, and the number of values."""
    num_channels = x.shape[1]
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    if x.numel():
        own = torch.batch_norm_update_stats(x.to(dtype), None, None, 0.0)
    else:
        own = (torch.zeros(num_channels, dtype=dtype), torch.zeros(num_channels, dtype=dtype))
    size = x.numel() // max(1, num_channels)
    values = torch.cat((torch.tensor([size], dtype=torch.float64), *own))
    parts = _gathered(number, values)
    sizes = parts[:, :1]
    count = float(sizes.sum())
    if count <= 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{x.size()} on a device, and {count:g} on all"
        )
    means, vars_ = parts[:, 1 : 1 + num_channels], parts[:, 1 + num_channels :]
    mean = (sizes * means).sum(0) / count
    var = (sizes * (vars_ + (means - mean).square())).sum(0) / count
    return mean.to(dtype), var.to(dtype), count


def _scaled(  # noqa: PLR0917 - torch's form
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias``, in one pass."""
    return torch.batch_norm(
        x,
        weight,
        bias,
        mean,
        var,
        False,  # noqa: FBT003 - training
        0.0,
        eps,
        False,  # noqa: FBT003 - cuDNN
    )


def _as(parameter: Tensor | None, like: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(like.dtype)
