"""State: what a replica must be like to run a piece of an earlier call again.

Parameters are shared, and must not have changed since (their versions tell). Attributes and
buffers may have: the first device's own forward changes them, a later call does, the user does. Of
each call that may have to be run again the main process keeps how they were before it::

    attributes   the dictionaries that the watch has replaced by new ones, not changed
    buffers      the values that helpers were told, each time in a new place of the arena

What is inside of an attribute, such as the items of a list, is as it is now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evener.arena import Arena, Place, put
from evener.contents import mark, same
from evener.errors import HelperDiedError
from evener.replica import to_bytes
from evener.update import Update
from evener.watch import is_followed

#: Larger buffers are not copied before they are changed for the first time.
COPIED_BYTES = 1 << 24


class Told(NamedTuple):
    """The values of a buffer as helpers were told.

    Attributes:
        values: the values, over the arena; or the buffer itself.
        place: where they lie.
        mark: where it is the buffer itself, its mark at that time.
    """

    values: Tensor
    place: Place | None
    mark: Any = None


def told(arena: Arena, buffers: Mapping[int, Tensor]) -> dict[int, Told]:
    """Put the values of buffers into a new region, which is free when nobody holds them.

    Args:
        arena: the team's.
        buffers: the buffers by their numbers.
    """
    if not buffers:
        return {}
    places, region = put(arena, list(buffers.values()))
    region.close()
    return {
        number: Told(region.tensor(place), place)
        for number, place in zip(buffers, places, strict=True)
    }


def told_first(arena: Arena, buffers: Mapping[int, Tensor]) -> dict[int, Told]:
    """The same for buffers that helpers have got with the module itself."""
    small = {i: each for i, each in buffers.items() if each.nbytes <= COPIED_BYTES}
    large = {i: Told(each, None, mark(each)) for i, each in buffers.items() if i not in small}
    return told(arena, small) | large


class Moment:
    """What the user's own module is like now, to put it back.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._attributes = [dict(vars(each)) for each in modules]
        self._buffers = [dict(each._buffers) for each in modules]
        buffers = [b for part in self._buffers for b in part.values() if b is not None]
        self._values = [(b, b.detach().clone()) for b in buffers if b.nbytes <= COPIED_BYTES]
        self._large = [(b, mark(b)) for b in buffers if b.nbytes > COPIED_BYTES]

    def put_back(self, module: nn.Module) -> None:
        """Make the module as it was, of the same structure.

        Raises:
            HelperDiedError: if a large buffer has changed since.
        """
        for buffer, then in self._large:
            _check_large(buffer, then)
        modules = zip(module.modules(), self._attributes, self._buffers, strict=True)
        for number, (each, attributes, buffers) in enumerate(modules):
            now = vars(each)
            for name in [n for n in now if n not in attributes and is_followed(number, n)]:
                del now[name]
            for name, value in attributes.items():
                if is_followed(number, name) and now.get(name, now) is not value:
                    now[name] = value
            for name, own in buffers.items():
                if each._buffers.get(name) is not own:
                    each._buffers[name] = own
        with torch.no_grad():
            for buffer, values in self._values:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


@dataclass(frozen=True)
class State:
    """What a module was like before a call.

    Attributes:
        attributes: of each submodule.
        requires_grad: of each shared tensor.
        buffers: the values of the private buffers that a forward may read, by their numbers.
    """

    attributes: Sequence[dict[str, Any]]
    requires_grad: Sequence[bool]
    buffers: Mapping[int, Told]

    def update_from(self, module: nn.Module, shared: Sequence[Tensor], arena: Arena) -> Update:
        """What has to be told to a copy of the module as it is now.

        Args:
            module: the user's module, of the same structure as then.
            shared: its shared tensors.
            arena: the team's.

        Raises:
            HelperDiedError: if a large buffer has changed since, for the first time.
        """
        update = Update(requires_grad=list(self.requires_grad))
        changed: dict[tuple[int, str], Any] = {}
        for number, (submodule, then) in enumerate(
            zip(module.modules(), self.attributes, strict=True)
        ):
            now = vars(submodule)
            update.removed += [
                (number, n) for n in now if n not in then and is_followed(number, n)
            ]
            changed |= {
                (number, name): value
                for name, value in then.items()
                if is_followed(number, name) and (name not in now or not same(now[name], value))
            }
        if changed:
            update.attributes = to_bytes(changed, shared, "attributes")
        for each in self.buffers.values():
            if each.place is None:
                _check_large(each.values, each.mark)
        large = {i: each.values for i, each in self.buffers.items() if each.place is None}
        for number, each in (dict(self.buffers) | told(arena, large)).items():
            assert each.place is not None  # noqa: S101 - it has one now
            update.buffers[number] = each.place
        return update


def _check_large(buffer: Tensor, then: Any) -> None:
    if mark(buffer) != then:
        raise HelperDiedError(
            f"a buffer of {buffer.nbytes} bytes has changed since the call, for the first time, "
            "and what the helper had to do cannot be done again without its values; call the "
            "module again"
        )
