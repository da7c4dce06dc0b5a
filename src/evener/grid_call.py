"""A call of a parallel module whose batch has a grid: each device computes its cells one by one.

What is joined and added up here are cells, not devices (see :mod:`evener.grid`): outputs by the
numbers of the cells, gradients and changes of buffers in the tree over these numbers. The first
device's cells are computed in this process, as its piece is without a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from evener import messages
from evener.arena import Region, lay_out, moved, put
from evener.assignment import Assignment
from evener.batches import Batch, Cut
from evener.call import Call, checked
from evener.cells import Cells, Strip
from evener.failure import collected, first_of
from evener.gradients import GridBackward, InputGradient, own_gradients
from evener.grid import Tree, num_slots
from evener.journal import BACKWARD, FORWARD, INFERENCE
from evener.keeper import Changes, add_changes, apply_changes, unpack
from evener.outputs import Outputs
from evener.piece import Settings, current_flags
from evener.portions import cut_gradients
from evener.replica import private_buffers
from evener.run import Run, labelled
from evener.slots import Slots, add_gradients
from evener.strides import dense
from evener.timing import Timing
from evener.trees import Structure


class GridCall(Call):
    """One call of a parallel module, in cells.

    Args:
        run: what it has in common with other calls.
        module: the user's module.
        function: its own forward.
        batch: the inputs.
        cut: who has which part of them; each part is that of whole cells.
        strips: the cells of each device that works.
        timing: its stop watch.
    """

    _own: Cells | None

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        function: Callable[..., Any],
        batch: Batch,
        cut: Cut,
        *,
        strips: Mapping[int, Strip],
        timing: Timing,
    ) -> None:
        seeds = {device: strip.seeds[0] for device, strip in strips.items()}
        self._strips = strips
        super().__init__(run, module, function, batch, cut, seeds=seeds, timing=timing)
        self._num_cells = next(iter(strips.values())).num_cells
        self._grid_cut = Cut([size for strip in strips.values() for size in strip.sizes])
        self._owners = {
            number: device
            for device, strip in strips.items()
            for number in range(strip.start, strip.stop)
        }
        self._changes: dict[int, messages.Outputs] = {}
        common = [
            tensor
            for tensor, dim in zip(self.inputs, self._input_dims, strict=True)
            if dim is None
        ]
        self._common, self._slot_bytes = lay_out(common, run.mirror.layout_bytes)

    def _assign(self) -> Assignment:
        return Assignment(
            self.run, self._module, self._batch, self._cut, self._seeds, strips=self._strips
        )

    # -------------------------------------------------------------- forward

    def forward(self, settings: Settings) -> None:
        """As :meth:`Call.forward`; buffers are then those that all cells together make of them."""
        team, cut, timing = self.run.team, self._cut, self.timing
        timing.prepared(FORWARD if settings.grad else INFERENCE)
        self._settings = settings
        # Who rests is told nothing: each call tells all buffers, and the watch what else is new.
        update = self._assignment.update
        resting = [i for i, there in enumerate(team.present) if there and i not in cut.parts and i]
        resting = resting if update else []
        self._is_open = True
        for device in cut.helpers:
            work = self._assignment.work(device, settings)
            team.post(device, work.forward, work)
        for device in resting:
            team.post(device, messages.Follow(update))
        answers: dict[int, tuple[Structure, list[Any]]] = {}
        errors: list[BaseException] = []
        if 0 in cut.parts:
            with collected(errors), timing.own_piece():
                answers[0] = self._run_own()
        for device in cut.helpers:
            with collected(errors), labelled("evener: waiting"):
                answers[device] = self._take(device, team.receive(device))
        self._assignment.end_forward()
        timing.pieces()
        team.collect(resting)
        if errors:
            raise first_of(errors)
        with timing.joining():
            self._change_buffers()
            self.outputs = Outputs(
                team,
                self._number,
                self._grid_cut,
                self._batch.dims,
                self._by_cell(answers),
                owners=self._owners,
            )
        timing.end()
        if not settings.grad:
            self._close()

    def _new_piece(self, leaves: Sequence[Any]) -> Cells:
        batch, grad = self._batch, self._settings.grad
        return Cells(
            leaves,
            batch.wanted,
            batch.structure,
            self._strips[0],
            self._module,
            grad=grad,
            is_frugal=False,
        )

    def _take(self, device: int, answer: Any) -> tuple[Structure, list[Any]]:
        taken = super()._take(device, answer)
        self._changes[device] = answer
        return taken

    def _by_cell(
        self, answers: dict[int, tuple[Structure, list[Any]]]
    ) -> dict[int, tuple[Structure, list[Any]]]:
        by_cell = {}
        for device, (structure, leaves) in answers.items():
            strip = self._strips[device]
            num = len(leaves) // len(strip.sizes)  # all cells of a device have one structure
            for i in range(len(strip.sizes)):
                by_cell[strip.start + i] = structure, leaves[i * num : (i + 1) * num]
        return by_cell

    def _change_buffers(self) -> None:
        buffers = list(private_buffers(self._module).values())
        if not buffers:
            return
        tree: Tree[Changes] = Tree(self._num_cells, add_changes)
        for device in self._strips:
            if device in self._changes:
                for level, number, packed in self._changes[device].changes:
                    tree.push(level, number, unpack(packed, buffers))
            elif self._own is not None:
                for node in self._own.changes:
                    tree.push(*node)
        self._changes = {}
        (root,) = tree.nodes
        apply_changes(buffers, root.value)

    # -------------------------------------------------------------- backward

    def backward(
        self, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> list[Tensor | None]:
        """As :meth:`Call.backward`; gradients are added up in the tree."""
        team, cut, timing = self.run.team, self._cut, self.timing
        self._check_graph()
        timing.begin(BACKWARD, team.worked)
        step = GridBackward(
            {
                device: self._gradients_of(strip, gradients)
                for device, strip in self._strips.items()
            },
            {device: self._take_slots(strip) for device, strip in self._strips.items()},
            [
                None if dim is None else InputGradient(team, cut, tensor, dim)
                for tensor, dim in zip(self.inputs, self._input_dims, strict=True)
            ],
            self._settings._replace(flags=current_flags()),
            keep_graph,
        )
        others = [*cut.helpers, *([0] if self._is_delegated else [])]
        errors: list[BaseException] = []
        try:
            for device in others:
                team.post(device, self._message(step, device))
            failure = None
            if self._own is not None:
                with collected(errors), timing.own_piece():
                    failure = self._backward_own_cells(step, self._own)
            answers: dict[int, messages.Gradients] = {}
            for device in others:
                with collected(errors), labelled("evener: waiting"):
                    answers[device] = checked(team, device, team.receive(device))
            if failure is not None:
                self._own, self._is_delegated = None, True
                with collected(errors):
                    work = self._assignment.work(0, self._settings)
                    message = self._message(step, 0)
                    answers[0] = checked(team, 0, team.smaller(0, work, message, failure))
            timing.pieces()
            if errors:
                raise first_of(errors)
            with timing.joining():
                found = self._add_up(step, answers)
        finally:
            for region in step.regions():
                region.close()
            if errors or not keep_graph:
                self._close()
        timing.end()
        return found

    def _gradients_of(
        self, strip: Strip, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of the outputs of a device's cells, one cell after the other."""
        return [
            None if part is None else dense(part)
            for number in range(strip.start, strip.stop)
            for part in cut_gradients(gradients, self.outputs.forms, self._grid_cut, number)
        ]

    def _message(self, step: GridBackward, device: int) -> messages.Backward:
        parts = step.gradients[device]
        places, region = put(self.run.team.arena, [part for part in parts if part is not None])
        step.held.append(region)
        rest = iter(places)
        spans = [messages.Span(each.offset, each.num_bytes) for each in step.slots[device]]
        return messages.Backward(
            piece=self._number,
            gradients=[None if part is None else next(rest) for part in parts],
            target=spans[0],
            inputs=[None if each is None else each.places[device] for each in step.inputs],
            keep_graph=step.keep_graph,
            settings=step.settings,
            slots=spans,
            common=self._common,
        )

    def _backward_own_cells(self, step: GridBackward, own: Cells) -> messages.Failure | None:
        """Run the backward of the first device's cells, in this process.

        Returns:
            How memory ended, if it did.
        """
        sums = Slots(own.strip, self._tensor_at(step.slots[0]))
        try:
            for number, cell, its in own.backward(self._function, step.gradients[0]):
                found = own_gradients(cell, its, self.trainable, keep_graph=step.keep_graph)
                num = len(cell.inputs)
                common = own.keep_inputs(number, found[:num])
                shared: list[Tensor | None] = [None] * len(self.run.mirror.layout)
                for i, gradient in zip(self._wanted, found[num:], strict=True):
                    shared[i] = gradient
                sums.push(number, [*shared, *common])
        except Exception as error:
            if not self._can_be_smaller(error):
                raise
            return messages.Failure.of(error)
        step.sums[0] = sums.nodes
        step.own = [tensor.grad for tensor in own.inputs]
        return None

    def _add_up(
        self, step: GridBackward, answers: Mapping[int, messages.Gradients]
    ) -> list[Tensor | None]:
        """The gradients of ``inputs``, then those of ``trainable``."""
        for device, answer in answers.items():
            at = self._tensor_at(step.slots[device])
            step.sums[device] = [(s.level, s.number, s.tensors(at)) for s in answer.sums]
        tree: Tree[list[Tensor | None]] = Tree(self._num_cells, add_gradients)
        for device in self._strips:
            for node in step.sums[device]:
                tree.push(*node)
        (root,) = tree.nodes
        common = iter(root.value[len(self.run.mirror.layout) :])
        joined = []
        for i, gradient in enumerate(step.inputs):
            if gradient is None:
                joined.append(next(common))
            else:
                reached = {device: answer.inputs[i] for device, answer in answers.items()}
                joined.append(gradient.join(step.own[i] if step.own else None, reached))
        return [*joined, *(root.value[number] for number in self._wanted)]

    def _take_slots(self, strip: Strip) -> list[Region]:
        num = num_slots(strip.start, strip.stop, strip.num_cells)
        return [self.run.team.arena.take(self._slot_bytes) for _ in range(num)]

    def _tensor_at(self, slots: Sequence[Region]) -> Callable[[int, int], Tensor]:
        layout = [*self.run.mirror.layout, *self._common]
        places = [moved(layout, region.offset) for region in slots]
        return lambda slot, i: slots[slot].tensor(places[slot][i])
