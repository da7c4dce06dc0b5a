"""A coupled call: one whose devices wait for each other in the middle of their pieces.

It differs from another :class:`Call` in that each phase is a meeting. A device that fails is not
helped alone: the others have gone as far as they could without it. All of the phase then ends with
a ``DisturbedError``, the module can be put back to what it was before, and ``together`` makes the
call again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evener import messages
from evener.batchnorm import most_values
from evener.call import Call
from evener.errors import SampleTooLargeError
from evener.meeting import DisturbedError, Loss, Meeting
from evener.memory import is_memory_error
from evener.piece import Piece, Settings
from evener.state import Moment
from evener.trees import Structure
from evener.work import Work


class CoupledCall(Call):
    """A call whose devices wait for each other. Its arguments are those of :class:`Call`.

    Attributes:
        settings: those that its forward had.
        moment: the module before it.
        has_drawn: whether the first device may have drawn random numbers.
        losses: the helpers that were lost in its last phase.
    """

    settings: Settings
    _meeting: Meeting

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moment = Moment(self._module)
        self.has_drawn = True
        self.losses: list[Loss] = []
        self._capacity = most_values(self._module)

    def forward(self, settings: Settings) -> None:
        """As :meth:`Call.forward`.

        Raises:
            DisturbedError: if a device could not do its part.
            SampleTooLargeError: if the devices do not have the memory for the batch together.
        """
        self.settings = settings
        caps = self.run.team.faults.caps
        most = sum(int(min(cap, self._cut.size)) for cap in caps)
        if any(self._cut.share(device) > caps[device] for device in self._cut.parts):
            raise SampleTooLargeError(
                f"the devices have memory for {most} samples together, and the "
                f"batch has {self._cut.size}: batch norm over all of them cannot be computed in "
                'portions; use a smaller batch, or batchnorm="local"'
            )
        self._check_there([i for i in self.devices if not self.run.team.present[i]])
        self._begin_meeting()
        with self._meeting.held():
            super().forward(settings)

    def backward(
        self, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> list[Tensor | None]:
        """As :meth:`Call.backward`.

        Raises:
            DisturbedError: if a device could not do its part, or has lost its forward.
        """
        self._check_graph()
        team = self.run.team
        self._check_there([i for i in self.devices if not team.holds(i, self._number)])
        self._begin_meeting()
        with self._meeting.held():
            return super().backward(gradients, keep_graph=keep_graph)

    def check_repeatable(self) -> None:
        """See that it can be made again; see :meth:`Assignment.check_repeatable`."""
        self._assignment.check_repeatable()

    @property
    def devices(self) -> list[int]:
        """The devices that work, but for the first of the team."""
        return self._cut.helpers

    def share(self, device: int) -> int:
        """The samples of a device."""
        return self._cut.share(device)

    def _check_there(self, missing: Sequence[int]) -> None:
        if missing:
            self.losses = []
            self._close()
            raise DisturbedError(missing[0])

    def _begin_meeting(self) -> None:
        self._meeting = self.run.team.meet(list(self._cut.parts), self._capacity)
        self.losses = self._meeting.losses

    def _post(self, device: int, message: Any, work: Work | None = None) -> None:
        meeting = self._meeting
        message = replace(message, meeting=meeting.place_of(device))
        self.run.team.post(device, message, work, meeting)

    def _run_own(self) -> tuple[Structure, list[Any]]:
        function = self._function

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = torch.get_rng_state()
            outputs = function(*args, **kwargs)
            self.has_drawn = not torch.equal(before, torch.get_rng_state())
            return outputs

        self._function = watched
        try:
            with self._meeting.attended_by(self._module):
                return super()._run_own()
        except Exception as error:
            if not is_memory_error(error):
                raise
            failure = messages.Failure.of(error)
        finally:
            self._function = function
            self.timing.waited_s = self._meeting.waited_s
        raise DisturbedError(0, failure)

    def _backward_own(
        self, piece: Piece, gradients: Sequence[Tensor | None], *, keep_graph: bool
    ) -> tuple[list[Tensor | None], messages.Failure | None]:
        try:
            with self._meeting.attended_by(self._module):
                return super()._backward_own(piece, gradients, keep_graph=keep_graph)
        except Exception as error:
            if not is_memory_error(error):
                raise
            failure = messages.Failure.of(error)
        finally:
            self.timing.waited_s = self._meeting.waited_s
        raise DisturbedError(0, failure)

    def _can_be_smaller(self, _error: Exception) -> bool:
        return False  # not in portions: then all of the call is made again
