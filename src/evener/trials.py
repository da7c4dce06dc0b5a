"""Trials: when a device without a share is tried again. No torch.

Who has no share is not measured, and could stay away for ever. The more a trial costs, the later
it comes: after a trial that took as long as three calls without the device, as many calls pass as
make these two calls ``TRIAL_PART`` of the time. A device that turns out to be faster than thought
is tried again at once, for one measurement alone proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: The part of the time that trials of devices without a share may cost.
TRIAL_PART = 0.003
#: At least so many calls lie between two trials, however cheap they are.
REST = 16
#: After so many calls without a share, a device is said to be left out.
LEFT_OUT = 8
#: A device that is this much faster than thought, as a logarithm, is tried again at once ...
BETTER = 0.15
#: ... so many times.
NUM_REPEATS = 2


class Trials:
    """Counts the calls in which devices have had no share.

    Args:
        num_devices: how many there are.

    Attributes:
        num_missed: for each device the calls since it had a share.
    """

    def __init__(self, num_devices: int) -> None:
        self.num_missed = [0] * num_devices
        self._look_at = [REST] * num_devices  # with how many missed calls to think of a trial
        self._repeats = [0] * num_devices
        self._said: set[int] = set()
        self._running: tuple[tuple[int, ...], float] | None = None  # who, and seconds without

    def miss(self, devices: Sequence[int]) -> None:
        """The next call has no share for these."""
        self._running = None
        for i in devices:
            self.num_missed[i] += 1

    def due(self, devices: Sequence[int]) -> list[int]:
        """Which of these a trial may be due for."""
        return [i for i in devices if self._repeats[i] or self.num_missed[i] >= self._look_at[i]]

    def begin(self, devices: Sequence[int], trial_s: float, without_s: float) -> bool:
        """Whether the calls that were missed pay for a trial; if so, it is the next call.

        Args:
            devices: who would be tried.
            trial_s: how long a call with them is expected to last.
            without_s: how long one without them.
        """
        rest = self._rest(trial_s, without_s)
        for i in devices:
            if not self._repeats[i] and self.num_missed[i] < rest:
                self._look_at[i] = rest
                return False
        self._running = (tuple(devices), without_s)
        return True

    def end(self, surprises: Mapping[int, float], lasted_s: float) -> bool:
        """A call is over.

        Args:
            surprises: for each device that had a share how much slower than thought it was, as the
                logarithm of a ratio.
            lasted_s: how long the call lasted.

        Returns:
            Whether it was a trial.
        """
        for i in surprises:
            self.num_missed[i] = 0
        if self._running is None:
            return False
        devices, without_s = self._running
        self._running = None
        for i in devices:
            self._look_at[i] = self._rest(lasted_s, without_s)
            if surprises.get(i, 0.0) >= -BETTER:
                self._repeats[i] = 0
            elif self._repeats[i]:
                self._repeats[i] -= 1
            else:
                self._repeats[i] = NUM_REPEATS
        return True

    def news(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Which of the devices without a share are now left out; each is said once."""
        news = [i for i in devices if self.num_missed[i] >= LEFT_OUT and i not in self._said]
        self._said.update(news)
        return tuple(news)

    def _rest(self, trial_s: float, without_s: float) -> int:
        """How many calls pay for a trial; those who rest share in them."""
        num_resting = sum(missed > 0 for missed in self.num_missed) or 1
        extra = max(0.0, trial_s / max(without_s, 1e-9) - 1)
        return max(REST, math.ceil(extra * num_resting / TRIAL_PART))
