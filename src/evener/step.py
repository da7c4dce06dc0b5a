"""A step: forward, loss and backward of a copy of a module, and every tensor that it leaves.

The user's module is never run: each step has a copy of its own, and inputs of its own. So there
is nothing to put back but the generators of random numbers, and an error leaves the module as it
was. What a step leaves is kept by kind and name::

    output ['logits']   loss   gradient layers.0.weight   buffer norm.running_mean

Of attributes, of inputs and of parameters' values only those are kept that the step has changed.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from evener.alone import settled
from evener.arena import normal_mode
from evener.errors import ModuleError
from evener.leaves import alike, named_attributes, named_leaves
from evener.pickling import dumps
from evener.still import StillForward, generators_kept, random_numbers_still
from evener.trees import flatten, unflatten

#: The kinds of what a step leaves, in the order in which they are told.
KINDS = ("output", "loss", "gradient", "buffer", "parameter", "attribute", "input")

Named = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Precision:
    """The dtypes that a step computes in: those of the module, or others.

    Attributes:
        real: what floating-point tensors become; None: they stay what they are.
    """

    real: torch.dtype | None = None

    def convert(self, tensor: Tensor) -> Tensor:
        """A tensor in this precision; integers stay what they are."""
        if self.real is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return tensor.to(self.real.to_complex() if tensor.is_complex() else self.real)


@dataclass
class Step:
    """What has to be done in each step.

    Args:
        module: the user's module; only copies of it run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        loss: the loss as a function of the output; None: see :meth:`_loss_of`.
        seed: where random numbers begin.
        grad: whether there is a backward, where anything requires a gradient.
        weights: of the sum that stands for a loss, by the outputs' names.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None
    seed: int
    grad: bool
    weights: dict[str, Tensor] = field(default_factory=dict)

    def copy(self, precision: Precision, *, still: bool = False) -> nn.Module:
        """A plain copy of the module, without gradients.

        Raises:
            ModuleError: if it can be neither copied nor pickled.
        """
        with normal_mode():  # the user may call under inference_mode
            return self._copy(precision, still=still)

    def _copy(self, precision: Precision, *, still: bool) -> nn.Module:
        made = copied(self.module)
        if any(map(is_lazy, made.parameters())):
            with torch.no_grad(), generators_kept(self.seed):
                args, kwargs = self.inputs(Precision())
                made(*args, **kwargs)
            self.module = made = copied(made)
        if precision.real is not None:
            made._apply(precision.convert)  # type: ignore[no-untyped-call]
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.grad = None
        if still:
            made.forward = StillForward(made.forward, self.seed)
        return made

    def run(self, module: nn.Module, precision: Precision, before: nn.Module) -> Named:
        """Run one step of a copy.

        Args:
            module: the copy, plain or made parallel.
            precision: that of the copy.
            before: another such copy, which has not run: what the step changes is told by it.

        Returns:
            What it leaves, by kind and name.
        """
        default = torch.get_default_dtype()
        args, kwargs = self.inputs(precision)
        given = dict(_named(*self.inputs(precision)))
        try:
            if precision.real is not None:
                torch.set_default_dtype(precision.real)
            is_still = isinstance(vars(before).get("forward"), StillForward)
            with (
                generators_kept(self.seed),
                random_numbers_still() if is_still else nullcontext(),
                # What the user has around it is for the module's own precision.
                nullcontext() if precision.real is None else torch.autocast("cpu", enabled=False),
            ):
                output = settled(module(*args, **kwargs))
                loss = self._loss_of(output, precision) if self.grad else None
                if loss is not None and loss.requires_grad:
                    torch.autograd.backward(loss)
        finally:
            torch.set_default_dtype(default)
        found: Named = {("output", name): _kept(leaf) for name, leaf in named_leaves(output)}
        if loss is not None and self.loss is not None:
            found["loss", ""] = _kept(loss)
        for name, leaf in _named(args, kwargs):
            if isinstance(leaf, Tensor):
                if leaf.is_leaf and leaf.grad is not None:
                    found["gradient", name] = _kept(leaf.grad)
                if not alike(leaf, given[name]):
                    found["input", name] = _kept(leaf)
        return found | _left_in(module, before)

    def inputs(self, precision: Precision) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of a step's own, as dense as the user's; gradients begin at them."""
        leaves, structure = flatten((self.args, self.kwargs))
        made: dict[int, Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in made:
                own = precision.convert(leaf.detach()).clone()
                made[id(leaf)] = own.requires_grad_(leaf.requires_grad and self.grad)
        args, kwargs = unflatten(structure, [made.get(id(leaf), leaf) for leaf in leaves])
        return args, kwargs

    def _loss_of(self, output: Any, precision: Precision) -> Tensor | None:
        """The number whose gradient is taken.

        Without a loss of the user's: the output itself if it is one number, else the sum of all
        outputs of floats, each times a weight that is drawn once.
        """
        if self.loss is not None:
            try:
                loss = self.loss(output)
            except Exception:
                if precision.real is None:
                    raise
                # The user's targets have the dtype of the module.
                loss = self.loss(pytree.tree_map(_as_default, output))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"loss(output) returned {what}; expected a tensor with one number, as from "
                    "loss=lambda output: nn.functional.cross_entropy(output, target)"
                )
            return loss
        wanted = [
            (name, leaf)
            for name, leaf in named_leaves(output)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if len(wanted) == 1 and wanted[0][1].dim() == 0 and not wanted[0][1].is_complex():
            return wanted[0][1]
        terms = [(leaf * self._weight(name, leaf)).sum() for name, leaf in wanted]
        return sum((term.abs() if term.is_complex() else term for term in terms[1:]), _real(terms))

    def _weight(self, name: str, like: Tensor) -> Tensor:
        if name not in self.weights or self.weights[name].shape != like.shape:
            generator = torch.Generator().manual_seed(len(self.weights))
            self.weights[name] = torch.randn(
                like.shape, generator=generator, dtype=torch.float64, device="cpu"
            )
        return self.weights[name].to(like)


def _left_in(module: nn.Module, before: nn.Module) -> Named:
    """What a step has left in a module."""
    found: Named = {("buffer", name): _kept(buffer) for name, buffer in module.named_buffers()}
    old = dict(before.named_parameters())
    for name, parameter in module.named_parameters():
        if name in old and not alike(parameter, old[name]):
            found["parameter", name] = _kept(parameter)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.requires_grad:
            found["gradient", name] = None if tensor.grad is None else _kept(tensor.grad)
    was = dict(named_attributes(before))
    for name, value in named_attributes(module):
        if name not in was or not alike(value, was[name]):
            found["attribute", name] = _kept(value)
    return found


def _real(terms: Sequence[Tensor]) -> Any:
    if not terms:
        return None
    return terms[0].abs() if terms[0].is_complex() else terms[0]


def _as_default(leaf: Any) -> Any:
    is_wide = isinstance(leaf, Tensor) and leaf.dtype == torch.float64
    return leaf.float() if is_wide else leaf


def copied(module: nn.Module) -> nn.Module:
    """A plain copy of a module, parallel or not.

    Raises:
        ModuleError: if it can be neither copied nor pickled.
    """
    # What an earlier forward has kept belongs to its graph, and cannot be copied with it.
    memo = {
        id(value): value.detach()
        for _, value in named_attributes(module)
        if isinstance(value, Tensor) and not value.is_leaf
    }
    with suppress(Exception):  # such as a lock, which pickles may leave out
        return copy.deepcopy(module, memo)
    try:
        made: nn.Module = pickle.loads(dumps(module))  # noqa: S301 - made here
    except Exception as error:
        raise ModuleError(
            f"this {type(module).__name__} can be neither copied nor pickled ({error}), and to "
            "verify it takes copies; leave out in __getstate__ what cannot be copied"
        ) from error
    return made


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Walk through inputs."""
    for i, value in enumerate(args):
        yield from named_leaves(value, f"args[{i}]")
    for name, value in kwargs.items():
        yield from named_leaves(value, f"kwargs[{name!r}]")


def _kept(value: Any) -> Any:
    """A value that later steps do not change."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.to_dense().clone() if value.layout != torch.strided else value.clone()
    return value
