"""A call of a parallel module, from its forward to the end of its last backward.

::

    forward    cut the inputs; post a Forward to each helper; run the first device's piece here;
               receive the Outputs; check that they fit; join them
    backward   cut the gradients; post a Backward to each helper; run the first piece's backward
               here; receive the Gradients; add them up

Large outputs and the sums of gradients are tensors over the arena: the helpers write to where the
user will read. Their memory is used again when the user no longer holds them (see ``arena``).

Whatever fails on one device, the answers of all are received before the first error, in the order
of the devices, is raised: the helpers are then ready for the next call.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import Place, Region, lay_out, moved
from evener.batches import (
    Batch,
    Structure,
    TensorForm,
    check_outputs,
    has_batch,
    is_joinable,
    structure_from_bytes,
    structure_to_bytes,
    unflatten,
)
from evener.errors import HelperDiedError
from evener.exchange import host
from evener.helper import picklable, unpicklable
from evener.mirror import Mirror
from evener.piece import Piece, Settings
from evener.team import Team


#: Stands for a joined tensor among the leaves of the outputs.
_JOINED = object()


class Run:
    """What the calls of one module on one team have in common.

    Args:
        module: the user's module.
        team: the team.

    Attributes:
        team: the team.
        mirror: keeps the replicas equal to the module.
        num_calls: how many there were; the pieces of a call have its number.
        received: the structure of the outputs that each device sent last.
        sent: the structure of the inputs that each device was sent last.
    """

    def __init__(self, module: nn.Module, team: Team) -> None:
        self.team = team
        self.mirror = Mirror(module, team)
        self.num_calls = 0
        self.received: dict[int, Structure] = {}
        self.sent: dict[int, Structure] = {}


class Call:
    """One call of a parallel module.

    Args:
        run: what it has in common with other calls.
        module: the user's module, kept alive as long as a backward may come.
        function: its own forward.
        batch: the inputs.
        shares: samples for each device.
        seeds: a seed for each device's piece.

    Attributes:
        inputs: the inputs that a gradient is wanted for.
        trainable: the module's shared tensors that require a gradient.
        differentiable: after :meth:`forward`, for each tensor that it returned, whether a gradient
            can flow back through it.
    """

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        function: Callable[..., Any],
        batch: Batch,
        shares: Sequence[int],
        seeds: Sequence[int],
    ) -> None:
        self._is_open = False  # whether helpers hold a piece of this call
        self._run = run
        self._module = module
        self._function = function
        self._batch = batch
        self._seeds = seeds
        stops = list(accumulate(shares))
        #: The part of the batch of each device that works; the first of them leads.
        self._parts = {
            device: (stop - share, stop)
            for device, (share, stop) in enumerate(zip(shares, stops, strict=True))
            if share
        }
        self._size = stops[-1]
        self._helpers = [device for device in self._parts if device != 0]
        run.num_calls += 1
        self._number = run.num_calls
        self._update = run.mirror.refresh(module)
        self._layout = run.mirror.layout
        self._wanted = [i for i, tensor in enumerate(run.mirror.shared) if tensor.requires_grad]
        self.trainable = [run.mirror.shared[i] for i in self._wanted]
        pairs = zip(batch.leaves, batch.wanted, strict=True)
        self.inputs: list[Tensor] = [leaf for leaf, want in pairs if want]
        self._own: Piece | None = None
        self._forms: list[TensorForm] = []  # of the joined tensors
        self._structure: Structure | None = None
        self._leaves: list[Any] = []

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._run.team.drop(self._helpers, self._number)

    # -------------------------------------------------------------- forward

    def forward(self, settings: Settings) -> list[Tensor]:
        """Run forward on all devices.

        Args:
            settings: those of the user's program; ``grad`` tells whether a backward may come.

        Returns:
            The joined tensors; :meth:`outputs` puts them among the rest.
        """
        run, team = self._run, self._run.team
        resting = [
            device
            for device in range(1, len(team.devices))
            if self._update and device not in self._parts
        ]
        self._is_open = True
        for device in self._helpers:
            team.post(device, self._message(device, settings))
        for device in resting:
            team.post(device, messages.Follow(self._update))
        answers: dict[int, tuple[Structure, list[Any]]] = {}
        errors: list[BaseException] = []
        if 0 in self._parts:
            batch = self._batch
            leaves = batch.piece(*self._parts[0])
            piece = Piece(leaves, batch.wanted, batch.structure, self._seeds[0], grad=settings.grad)
            with _collected(errors):
                answers[0] = (piece.forward(self._function), piece.outputs)
                self._own = piece
        for device in self._helpers:
            answer = team.receive(device)
            if isinstance(answer, messages.Failure):
                errors.append(team.error_of(device, answer))
                continue
            if answer.structure is not None:
                run.received[device] = structure_from_bytes(answer.structure)
            answers[device] = (run.received[device], unpicklable(answer.leaves))
        for device in resting:
            team.receive(device)
        run.mirror.accept()
        if errors:
            raise errors[0]
        if 0 not in self._parts:
            run.mirror.take_buffers(self._module)
        tensors = self._join(answers)
        if not settings.grad:
            self._own = None
            self._close()
        return tensors

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns, with these in the places of the joined tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _JOINED else leaf for leaf in self._leaves]
        return unflatten(self._structure, leaves)

    def _message(self, device: int, settings: Settings) -> messages.Forward:
        """Put a helper's part of the inputs into the arena, and say where."""
        run, batch = self._run, self._batch
        leaves = batch.piece(*self._parts[device])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places, region = self._put(tensors)
        run.team.keep(device, self._number, region)
        rest = iter(places)
        described = [
            messages.Input(next(rest), want) if isinstance(leaf, Tensor) else leaf
            for leaf, want in zip(leaves, batch.wanted, strict=True)
        ]
        is_new = run.sent.get(device) != batch.structure
        run.sent[device] = batch.structure
        return messages.Forward(
            piece=self._number,
            update=self._update,
            structure=structure_to_bytes(batch.structure) if is_new else None,
            leaves=picklable(described),
            span=messages.Span(region.offset, region.num_bytes),
            seed=self._seeds[device],
            settings=settings,
            lead=device == min(self._parts),
        )

    def _put(self, tensors: Sequence[Tensor]) -> tuple[list[Place], Region]:
        """Copy tensors into a region of their own."""
        places, num_bytes = lay_out(tensors)
        region = self._run.team.arena.take(num_bytes)
        places = moved(places, region.offset)
        with torch.no_grad():
            for place, tensor in zip(places, tensors, strict=True):
                region.tensor(place).copy_(tensor)
        return places, region

    # -------------------------------------------------------------- joining

    def _join(self, answers: dict[int, tuple[Structure, list[Any]]]) -> list[Tensor]:
        """Join the outputs of the devices into those of one device."""
        shares = [stop - start for start, stop in self._parts.values()]
        labels = [self._run.team.devices[device].label for device in self._parts]
        by_device = [answers[device] for device in self._parts]
        check_outputs(
            [(structure, [_form(leaf) for leaf in leaves]) for structure, leaves in by_device],
            shares,
            labels,
        )
        self._structure = by_device[0][0]
        joined: list[Tensor] = []
        places: dict[int, list[Place | None]] = {device: [] for device in self._helpers}
        for parts in zip(*(leaves for _, leaves in by_device), strict=True):
            form = _form(parts[0])
            if not isinstance(form, TensorForm):
                self._leaves.append(parts[0])
                continue
            differentiable = any(_form(part).differentiable for part in parts)
            if form.is_mean:
                total = TensorForm((), form.dtype, differentiable)
                weighted = (
                    _values(part) * (share / self._size)
                    for part, share in zip(parts, shares, strict=True)
                )
                tensor = sum(weighted, start=torch.zeros((), dtype=form.dtype))
                large = {}
            else:
                total = TensorForm((self._size, *form.shape[1:]), form.dtype, differentiable)
                if any(isinstance(part, messages.Output) and part.values is None for part in parts):
                    tensor, large = self._joined_in_arena(total, parts)
                else:
                    tensor = torch.cat([_values(part) for part in parts])
                    large = {}
            for device, row in places.items():
                row.append(large.get(device))
            self._forms.append(total)
            self._leaves.append(_JOINED)
            joined.append(tensor)
        self._write(places)
        self.differentiable = [form.differentiable for form in self._forms]
        return joined

    def _joined_in_arena(
        self, total: TensorForm, parts: Sequence[Any]
    ) -> tuple[Tensor, dict[int, Place]]:
        """A tensor over the arena with this process's part in it, and where the others go."""
        tensor, rows = self._rows_in_arena(total.shape, total.dtype)
        places = {}
        for (device, (start, stop)), part in zip(self._parts.items(), parts, strict=True):
            if isinstance(part, messages.Output) and part.values is None:
                places[device] = rows[device]
            else:
                tensor[start:stop].copy_(_values(part))
        return tensor, places

    def _rows_in_arena(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, dict[int, Place]]:
        """A tensor over the arena, whose memory is free when the user no longer holds it."""
        (place,), num_bytes = lay_out([torch.empty(shape, dtype=dtype, device="meta")])
        region = self._run.team.arena.take(num_bytes)
        place = place._replace(offset=region.offset)
        tensor = region.tensor(place)
        region.close()
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        return tensor, {
            device: place._replace(
                offset=place.offset + start * row_bytes, shape=(stop - start, *shape[1:])
            )
            for device, (start, stop) in self._parts.items()
        }

    def _write(self, places: dict[int, list[Place | None]]) -> None:
        """Let the helpers write their large outputs."""
        team = self._run.team
        writing = [device for device, row in places.items() if any(row)]
        for device in writing:
            team.post(device, messages.Write(self._number, places[device]))
        for answer, device in [(team.receive(device), device) for device in writing]:
            if isinstance(answer, messages.Failure):
                raise team.error_of(device, answer)

    # -------------------------------------------------------------- backward

    def backward(
        self, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> list[Tensor | None]:
        """Run backward on all devices.

        Args:
            gradients: one for each joined tensor, or None.
            keep_graph: whether another backward may follow.

        Returns:
            The gradients of ``inputs``, then those of ``trainable``.

        Raises:
            HelperDiedError: if the helpers that hold a part of the graph have been stopped.
            RuntimeError: if the graph has been freed by an earlier backward.
        """
        team = self._run.team
        if not team.is_running or self._layout is not self._run.mirror.layout:
            raise HelperDiedError(
                "the helpers no longer hold their part of this call's graph: they were stopped, or "
                "the module's structure changed; call the module again before backward"
            )
        if not self._is_open:
            raise RuntimeError(
                "Trying to backward through the graph of a parallel module a second time; give "
                "retain_graph=True to the first backward"
            )
        inputs, trainable = self.inputs, self.trainable
        targets = {
            device: team.arena.take(self._run.mirror.layout_bytes) for device in self._helpers
        }
        rows = [self._rows_of_gradient(tensor) for tensor in inputs]
        held = []  # regions that the helpers read until they answer
        for device in self._helpers:
            cut = self._cut(gradients, device)
            places, region = self._put([gradient for gradient in cut if gradient is not None])
            held.append(region)
            rest = iter(places)
            message = messages.Backward(
                piece=self._number,
                gradients=[None if gradient is None else next(rest) for gradient in cut],
                target=messages.Span(targets[device].offset, targets[device].num_bytes),
                inputs=[places_of[device] for _, places_of in rows],
                keep_graph=keep_graph,
            )
            team.post(device, message)
        errors: list[BaseException] = []
        own: list[Tensor | None] = [None] * (len(inputs) + len(trainable))
        if self._own is not None:
            with _collected(errors):
                own = self._own_backward(gradients, keep_graph=keep_graph)
        answers: dict[int, messages.Gradients] = {}
        for device in self._helpers:
            answer = team.receive(device)
            if isinstance(answer, messages.Failure):
                errors.append(team.error_of(device, answer))
            else:
                answers[device] = answer
        for region in held:
            region.close()
        if errors or not keep_graph:
            self._close()
            self._own = None
        if errors:
            raise errors[0]
        sums = self._add_up(targets, answers, own[len(inputs) :])
        return [*self._join_input_gradients(rows, answers, own[: len(inputs)]), *sums]

    def _cut(self, gradients: Sequence[Tensor | None], device: int) -> list[Tensor | None]:
        """The gradients of a device's outputs; that of a mean is weighted as the mean was."""
        start, stop = self._parts[device]
        return [
            gradient
            if gradient is None
            else gradient * ((stop - start) / self._size)
            if form.is_mean
            else gradient[start:stop]
            for gradient, form in zip(gradients, self._forms, strict=True)
        ]

    def _own_backward(
        self, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> list[Tensor | None]:
        assert self._own is not None  # noqa: S101 - asked by the caller
        wanted = [*self._own.inputs, *self.trainable]
        outputs, with_gradients = self._own.roots(self._cut(gradients, 0))
        if not outputs or not wanted:
            return [None] * len(wanted)
        with _without_hooks(self.trainable):
            return list(
                torch.autograd.grad(
                    outputs, wanted, with_gradients, retain_graph=keep_graph, allow_unused=True
                )
            )

    def _rows_of_gradient(self, tensor: Tensor) -> tuple[Tensor, dict[int, Place]]:
        """Where the gradient of an input goes, and each device's part of it."""
        if has_batch(tensor):
            return self._rows_in_arena(tuple(tensor.shape), tensor.dtype)
        # An input that every device got: a slot for each, to be added up.
        places, region = self._put([tensor] * len(self._parts))
        slots = dict(zip(self._parts, places, strict=True))
        memory = region.tensor(Place(region.offset, tensor.dtype, (1,), (1,)))
        region.close()
        return memory, slots

    def _join_input_gradients(
        self,
        rows: Sequence[tuple[Tensor, dict[int, Place]]],
        answers: dict[int, messages.Gradients],
        own: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        whole = self._run.team.arena.whole
        joined: list[Tensor | None] = []
        for i, (tensor, places) in enumerate(rows):
            reached = {device: answer.inputs[i] for device, answer in answers.items()}
            reached[0] = own[i] is not None
            if not any(reached.values()):
                joined.append(None)
                continue
            parts = {device: whole.tensor(place) for device, place in places.items()}
            for device, part in parts.items():
                if device == 0 and own[i] is not None:
                    part.copy_(own[i])
                elif not reached[device]:
                    part.zero_()
            if has_batch(self.inputs[i]):
                joined.append(tensor)
            else:
                joined.append(sum(parts.values(), start=torch.zeros_like(tensor[0])))
        return joined

    def _add_up(
        self,
        targets: dict[int, Region],
        answers: dict[int, messages.Gradients],
        own: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """The sum over the devices of the gradient of each trainable tensor."""
        reduced = self._reduce(targets, answers)
        layout = self._layout
        sums: list[Tensor | None] = []
        pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, mine in zip(self._wanted, own, strict=True):
            total: Tensor | None = None
            for device, answer in answers.items():
                if answer.present[i]:
                    region = targets[device]
                    there = region.tensor(
                        layout[i]._replace(offset=layout[i].offset + region.offset)
                    )
                    if total is None:
                        total = there
                    elif i not in reduced:
                        total += there
                if i in answer.others:
                    other = pickle.loads(answer.others[i])  # noqa: S301 - from our own helper
                    total = other if total is None else total + other
            if total is None or mine is None:
                total = mine if total is None else total
            elif total.layout == mine.layout == torch.strided:
                pairs[0].append(total)
                pairs[1].append(mine)
            else:
                total = total + mine
            sums.append(total)
        host.add_own(*pairs)
        for region in targets.values():
            region.close()
        return sums

    def _reduce(
        self, targets: dict[int, Region], answers: dict[int, messages.Gradients]
    ) -> frozenset[int]:
        """Let the helpers add up among themselves what all of them have, if that pays.

        Returns:
            The numbers of the tensors whose sum is now in the first helper's region.
        """
        team, layout = self._run.team, self._layout
        common = [
            i for i in range(len(layout)) if all(answer.present[i] for answer in answers.values())
        ]
        places = [layout[i] for i in common]
        if len(answers) == 1 or sum(place.num_bytes for place in places) < host.SCATTER_BYTES:
            return frozenset()
        spans = [messages.Span(region.offset, region.num_bytes) for region in targets.values()]
        for device, segment in zip(targets, host.segments(places, len(targets)), strict=True):
            team.post(device, messages.Reduce(spans, segment))
        for answer, device in [(team.receive(device), device) for device in targets]:
            if isinstance(answer, messages.Failure):
                raise team.error_of(device, answer)
        return frozenset(common)


# ------------------------------------------------------------------ small things


def _form(leaf: Any) -> Any:
    """What the check of outputs sees of a leaf, wherever it lies."""
    if isinstance(leaf, messages.Output):
        return leaf.form
    return TensorForm.of(leaf) if is_joinable(leaf) else leaf


def _values(part: Tensor | messages.Output) -> Tensor:
    """The values of a part of an output, without its graph."""
    if isinstance(part, Tensor):
        return part.detach()
    if not part.values:
        return torch.empty(part.form.shape, dtype=part.form.dtype)
    return torch.frombuffer(part.values, dtype=part.form.dtype).view(part.form.shape)


@contextmanager
def _collected(errors: list[BaseException]) -> Iterator[None]:
    """Keep an error until the other devices have answered; an interrupt does not wait."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised later
        errors.append(error)


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks off leaf tensors: they are for the full gradient, not for one device's."""
    hooked = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]  # noqa: SLF001
    for tensor, _ in hooked:
        tensor._backward_hooks = None  # noqa: SLF001
    try:
        yield
    finally:
        for tensor, hooks in hooked:
            tensor._backward_hooks = hooks  # noqa: SLF001
