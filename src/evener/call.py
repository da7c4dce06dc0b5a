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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from evener import messages
from evener.arena import put
from evener.batches import Batch, Cut
from evener.errors import HelperDiedError
from evener.gradients import InputGradient, SharedGradients, cut_gradients, own_gradients
from evener.journal import BACKWARD, FORWARD, INFERENCE
from evener.outputs import Outputs
from evener.piece import Piece, Settings, current_flags
from evener.run import Run
from evener.timing import Timing
from evener.trees import Structure, structure_to_bytes


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
        timing: its stop watch.
        inputs: the inputs that a gradient is wanted for.
        trainable: the module's shared tensors that require a gradient.
        outputs: the joined outputs, after :meth:`forward`.
    """

    outputs: Outputs

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
        self._is_open = False  # whether helpers hold a piece of this call
        self._run = run
        self.timing = timing
        timing.begin(FORWARD, run.team.worked)
        self._module = module
        self._function = function
        self._batch = batch
        self._cut = cut
        self._seeds = seeds
        run.num_calls += 1
        self._number = run.num_calls
        self._update = run.mirror.refresh(module, everything=cut.lead != 0)
        self._layout = run.mirror.layout
        self._wanted = [i for i, tensor in enumerate(run.mirror.shared) if tensor.requires_grad]
        self.trainable = [run.mirror.shared[i] for i in self._wanted]
        wanted = [i for i, want in enumerate(batch.wanted) if want]
        self.inputs: list[Tensor] = [batch.leaves[i] for i in wanted]
        self._input_dims = [batch.cut_dims[i] for i in wanted]
        self._own: Piece | None = None
        self._versions = [tensor._version for tensor in self.trainable]

    def __del__(self) -> None:
        if self.timing.num_phases == 1 and self.timing.kind == FORWARD:
            self._run.forwards.append(self.timing)
        self._close()

    def _close(self) -> None:
        """Let the helpers forget their pieces."""
        self._own = None
        if self._is_open:
            self._is_open = False
            self._run.team.drop(self._cut.helpers, self._number)

    # -------------------------------------------------------------- forward

    def forward(self, settings: Settings) -> None:
        """Run forward on all devices; what came out is then in ``outputs``.

        Args:
            settings: those of the user's program; ``grad`` tells whether a backward may come.
        """
        run, team, cut, timing = self._run, self._run.team, self._cut, self.timing
        timing.prepared(FORWARD if settings.grad else INFERENCE)
        everybody = range(1, len(team.devices))
        idle = [device for device in everybody if device not in cut.parts]
        resting = idle if self._update else []
        self._is_open = True
        for device in cut.helpers:
            team.post(device, self._message(device, settings))
            run.sent[device] = self._batch.structure
        for device in resting:
            team.post(device, messages.Follow(self._update))
        answers: dict[int, tuple[Structure, list[Any]]] = {}
        errors: list[BaseException] = []
        if 0 in cut.parts:
            with _collected(errors), timing.own_piece():
                answers[0] = self._run_own(settings)
        for device in cut.helpers:
            with labelled("evener: waiting"):
                answer = team.receive(device)
            if isinstance(answer, messages.Failure):
                errors.append(team.error_of(device, answer))
                continue
            run.remember(device, answer)
            answers[device] = (run.received[device], messages.unpicklable(answer.leaves))
            if answer.changed:
                run.mirror.take_attributes(self._module, answer.changed)
        timing.pieces()
        team.collect(resting)
        if not idle and cut.lead == 0:
            run.mirror.accept()  # else the next call tells those who did not run what changed
        if errors:
            raise errors[0]
        if cut.lead != 0:
            run.mirror.take_buffers(self._module)
        with timing.joining():
            self.outputs = Outputs(team, self._number, cut, self._batch.dims, answers)
        timing.end()
        if not settings.grad:
            self._close()

    def _run_own(self, settings: Settings) -> tuple[Structure, list[Any]]:
        """Run the first device's piece, in this process."""
        batch = self._batch
        leaves = batch.piece(*self._cut.parts[0])
        piece = Piece(leaves, batch.wanted, batch.structure, self._seeds[0], grad=settings.grad)
        structure = piece.forward(self._function)
        self._own = piece
        return structure, piece.outputs

    def _message(self, device: int, settings: Settings) -> messages.Forward:
        """Put a helper's part of the inputs into the arena, and say where."""
        run, batch = self._run, self._batch
        leaves = batch.piece(*self._cut.parts[device])
        places, region = put(run.team.arena, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        run.team.keep(device, self._number, region)
        rest = iter(places)
        described = [
            messages.Input(next(rest), want) if isinstance(leaf, Tensor) else leaf
            for leaf, want in zip(leaves, batch.wanted, strict=True)
        ]
        is_new = run.sent.get(device) != batch.structure
        return messages.Forward(
            piece=self._number,
            update=self._update,
            structure=structure_to_bytes(batch.structure) if is_new else None,
            leaves=messages.picklable(described),
            span=messages.Span(region.offset, region.num_bytes),
            seed=self._seeds[device],
            settings=settings,
            lead=device == self._cut.lead,
        )

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
        team, cut, forms = self._run.team, self._cut, self.outputs.forms
        self._check_graph()
        timing = self.timing
        timing.begin(BACKWARD, team.worked)
        inputs = [
            InputGradient(team, cut, tensor, dim)
            for tensor, dim in zip(self.inputs, self._input_dims, strict=True)
        ]
        num_bytes = self._run.mirror.layout_bytes
        shared = SharedGradients(team, cut.helpers, self._layout, num_bytes)
        flags = current_flags()
        held = []  # regions that the helpers read until they answer
        for device in cut.helpers:
            parts = cut_gradients(gradients, forms, cut, device)
            places, region = put(team.arena, [part for part in parts if part is not None])
            held.append(region)
            rest = iter(places)
            target = shared.regions[device]
            message = messages.Backward(
                piece=self._number,
                gradients=[None if part is None else next(rest) for part in parts],
                target=messages.Span(target.offset, target.num_bytes),
                inputs=[gradient.places[device] for gradient in inputs],
                keep_graph=keep_graph,
                flags=flags,
            )
            team.post(device, message)
        errors: list[BaseException] = []
        own: list[Tensor | None] = [None] * (len(inputs) + len(self.trainable))
        if self._own is not None:
            with _collected(errors), timing.own_piece():
                parts = cut_gradients(gradients, forms, cut, 0)
                own = own_gradients(self._own, parts, self.trainable, keep_graph=keep_graph)
        answers: dict[int, messages.Gradients] = {}
        for device in cut.helpers:
            with labelled("evener: waiting"):
                answer = team.receive(device)
            if isinstance(answer, messages.Failure):
                errors.append(team.error_of(device, answer))
            else:
                answers[device] = answer
        timing.pieces()
        for region in held:
            region.close()
        if errors or not keep_graph:
            self._close()
        if errors:
            shared.close()
            raise errors[0]
        with timing.joining():
            sums = shared.add_up(self._wanted, own[len(inputs) :], answers)
            shared.close()
            reached = {device: answer.inputs for device, answer in answers.items()}
            joined = [
                gradient.join(mine, {device: its[i] for device, its in reached.items()})
                for i, (gradient, mine) in enumerate(zip(inputs, own, strict=False))
            ]
        timing.end()
        return [*joined, *sums]

    def _check_graph(self) -> None:
        if not self._run.team.is_running or self._layout is not self._run.mirror.layout:
            raise HelperDiedError(
                "the helpers no longer hold their part of this call's graph: they were stopped, "
                "or the module's structure changed; call the module again before backward"
            )
        if (
            self._own is None
            and self._is_open
            and self._versions != [tensor._version for tensor in self.trainable]
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


def labelled(name: str) -> AbstractContextManager[Any]:
    """Show a part of the work in the user's profile, if there is one."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return nullcontext()


@contextmanager
def _collected(errors: list[BaseException]) -> Iterator[None]:
    """Keep an error until the other devices have answered; an interrupt does not wait."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised when the others have answered
        errors.append(error)
