"""Together: a call of devices that wait for each other, made again where one of them fails.

::

    forward    fails ─► the module as before it ─► a new helper ─► forward, the same pieces
    backward   fails ─► the module as before the forward ─► a new helper ─► forward, backward
                        ─► the module as it was just now

The pieces, and their seeds, stay the same, so the numbers do, bit for bit. Only where a device has
no memory for its piece the batch is cut anew; after the forward not if the module draws random
numbers, since others would be drawn than those that the outputs were made with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor, nn

from evener.call import Call
from evener.coupled import CoupledCall
from evener.errors import HelperDiedError
from evener.journal import FORWARD
from evener.meeting import DisturbedError, Loss
from evener.outputs import Outputs
from evener.piece import Settings, current_flags, set_flags
from evener.run import Run
from evener.state import Moment
from evener.timing import Timing

#: Makes the call once more: as it was, or cut anew.
Make: TypeAlias = Callable[[Call | None], Call]

_AGAIN = "all devices made the call again"


class Together:
    """A call that is made again where a device fails; to its user it is like a :class:`Call`.

    Args:
        call: the call.
        module: the user's module.
        make: makes it once more: given the call as that was, given None with other shares.

    Attributes:
        run: what it has in common with other calls.
        inputs: the inputs that a gradient is wanted for.
        trainable: the module's shared tensors that require a gradient.
    """

    def __init__(self, call: CoupledCall, module: nn.Module, make: Make) -> None:
        self.run: Run = call.run
        self.inputs, self.trainable = call.inputs, call.trainable
        self._call: Call = call
        self._module = module
        self._make = make
        self._is_over = False  # whether the user has its outputs
        self._deaths: Counter[int] = Counter()  # of helpers, by their device
        self._own_deaths: Counter[int] = Counter()  # of those that their piece may have ended

    @property
    def outputs(self) -> Outputs:
        """The joined outputs, after :meth:`forward`."""
        return self._call.outputs

    @property
    def timing(self) -> Timing:
        """The stop watch of the call as it was made last."""
        return self._call.timing

    def forward(self, settings: Settings) -> None:
        """As :meth:`Call.forward`.

        Raises:
            HelperDiedError: if a piece ends a second helper.
            SampleTooLargeError: if the devices do not have the memory for the batch together.
        """
        notes: list[Callable[[str], None]] = []
        try:
            while True:
                call = self._call
                try:
                    call.forward(settings)
                    break
                except DisturbedError as error:
                    disturbed = error.with_traceback(None)
                self._note(notes, _AGAIN)
                assert isinstance(call, CoupledCall)  # noqa: S101 - no other is disturbed
                call.moment.put_back(self._module)
                self._call = self._again(call, disturbed, notes)
        except BaseException:
            self._note(notes, "the call is lost")
            raise
        self._note(notes, _AGAIN)
        self._is_over = True

    def backward(
        self, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> list[Tensor | None]:
        """As :meth:`Call.backward`.

        Raises:
            HelperDiedError: if what the forward had is not there any more to make it again.
        """
        while True:
            call = self._call
            try:
                return call.backward(gradients, keep_graph=keep_graph)
            except DisturbedError as error:
                disturbed = error.with_traceback(None)
            assert isinstance(call, CoupledCall)  # noqa: S101 - no other is disturbed
            self._rewind(call, disturbed)

    def _rewind(self, call: CoupledCall, disturbed: DisturbedError) -> None:
        """Make the forward of a call once more, behind the user's back."""
        notes: list[Callable[[str], None]] = []
        now, flags = Moment(self._module), current_flags()
        shared = self.run.mirror.shared
        wanted = [tensor.requires_grad for tensor in shared]
        try:
            call.check_repeatable()
            device = disturbed.device
            if disturbed.failure is not None and call.has_drawn:
                self.run.team.faults.limit(device, -(-call.share(device) // 2))
                raise self.run.team.error_of(device, disturbed.failure)  # noqa: TRY301
            call.moment.put_back(self._module)
            for tensor in self.trainable:
                tensor.requires_grad_()
            self._call = new = self._again(call, disturbed, notes)
            with call.settings.applied():
                self.forward(call.settings)
            new, new.timing = self._call, call.timing
        except BaseException:
            self._note(notes, "the call is lost")
            raise
        finally:
            set_flags(flags)
            now.put_back(self._module)
            for tensor, want in zip(shared, wanted, strict=True):
                tensor.requires_grad_(want)
            self.run.team.unload()
        self._note(notes, _AGAIN)

    def _again(
        self, call: CoupledCall, disturbed: DisturbedError, notes: list[Callable[[str], None]]
    ) -> Call:
        """The call to make in the place of one that a device could not do.

        Args:
            call: the call.
            disturbed: what happened.
            notes: gets what is to be noted when it is known what was done.
        """
        team, device = self.run.team, disturbed.device
        self.run.settle()  # others may have answers that nobody waits for any more
        is_cut_anew = disturbed.failure is not None
        if disturbed.failure is not None:
            self._limit(call, device, disturbed.failure.summary)
        losses, call.losses = call.losses, []
        notes += [loss.note for loss in losses]
        for loss in losses:
            self._check(call, loss)
            if loss.cause.is_memory:
                is_cut_anew = True
                team.faults.limit(loss.device, -(-call.share(loss.device) // 2))
        if not team.summon(call.devices) and not is_cut_anew:
            if self._is_over and call.has_drawn:
                raise HelperDiedError(
                    "a device has no helper any more, and no new one could be started; the module "
                    "works on, with gradients as before the call"
                )
            is_cut_anew = True
        team.unload()
        return self._make(None if is_cut_anew else call)

    def _limit(self, call: CoupledCall, device: int, summary: str) -> None:
        faults, size = self.run.team.faults, call.share(device)
        most = size // 2
        faults.limit(device, most)
        kind = "forward" if call.timing.kind == FORWARD else "backward"
        what = f"had no memory for {size} samples ({summary})"
        action = f"{_AGAIN}, cut anew; it gets no more than {most} from now on"
        faults.note(device, kind, what, action, since_s=time.perf_counter())

    def _check(self, call: CoupledCall, loss: Loss) -> None:
        faults, device = self.run.team.faults, loss.device
        self._deaths[device] += 1
        self._own_deaths[device] += loss.cause.is_own
        if self._own_deaths[device] > 1 or self._deaths[device] > faults.restarts + 1:
            raise HelperDiedError(
                f"a piece of {call.share(device)} samples has ended two helpers of "
                f"{faults.label(device)}, and would end more: the last {loss.cause.text}; the "
                "module works on, with gradients as before the call"
            )

    @staticmethod
    def _note(notes: list[Callable[[str], None]], action: str) -> None:
        while notes:
            notes.pop(0)(action)
