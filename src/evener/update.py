"""An update: what the user changed in the module, as every replica is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from evener.arena import Place
from evener.replica import from_bytes


@dataclass
class Update:
    """What changed in the user's module since it was last sent.

    Attributes:
        attributes: bytes of a dict from (number of the submodule, name) to the new value.
        removed: (number of the submodule, name) of attributes that are gone.
        requires_grad: for each shared tensor whether a gradient is wanted; None if as before.
        buffers: where in the arena the new values of private buffers lie, by their number.
    """

    attributes: bytes | None = None
    removed: list[tuple[int, str]] = field(default_factory=list)
    requires_grad: list[bool] | None = None
    buffers: dict[int, Place] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.attributes or self.removed or self.buffers) or (
            self.requires_grad is not None
        )

    def apply(
        self,
        modules: Sequence[nn.Module],
        shared: Sequence[Tensor],
        tensor_at: Callable[[Place], Tensor],
    ) -> None:
        """Make a replica follow.

        Args:
            modules: its submodules in order.
            shared: its shared tensors.
            tensor_at: gives the tensor over a place.
        """
        if self.attributes:
            for (number, name), value in from_bytes(self.attributes, shared).items():
                modules[number].__dict__[name] = value
        for number, name in self.removed:
            modules[number].__dict__.pop(name, None)
        if self.requires_grad is not None:
            for tensor, wanted in zip(shared, self.requires_grad, strict=True):
                tensor.requires_grad_(wanted)
        if self.buffers:
            keys = [
                (module, name)
                for module in modules
                for name, buffer in module._buffers.items()
                if buffer is not None and not buffer.requires_grad
            ]
            for number, place in self.buffers.items():
                module, name = keys[number]
                # A new tensor, not a copy into the old: an earlier call's graph may need that.
                module._buffers[name] = tensor_at(place).clone()
