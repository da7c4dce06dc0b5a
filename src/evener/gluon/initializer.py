"""Initializer: the values that a network begins with, by Gluon's rules.

Weights are drawn at random; biases are zero; the scale of a normalisation is one, its shift zero,
its running mean zero and its running variance one.

Source: ``mxnet.initializer`` (``Normal``, ``Uniform``, ``Xavier`` with their defaults).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evener.errors import ModuleError

#: Names of a scale and of a shift in modules that are not torch's own.
_ONES, _ZEROS = ("gamma",), ("beta", "bias")
_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Initializer:
    """What the initializers have in common; each says what it draws by :meth:`draw`."""

    @torch.no_grad()
    def __call__(self, net: nn.Module) -> None:
        """Give a network its first values, in place, from torch's CPU generator.

        Args:
            net: any module. Of a PReLU nothing is changed: it begins where torch lets it begin.

        Raises:
            ModuleError: if a parameter has no shape yet, or cannot be drawn.
        """
        for path, module in net.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.reset_running_stats()
            if isinstance(module, nn.PReLU):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._set(module, f"{path}.{name}".lstrip("."), parameter)

    def draw(self, weight: Tensor) -> None:
        """Draw the values of a weight, in place."""
        raise NotImplementedError

    def _set(self, module: nn.Module, name: str, parameter: Tensor) -> None:
        if is_lazy(parameter):
            raise ModuleError(
                f"{name} of a {type(module).__name__} has no shape before the first call; call "
                "the network with one batch first, then initialize it"
            )
        last = name.rpartition(".")[2]
        if last.startswith(_ZEROS):
            parameter.zero_()
        elif last in _ONES or isinstance(module, _NORMALISATIONS):
            parameter.fill_(1.0)
        else:
            try:
                self.draw(parameter)
            except ValueError as error:
                raise ModuleError(f"{name} of a {type(module).__name__}: {error}") from error


class Normal(Initializer):
    """Weights from a normal distribution around zero.

    Args:
        sigma: its standard deviation, zero or more. Default 0.01.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> Normal(sigma=0.0)(layer)
        >>> layer.weight.tolist(), layer.bias.tolist()
        ([[0.0, 0.0]], [0.0])
    """

    def __init__(self, sigma: float = 0.01) -> None:
        if not 0 <= sigma < math.inf:
            raise ValueError(f"sigma={sigma!r}: expected a number of zero or more")
        self.sigma = sigma

    def draw(self, weight: Tensor) -> None:
        """Draw the values of a weight, in place."""
        weight.normal_(0.0, self.sigma)


class Uniform(Initializer):
    """Weights with equal probability from an interval around zero.

    Args:
        scale: they are between ``-scale`` and ``scale``. Default 0.07.
    """

    def __init__(self, scale: float = 0.07) -> None:
        if not 0 <= scale < math.inf:
            raise ValueError(f"scale={scale!r}: expected a number of zero or more")
        self.scale = scale

    def draw(self, weight: Tensor) -> None:
        """Draw the values of a weight, in place."""
        weight.uniform_(-self.scale, self.scale)


class Xavier(Initializer):
    """Weights that keep the size of the signal from layer to layer (Glorot and Bengio, 2010).

    With ``scale = sqrt(magnitude / factor)`` they are uniform between ``-scale`` and ``scale``, or
    normal with that standard deviation. A weight of shape (out, in, *kernel) has fan-in in x
    kernel area and fan-out out x kernel area.

    Args:
        rnd_type: ``"uniform"`` (default) or ``"gaussian"``.
        factor_type: what ``factor`` is: ``"avg"`` of fan-in and fan-out (default), ``"in"`` or
            ``"out"``.
        magnitude: see above. Default 3.
    """

    def __init__(
        self, rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3.0
    ) -> None:
        if rnd_type not in ("uniform", "gaussian"):
            raise ValueError(f'rnd_type={rnd_type!r}: expected "uniform" or "gaussian"')
        if factor_type not in ("avg", "in", "out"):
            raise ValueError(f'factor_type={factor_type!r}: expected "avg", "in" or "out"')
        if not 0 < magnitude < math.inf:
            raise ValueError(f"magnitude={magnitude!r}: expected a number above zero")
        self.rnd_type = rnd_type
        self.factor_type = factor_type
        self.magnitude = magnitude

    def draw(self, weight: Tensor) -> None:
        """Draw the values of a weight, in place.

        Raises:
            ValueError: if it has less than two dimensions, and so no fan-in.
        """
        if weight.dim() < 2:  # noqa: PLR2004 - out and in
            raise ValueError(
                f"Xavier cannot draw a weight of shape {tuple(weight.shape)}, which has no "
                "fan-in; give a function of a submodule as init, as for net.apply"
            )
        area = math.prod(weight.shape[2:])
        fan_in, fan_out = weight.shape[1] * area, weight.shape[0] * area
        factor = {"avg": (fan_in + fan_out) / 2, "in": fan_in, "out": fan_out}[self.factor_type]
        scale = math.sqrt(self.magnitude / factor)
        if self.rnd_type == "uniform":
            weight.uniform_(-scale, scale)
        else:
            weight.normal_(0.0, scale)
