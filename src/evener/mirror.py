"""The mirror: the main process's side of the replicas.

It moves the module's parameters into the arena, so that there is one copy of the weights for all
CPU devices, sends the module to the helpers, and tells them before each call what the user
changed.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import Place, Region, lay_out, moved, normal_mode
from evener.contents import hidden_gradients
from evener.errors import ModuleError
from evener.pickling import COMPILE_NAME
from evener.replica import adopt, give_back, private_buffers, shared_tensors, to_bytes
from evener.state import State, Told, told, told_first
from evener.team import Team
from evener.update import Update
from evener.watch import Watch


class Mirror:
    """Keeps the replicas of a team equal to the user's module.

    Args:
        module: the user's module.
        team: a team whose helpers have no replica yet.

    Attributes:
        shared: the tensors of which all replicas use the same memory, the user's own objects.
        layout: their places from the start of a region.
        layout_bytes: the size of such a region.

    Raises:
        ModuleError: if the module cannot be sent, or a parameter is not on the CPU.
    """

    def __init__(self, module: nn.Module, team: Team) -> None:
        self._team = team
        self._regions: list[Region] = []
        self.shared: list[Tensor] = []
        self.layout: list[Place] = []
        self.layout_bytes = 0
        self._told: dict[int, Told] = {}
        self._install(module)

    def refresh(self, module: nn.Module, *, everything: bool = False) -> Update:
        """Look for changes since the last call; a changed structure is sent at once.

        Args:
            module: the user's module.
            everything: as for :meth:`Watch.update`. Default: no.

        Returns:
            The update that every helper has to be told.
        """
        if self._watch.is_stale() or (self._watch.has_moved() and not self._moved_back()):
            self._install(module)
        update = self._watch.update(everything=everything)
        numbers = self._watch.new_buffers
        if numbers:
            # Each time in a new place: a call may need what was there before (see ``state``).
            buffers = {number: self._watch.buffers[number] for number in numbers}
            new = told(self._team.arena, buffers)
            update.buffers = {number: each.place for number, each in new.items() if each.place}
            self._told = self._told | new
        self.catch_up(module)
        return update

    @property
    def state(self) -> State:
        """What the module is like before the call that :meth:`refresh` was asked for."""
        return State(self._watch.attributes, self._watch.requires_grad, self._told)

    def load(self, module: nn.Module, state: State) -> tuple[messages.Load, Update]:
        """What makes a replica as it was in a state, without touching the others."""
        update = state.update_from(module, self.shared, self._team.arena)
        return self._load_message(to_bytes(module, self.shared)), update

    def catch_up(self, module: nn.Module) -> None:
        """Send the module to the helpers that have no replica yet, or one that is not right."""

        def load() -> messages.Load:
            message = self._load_message(to_bytes(module, self.shared))
            message.keeps_pieces = True
            return message

        self._team.load(load, everybody=False)

    def accept(self) -> None:
        """Take the module's attributes as they are: its own forward has just run."""
        self._watch.accept()

    def take_attributes(self, module: nn.Module, changed: Update) -> None:
        """Make the attributes that a leading helper's forward changed the user's."""
        attributes = Update(attributes=changed.attributes, removed=changed.removed)
        attributes.apply(list(module.modules()), self.shared, self._regions[1].tensor)

    def take_buffers(self, module: nn.Module) -> None:
        """Make the buffers that a leading helper left in the arena the user's."""
        with torch.no_grad():
            own = private_buffers(module).values()
            for buffer, values in zip(own, self._returned, strict=True):
                buffer.copy_(values)

    def read(self, device: int, name: str, like: Tensor) -> Tensor:
        """The values of a parameter as a device's replica has them now.

        Args:
            device: a device with a helper.
            name: what ``named_parameters`` calls it.
            like: a tensor of its form.
        """
        places, num_bytes = lay_out([like])
        region = self._team.arena.take(num_bytes)
        (place,) = moved(places, region.offset)
        self._team.post(device, messages.Read(name, place))
        try:
            self._team.collect([device])
            return region.tensor(place).clone()
        finally:
            region.close()

    def dissolve(self) -> None:
        """Move the parameters back into memory of their own."""
        give_back(self.shared)
        for region in self._regions:
            region.close()

    def _moved_back(self) -> bool:
        """Move shared tensors back that have got other memory: from the user, or another team.

        The helpers need not be told, and open graphs stay what they are.

        Returns:
            False if one has another form.
        """
        region = self._regions[0]
        pairs = list(zip(self.shared, moved(self.layout, region.offset), strict=True))
        for tensor, place in pairs:
            form = (tensor.device.type, tensor.dtype, tensor.shape, tensor.stride())
            if form != ("cpu", place.dtype, place.shape, place.stride):
                return False
        with normal_mode(), torch.no_grad():
            for tensor, place in pairs:
                there = region.tensor(place)
                if there.data_ptr() != tensor.data_ptr():
                    there.copy_(tensor.detach())
                    tensor.data = there
        return True

    def _install(self, module: nn.Module) -> None:
        team = self._team
        for region in self._regions:
            region.close()
        self.shared = shared_tensors(module)
        private = list(private_buffers(module).values())
        for tensor in [*self.shared, *private]:
            if tensor.device.type != "cpu":
                raise ModuleError(
                    f"the module has a tensor on {tensor.device}, and its devices are "
                    f"{', '.join(device.label for device in team.devices)}: call module.cpu()"
                )
        # The user may call under inference_mode; what is made here outlives that.
        with normal_mode(), torch.no_grad():
            self.layout, self.layout_bytes = lay_out(self.shared)
            region = team.arena.take(self.layout_bytes)
            data = to_bytes(module, self.shared)
            adopt(self.shared, moved(self.layout, region.offset), region)
            places, num_bytes = lay_out(private)
            buffer_region = team.arena.take(num_bytes)
            self._places = moved(places, buffer_region.offset)
            self._returned = [buffer_region.tensor(place) for place in self._places]
        self._regions = [region, buffer_region]
        team.load(lambda: self._load_message(data), everybody=True)
        _warn_of_hidden(module, self.shared)
        self._watch = Watch(module, self.shared, COMPILE_NAME)
        with normal_mode():
            self._told = told_first(team.arena, self._watch.told_buffers())

    def _load_message(self, data: bytes) -> messages.Load:
        try:
            folder: str | None = os.getcwd()
        except OSError:  # it was deleted
            folder = None
        region = self._regions[0]
        return messages.Load(
            module=data,
            layout=self.layout,
            shared=messages.Span(region.offset, region.num_bytes),
            parameters=[isinstance(tensor, nn.Parameter) for tensor in self.shared],
            requires_grad=[tensor.requires_grad for tensor in self.shared],
            buffers=self._places,
            sys_path=list(sys.path),
            folder=folder,
        )


def _warn_of_hidden(module: nn.Module, shared: list[Tensor]) -> None:
    """Warn of what plain PyTorch gives a gradient although the module does not know of it."""
    known = {id(each) for each in (*shared, *module.buffers(), *module.modules())}
    for name, each in module.named_modules():
        attributes = {key: value for key, value in vars(each).items() if key[:1] != "_"}
        for key, what in hidden_gradients(attributes, known):
            path = f"{name}.{key}".lstrip(".")
            warnings.warn(
                f"{type(module).__name__}.{path} holds {what} that is not registered with the "
                "module: helpers have a copy of it, which gets no gradient and does not follow; "
                "make it a parameter, a submodule or a buffer, or use nn.ModuleList, ModuleDict "
                "or ParameterList",
                stacklevel=2,
            )
