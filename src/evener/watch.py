"""Watch: what the user changed in a module between two calls, so that every replica follows.

Before each call the module is compared with what was sent. Attributes that changed (``training``
among them) and buffers are sent as an :class:`Update`; a change of structure, or of a tensor's
form, needs a new copy of the whole module. What a forward itself changes is not a change by the
user: the forward of each replica did the same to its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from evener.contents import SMALL_BYTES, Contents, can_change, count_of_changes, mark, same
from evener.pickling import STATE_NAME
from evener.replica import to_bytes
from evener.update import Update
from evener.versions import Versions

#: The dictionaries in which nn.Module keeps hooks, and all that make the structure of a module.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_STRUCTURE = ("_parameters", "_modules", *_HOOKS)
#: What nn.Module keeps for itself; all else in a module's dictionary are plain attributes.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {STATE_NAME}


class Watch:
    """Notices what the user changed in a module between two calls.

    The usual answer, nothing, is found at the speed of C (see :mod:`evener.versions` and
    :mod:`evener.contents`). Not seen are changes of large arrays of NumPy, of attributes of a
    class, and of a buffer's values through ``.data``.

    Args:
        module: the user's module.
        shared: its shared tensors.
        unsent: an attribute that a copy of the module is made without. Default: none.

    Attributes:
        buffers: its private buffers, as they are since :meth:`is_stale` was last asked.
        new_buffers: the numbers of those that were changed, as of the last :meth:`update`.
    """

    def __init__(self, module: nn.Module, shared: Sequence[Tensor], unsent: str = "") -> None:
        self._shared = shared
        # The module itself is not held here: helpers end with it.
        self._dicts = [vars(m) for m in module.modules()]
        self._submodules = list(module.modules())[1:]
        self._kinds = list(map(type, self._submodules))
        self._norms = {number for number, m in enumerate(module.modules()) if _is_norm(m)}
        hooks = [d[name] for d in self._dicts for name in _HOOKS]
        # Half of all dictionaries, and empty as a rule: that torch counts new hooks is enough.
        self._no_hooks = [part for part in hooks if not part]
        self._num_hooks = RemovableHandle.next_id
        self._parts = [d[name] for d in self._dicts for name in ("_parameters", "_modules")]
        self._parts.extend(part for part in hooks if part)
        self._buffer_parts = [d["_buffers"] for d in self._dicts]
        self._versions = Versions([*self._dicts, *self._parts, *self._buffer_parts])
        #: What may have been changed and was not yet looked into, by its number in that list.
        self._touched: set[int] = set()
        # The objects are held, so that none of them can go and another take its identity.
        self._held = [dict(part) for part in self._parts]
        self._before = [dict(d) for d in self._dicts]
        if self._before[0].pop(unsent, None) is not None:
            self._touched.add(0)
        self._matrices = [tensor for tensor in shared if tensor.dim() > 1]  # others have no order
        self._pointers = list(map(Tensor.data_ptr, shared))
        self._shared_forms = self._forms_now()
        self._requires_grad = [tensor.requires_grad for tensor in shared]
        # How the buffers are followed; see _sort_buffers.
        self.buffers: list[Tensor] = []
        self.new_buffers: list[int] = []
        self._names: list[tuple[int, str]] = []
        self._sent: dict[int, tuple[int, int]] = {}
        self._uncounted: set[int] = set()
        self._list_buffers()
        self._forms = self._form_of_buffers()
        self._sent = {
            i: mark(buffer) for i, buffer in enumerate(self.buffers) if i not in self._waiting
        }
        #: Attributes inside of which something changed that was not told yet.
        self._inside: set[Any] = set()
        self._find_contents()

    def is_stale(self) -> bool:
        """Whether a new copy is needed: structure, a shared tensor's or a buffer's form."""
        self._look()
        if self._num_hooks != RemovableHandle.next_id:
            if any(self._no_hooks):
                return True
            self._num_hooks = RemovableHandle.next_id
        if list(map(type, self._submodules)) != self._kinds:
            return True
        first, last = len(self._dicts), len(self._dicts) + len(self._parts)
        for number in sorted(self._touched):
            if number < first:
                now, before = self._dicts[number], self._before[number]
                if any(now.get(name) is not before[name] for name in (*_STRUCTURE, "_buffers")):
                    return True
                continue
            self._touched.discard(number)
            if number >= last:
                self._list_buffers()
            elif _differ(self._parts[number - first], self._held[number - first]):
                return True
        return self._forms_now() != self._shared_forms or not self._buffers_have_their_form()

    def has_moved(self) -> bool:
        """Whether a shared tensor has got other memory."""
        return list(map(Tensor.data_ptr, self._shared)) != self._pointers

    def update(self, *, everything: bool = False) -> Update:
        """What changed since this or :meth:`accept` was last called; false where nothing did.

        To be asked after :meth:`is_stale`, which has looked for it. The numbers of the buffers
        whose values are new are afterwards in ``new_buffers``.

        Args:
            everything: count among the new buffers also the running statistics of normalisations
                in training, which no other replica reads unless its own become the user's.
        """
        update = Update()
        self._inside |= self._contents.changed()
        changed = {key: self._value(key) for key in self._inside}
        changed |= self._attributes_changed(update)
        if changed:
            update.attributes = to_bytes(changed, self._shared, "changed attributes")
        self._inside = set()  # not sooner: what cannot be sent is an error until it is taken away
        self._renew()
        requires_grad = [tensor.requires_grad for tensor in self._shared]
        if requires_grad != self._requires_grad:
            update.requires_grad = self._requires_grad = requires_grad
        self.new_buffers = self._buffers_changed(everything=everything)
        return update

    def accept(self) -> None:
        """Take the attributes as they are: the module's own forward has just run."""
        self._look()
        self._contents.changed()
        self._renew()

    @property
    def attributes(self) -> list[dict[str, Any]]:
        """Each submodule's attributes, as they were last told or accepted; not to be changed."""
        return list(self._before)

    @property
    def requires_grad(self) -> list[bool]:
        """Which shared tensors require a gradient, as was last told; not to be changed."""
        return self._requires_grad

    def told_buffers(self) -> dict[int, Tensor]:
        """The buffers but for those that no forward reads before their values are told again."""
        return {i: each for i, each in enumerate(self.buffers) if i not in self._waiting}

    def _look(self) -> None:
        self._touched.update(self._versions.changed())

    # -------------------------------------------------------------- attributes

    def _attributes_changed(self, update: Update) -> dict[tuple[int, str], Any]:
        changed: dict[tuple[int, str], Any] = {}
        for number in sorted(self._touched):
            if number >= len(self._dicts):
                break
            now, before = self._dicts[number], self._before[number]
            update.removed.extend((number, name) for name in before if name not in now)
            changed.update(
                ((number, name), value)
                for name, value in now.items()
                if is_followed(number, name)
                and (name not in before or not same(before[name], value))
            )
        return changed

    def _renew(self) -> None:
        """Take the touched attributes as they are."""
        renew = False
        for number in [number for number in self._touched if number < len(self._dicts)]:
            self._touched.discard(number)
            now, before = self._dicts[number], self._before[number]
            renew |= any(
                now.get(name) is not before.get(name)
                and (can_change(now.get(name)) or can_change(before.get(name)))
                for name in now.keys() | before.keys()
                if is_followed(number, name)
            )
            if now.get("training") is not before.get("training"):
                self._sort_buffers()
            self._before[number] = dict(now)
        if renew:
            self._find_contents()

    def _find_contents(self) -> None:
        self._contents = Contents(
            {
                (number, name): value
                for number, d in enumerate(self._dicts)
                for name, value in d.items()
                if is_followed(number, name) and can_change(value)
            }
        )

    def _value(self, key: Any) -> Any:
        number, name = key
        return self._dicts[number].get(name)

    # -------------------------------------------------------------- tensors

    def _forms_now(self) -> tuple[list[Any], ...]:
        return list(map(Tensor.numel, self._shared)), list(map(Tensor.stride, self._matrices))

    def _list_buffers(self) -> None:
        """Find the buffers anew; the values of new objects were not sent yet."""
        before = dict(zip(self._names, self.buffers, strict=True))
        found = [
            ((number, name), buffer)
            for number, part in enumerate(self._buffer_parts)
            for name, buffer in part.items()
            if buffer is not None
        ]
        self._differentiable = [buffer for _, buffer in found if buffer.requires_grad]
        self._names = [key for key, buffer in found if not buffer.requires_grad]
        self.buffers = [buffer for _, buffer in found if not buffer.requires_grad]
        for i, (key, buffer) in enumerate(zip(self._names, self.buffers, strict=True)):
            if before.get(key) is not buffer:
                self._sent.pop(i, None)
        self._sort_buffers()

    def _sort_buffers(self) -> None:
        """Find out for each buffer how its changes are known.

        Batch norm in training changes its statistics without counting that. Those of torch's own
        layers are not read by any forward in training, so they wait until they are; of all others
        the small ones are sent at each call in training: to compare them would cost as much.
        """
        training = any(d.get("training") for d in self._dicts)
        norms = {i for i, (number, _) in enumerate(self._names) if number in self._norms}
        self._waiting = {i for i in norms if self._dicts[self._names[i][0]].get("training")}
        self._watched = [buffer for i, buffer in enumerate(self.buffers) if i not in self._waiting]
        # What was not compared so far is not known.
        for i in (*self._uncounted, *self._waiting):
            self._sent.pop(i, None)
        self._uncounted = {
            i
            for i, buffer in enumerate(self.buffers)
            if training and i not in norms and buffer.nbytes <= SMALL_BYTES
        }
        self._watched_state: Any = None

    def _form_of_buffers(self) -> list[Any]:
        return [
            self._names,
            [id(buffer) for buffer in self._differentiable],
            [(b.shape, b.dtype, b.requires_grad) for b in self.buffers],
        ]

    def _buffers_have_their_form(self) -> bool:
        names, differentiable, forms = self._forms
        if len(self._watched) < len(self.buffers):
            forms = [form for i, form in enumerate(forms) if i not in self._waiting]
        return bool(
            names == self._names
            and differentiable == [id(buffer) for buffer in self._differentiable]
            and forms == [(b.shape, b.dtype, b.requires_grad) for b in self._watched]
        )

    def _buffers_changed(self, *, everything: bool) -> list[int]:
        state = (
            list(map(Tensor.data_ptr, self._watched)),
            list(map(count_of_changes, self._watched)),
        )
        if state == self._watched_state and not self._uncounted and not everything:
            return []
        self._watched_state = state
        numbers = []
        for i, buffer in enumerate(self.buffers):
            if i in self._waiting:
                if everything:
                    numbers.append(i)
                continue
            now = mark(buffer)
            if i in self._uncounted or self._sent.get(i) != now:
                numbers.append(i)
                self._sent[i] = now
        return numbers


def is_followed(number: int, name: str) -> bool:
    """Whether an attribute of a module is one that replicas follow."""
    # A forward that the user has set on the whole module is for the whole call, in this process.
    return name not in _INTERNAL and (number, name) != (0, "forward")


def _differ(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether entries differ, by identity: an equal parameter is another parameter."""
    return [*now] != [*before] or not all(map(is_, now.values(), before.values()))


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation with torch's own forward."""
    return isinstance(module, _NormBase) and type(module).forward.__module__.startswith("torch.")
