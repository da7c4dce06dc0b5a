"""A call of a parallel module, from its forward to the end of its last backward.

::

    forward    cut the inputs; post a Forward to each helper; run the first device's piece here;
               receive the outputs, and join them
    backward   cut the gradients; post a Backward to each helper; run the first piece's backward
               here; receive the gradients, and add them up

Whatever fails on one device, the answers of all are received before the first error, in the order
of the devices, is raised: the helpers are then ready for the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from evener import messages
from evener.arena import Region, put
from evener.assignment import Assignment
from evener.batches import Batch, Cut
from evener.errors import HelperDiedError
from evener.failure import collected, first_of
from evener.gradients import InputGradient, SharedGradients, own_gradients
from evener.journal import BACKWARD, FORWARD, INFERENCE
from evener.memory import is_memory_error
from evener.outputs import Outputs
from evener.piece import Piece, Settings, current_flags
from evener.portions import cut_gradients
from evener.run import Run, labelled
from evener.team import Team
from evener.timing import Timing
from evener.trees import Structure
from evener.work import Work


class Call:
    """One call of a parallel module.

    Args:
        run: what it has in common with other calls.
        module: the user's module, kept alive as long as a backward may come.
        function: its own forward.
        batch: the inputs.
        cut: who has which part of them.
        seeds: a seed for each device that works.
        timing: its stop watch.

    Attributes:
        run: as given.
        timing: its stop watch.
        inputs: the inputs that a gradient is wanted for.
        trainable: the module's shared tensors that require a gradient.
        outputs: the joined outputs, after :meth:`forward`.
    """

    outputs: Outputs
    _is_open = False  # whether helpers hold a piece of this call

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        function: Callable[..., Any],
        batch: Batch,
        cut: Cut,
        *,
        seeds: Mapping[int, int],
        timing: Timing,
    ) -> None:
        self.run = run
        self.timing = timing
        timing.begin(FORWARD, run.team.worked)
        self._module = module
        self._function = function
        self._batch = batch
        self._cut = cut
        self._seeds = seeds
        self._assignment = self._assign()
        self._number = self._assignment.number
        self._wanted = [i for i, tensor in enumerate(run.mirror.shared) if tensor.requires_grad]
        self.trainable = [run.mirror.shared[i] for i in self._wanted]
        wanted = [i for i, want in enumerate(batch.wanted) if want]
        self.inputs: list[Tensor] = [batch.leaves[i] for i in wanted]
        self._input_dims = [batch.cut_dims[i] for i in wanted]
        self._own: Piece | None = None
        self._is_delegated = False  # whether the first device's piece is not run by this object

    def _assign(self) -> Assignment:
        return Assignment(self.run, self._module, self._batch, self._cut, self._seeds)

    def __del__(self) -> None:
        if self._is_open and self.timing.num_phases == 1 and self.timing.kind == FORWARD:
            self.run.forwards.append(self.timing)
        self._close()

    def _close(self) -> None:
        """Let the helpers forget their pieces."""
        self._own = None
        if self._is_open:
            self._is_open = False
            self.run.team.drop(self._cut.parts, self._number)

    # -------------------------------------------------------------- forward

    def forward(self, settings: Settings) -> None:
        """Run forward on all devices; what came out is then in ``outputs``.

        Args:
            settings: those of the user's program; ``grad`` tells whether a backward may come.
        """
        run, team, cut, timing = self.run, self.run.team, self._cut, self.timing
        timing.prepared(FORWARD if settings.grad else INFERENCE)
        self._settings = settings
        idle = [i for i, there in enumerate(team.present) if there and i not in cut.parts and i]
        update = self._assignment.update
        resting = idle if update else []
        self._is_open = True
        for device in cut.helpers:
            work = self._assignment.work(device, settings)
            self._post(device, work.forward, work)
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
        if not idle and cut.lead == 0:
            run.mirror.accept()  # else the next call tells those who did not run what changed
        if errors:
            raise first_of(errors)
        if cut.lead != 0 or self._is_delegated:
            run.mirror.take_buffers(self._module)
        with timing.joining():
            self.outputs = Outputs(team, self._number, cut, self._batch.dims, answers)
        timing.end()
        if not settings.grad:
            self._close()

    def _run_own(self) -> tuple[Structure, list[Any]]:
        """Run the first device's piece, in this process."""
        if self._cut.share(0) > self.run.team.faults.caps[0]:
            return self._run_smaller(None)
        leaves = self._batch.piece(*self._cut.parts[0])
        piece = self._new_piece(leaves)
        try:
            structure = piece.forward(self._function)
        except Exception as error:
            if not self._can_be_smaller(error):
                raise
            failure = messages.Failure.of(error)
        else:
            self._own = piece
            return structure, piece.outputs
        del piece  # and with the error what its traceback has held
        return self._run_smaller(failure)

    def _new_piece(self, leaves: Sequence[Any]) -> Piece:
        batch, grad = self._batch, self._settings.grad
        return Piece(leaves, batch.wanted, batch.structure, self._seeds[0], grad=grad)

    def _run_smaller(self, failure: messages.Failure | None) -> tuple[Structure, list[Any]]:
        """Run the first device's piece in portions."""
        work = self._assignment.work(0, self._settings)
        answer = self.run.team.smaller(0, work, work.forward, failure)
        self._is_delegated = True
        return self._take(0, answer)

    def _take(self, device: int, answer: Any) -> tuple[Structure, list[Any]]:
        """The structure and the leaves of a device's outputs, from its answer."""
        run = self.run
        run.remember(device, checked(run.team, device, answer))
        if answer.changed:
            run.mirror.take_attributes(self._module, answer.changed)
        return run.received[device], messages.unpicklable(answer.leaves)

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
        team, cut, forms = self.run.team, self._cut, self.outputs.forms
        self._check_graph()
        timing = self.timing
        timing.begin(BACKWARD, team.worked)
        inputs = [
            InputGradient(team, cut, tensor, dim)
            for tensor, dim in zip(self.inputs, self._input_dims, strict=True)
        ]
        mirror = self.run.mirror
        settings = self._settings._replace(flags=current_flags())
        others = [*cut.helpers, *([0] if self._is_delegated else [])]
        shared = SharedGradients(team, self._number, mirror.layout, mirror.layout_bytes)
        held: list[Region] = []  # they are read until all gradients are there

        def message(device: int) -> messages.Backward:
            parts = cut_gradients(gradients, forms, cut, device)
            places, region = put(team.arena, [part for part in parts if part is not None])
            held.append(region)
            rest = iter(places)
            target = shared.region(device)
            return messages.Backward(
                piece=self._number,
                gradients=[None if part is None else next(rest) for part in parts],
                target=messages.Span(target.offset, target.num_bytes),
                inputs=[gradient.places[device] for gradient in inputs],
                keep_graph=keep_graph,
                settings=settings,
            )

        for device in others:
            self._post(device, message(device))
        errors: list[BaseException] = []
        own: list[Tensor | None] = [None] * (len(inputs) + len(self.trainable))
        failure = None
        if self._own is not None:
            with collected(errors), timing.own_piece():
                own, failure = self._backward_own(self._own, gradients, keep_graph=keep_graph)
        answers: dict[int, messages.Gradients] = {}
        for device in others:
            with collected(errors), labelled("evener: waiting"):
                answers[device] = checked(team, device, team.receive(device))
        if failure is not None:
            self._own, self._is_delegated = None, True
            with collected(errors):
                work = self._assignment.work(0, self._settings)
                answers[0] = checked(team, 0, team.smaller(0, work, message(0), failure))
        timing.pieces()
        try:
            if errors:
                raise first_of(errors)
            with timing.joining():
                sums = shared.add_up(self._wanted, own[len(inputs) :], answers)
                reached = {device: answer.inputs for device, answer in answers.items()}
                joined = [
                    gradient.join(mine, {device: its[i] for device, its in reached.items()})
                    for i, (gradient, mine) in enumerate(zip(inputs, own, strict=False))
                ]
        finally:
            for region in held:
                region.close()
            shared.close()
            if errors or not keep_graph:
                self._close()
        timing.end()
        return [*joined, *sums]

    def _backward_own(
        self, piece: Piece, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> tuple[list[Tensor | None], messages.Failure | None]:
        """Run the first device's backward; gives its gradients, or none and how memory ended."""
        parts = cut_gradients(gradients, self.outputs.forms, self._cut, 0)
        try:
            return own_gradients(piece, parts, self.trainable, keep_graph=keep_graph), None
        except Exception as error:
            if not self._can_be_smaller(error):
                raise
            return [None] * (len(self.inputs) + len(self.trainable)), messages.Failure.of(error)

    def _post(self, device: int, message: Any, work: Work | None = None) -> None:
        self.run.team.post(device, message, work)

    def _can_be_smaller(self, error: Exception) -> bool:
        """Whether the first device's piece, which failed, can be run again in portions."""
        return is_memory_error(error) and not self._assignment.has_changed_inputs()

    def _check_graph(self) -> None:
        if not self.run.team.is_running or self._assignment.has_lost_structure():
            raise HelperDiedError(
                "the helpers no longer hold their part of this call's graph: they were stopped, "
                "or the module's structure changed; call the module again before backward"
            )
        if (
            self._own is None and self._is_open and self._assignment.has_changed(self._wanted)
        ):  # where the first device has a part, torch itself notices
            raise RuntimeError(
                "a parameter needed for this backward has been modified by an inplace operation "
                "since the forward"
            )
        if not self._is_open:
            raise RuntimeError(
                "Trying to backward through the graph of a parallel module a second time; give "
                "retain_graph=True to the first backward"
            )


def checked(team: Team, device: int, answer: Any) -> Any:
    """The answer of a device, if it is no failure."""
    if isinstance(answer, messages.Failure):
        raise team.error_of(device, answer)
    return answer
