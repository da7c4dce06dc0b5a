"""Balance: from what calls have measured to the shares of the next. No torch.

::

    choose(batch) ──► shares ──► the call ──► observe(shares, seconds, ...) ──► paces ─┐
         ▲                                                                             │
         └── shares by cost; a new cut only if it gains more than it may cost ◄────────┘

A call on all devices takes as long as its slowest device, and something beyond that: moving
tensors, waiting for a device that was late by chance. Both are measured. What the first device
would take alone has nothing beyond; so a device that costs more than it brings gets no share, and
where all others do, the call is the plain call of one device.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from evener.pace import WINDOW, ChangeTest, Pace, expected, proven_mean
from evener.shares import Choice, Cost, enough, share_by_cost, share_out
from evener.trials import REST, Trials

#: New shares must gain this part of the time: new shapes cost caches, compilation, autotuning.
GAIN = 0.02
#: More than that is not asked for, however little is known: only trying tells.
MAX_DOUBT = 0.1
#: Before so many calls with it, a device is not left out.
PROBATION = 3
#: So many calls show how much later than expected the slowest device usually is.
ENOUGH = 8
#: After so many calls without a change, the paces are made anew only now and then.
SETTLED = 32
#: How many different batch sizes have their shares remembered.
NUM_SIZES = 64


class _Call(NamedTuple):
    """What a call of several devices showed."""

    shares: tuple[int, ...]
    done_s: tuple[float, ...]  # until each device was done; zero without a share
    beyond_s: float  # from when the last was done to its end


class Balancer:
    """Finds shares by which all devices are done at the same time.

    Args:
        num_devices: how many there are.
        caps: the most samples that each device can have. Default: no limits.

    Attributes:
        num_observed: how many calls it has learned from.
    """

    def __init__(self, num_devices: int, caps: Sequence[float] | None = None) -> None:
        self.num_observed = 0
        self._caps = [math.inf] * num_devices if caps is None else list(caps)
        self._paces = [Pace() for _ in range(num_devices)]
        self._tests = [ChangeTest() for _ in range(num_devices)]
        self._common_test = ChangeTest()  # for what surprises all devices alike
        # From the start of a phase to a device's own start: its message, its wake-up.
        self._lags: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(num_devices)]
        self._lag_s = [0.0] * num_devices
        self._calls: deque[_Call] = deque(maxlen=WINDOW)
        self._beyond_s = 0.0
        self._version = 0  # of the paces
        self._num_settled = 0  # calls since a device has changed
        self._num_unfitted = 0
        self._sizes: OrderedDict[int, tuple[int, tuple[int, ...]]] = OrderedDict()
        self._trials = Trials(num_devices)
        self._num_to_measure = PROBATION  # calls of the first device alone

    def limit(self, caps: Sequence[float]) -> None:
        """Set the most samples of each device: zero for one that is not there now."""
        if list(caps) != self._caps:
            self._caps = list(caps)
            self._version += 1

    # -------------------------------------------------------------- observing

    def observe(
        self,
        shares: Sequence[int],
        busy_s: Sequence[float],
        lags_s: Sequence[float],
        lasted_s: float,
    ) -> None:
        """Learn from a call.

        Args:
            shares: what each device had.
            busy_s: how long each was busy with it; of a device without a share it is ignored.
            lags_s: from the start of the call's phases to each device's own start, together.
            lasted_s: how long the call's phases lasted.
        """
        active = [i for i, share in enumerate(shares) if share]
        surprises = {i: self._paces[i].surprise(shares[i], busy_s[i]) for i in active}
        for i in active:
            self._paces[i].observe(shares[i], busy_s[i])
            if active != [0]:
                self._lags[i].append(lags_s[i])
        changed = self._look_for_changes(surprises)
        if active != [0]:
            done_s = tuple(
                busy + lag if share else 0.0
                for share, busy, lag in zip(shares, busy_s, lags_s, strict=True)
            )
            self._calls.append(_Call(tuple(shares), done_s, lasted_s - max(done_s)))
        if self._trials.end(surprises, lasted_s):  # what was tried is compared with what is done
            self._num_to_measure = max(self._num_to_measure, 1)
        self.num_observed += 1
        self._num_unfitted += 1
        self._num_settled = 0 if changed else self._num_settled + 1
        if changed:
            self._calls.clear()
        if self._num_settled < SETTLED or self._num_unfitted >= max(8, len(self._paces)):
            self._fit(active)

    def _look_for_changes(self, surprises: dict[int, float]) -> bool:
        """Let paces forget what was before a change."""
        changed = False
        for i in surprises:
            num_kept = self._tests[i].weigh(_relative(i, surprises))
            if num_kept:
                self._paces[i].forget(num_kept)
                changed = True
        # What changes for all, such as longer samples from now on, does not change the shares, but
        # it must not look like the change of one of them when that one forgets and others do not.
        num_kept = self._common_test.weigh(statistics.median(surprises.values()))
        if num_kept:
            for pace in self._paces:
                pace.forget(num_kept)
        return changed or bool(num_kept)

    def _fit(self, active: Sequence[int]) -> None:
        self._version += 1
        self._num_unfitted = 0
        usual_samples = self._usual_samples()
        for i in active:
            self._paces[i].fit(usual_samples)
            self._lag_s[i] = expected(self._lags[i]) if self._lags[i] else 0.0
        if self._calls:
            self._beyond_s = expected([call.beyond_s for call in self._calls])
            self._beyond_s += self._jitter_s(self._calls[-1].shares)

    def _usual_samples(self) -> float:
        """What the fixed part is worth in samples, by most accounts: all run the same module."""
        accounts = [
            (pace.cost.fixed_s / pace.cost.per_sample_s, pace.weight)
            for pace in self._paces
            if pace.cost is not None
        ]
        accounts.append((0.0, 1.0))  # as long as nothing is known, there is no fixed part
        half = sum(weight for _, weight in accounts) / 2
        for samples, weight in sorted(accounts):
            half -= weight
            if half <= 0:
                return samples
        return 0.0

    def _jitter_s(self, shares: tuple[int, ...]) -> float:
        """How much later than the usually slowest device others are, because they take turns."""
        done_s = [call.done_s for call in self._calls if call.shares == shares]
        if len(done_s) < ENOUGH:
            return 0.0
        sums = [sum(of_device) for of_device in zip(*done_s, strict=True)]
        slowest = sums.index(max(sums))
        return proven_mean([max(of_call) - of_call[slowest] for of_call in done_s])

    # -------------------------------------------------------------- choosing

    def choose(self, batch: int) -> Choice:
        """The shares of a batch.

        Args:
            batch: number of samples, one or more.
        """
        shares = self._settled(batch)
        resting = [i for i, share in enumerate(shares) if not share and self._caps[i]]
        self._trials.miss(resting)
        trial = self._trial(batch, shares, self._trials.due(resting))
        if trial is not None:
            return Choice(trial)
        measured = True
        if shares[0] == batch:
            measured = self._num_to_measure > 0
            self._num_to_measure -= measured
        # With fewer samples than devices somebody has to rest, however fast.
        num_there = sum(cap > 0 for cap in self._caps)
        left_out = self._trials.news(resting) if batch >= num_there else ()
        return Choice(shares, measured, left_out)

    def _trial(
        self, batch: int, shares: tuple[int, ...], devices: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Shares with these devices, which have none, if it is time to try them."""
        costs = self._costs() if devices else None
        trial = self._including(batch, devices, costs) if costs else None
        if trial is None:
            return None
        is_due = self._trials.begin(devices, self._seconds(trial), self._seconds(shares))
        return trial if is_due else None

    def guess(self, batch: int) -> Choice:
        """The shares of a batch, for a call that this will not observe."""
        return Choice(self._settled(batch))

    def _settled(self, batch: int) -> tuple[int, ...]:
        """The shares of a batch, trials apart."""
        known = self._sizes.get(batch)
        if known is not None and known[0] == self._version:
            return known[1]
        shares = self._best(batch)
        if known is not None and all(map(operator.le, known[1], enough(batch, self._caps))):
            before_s, after_s = self._seconds(known[1]), self._seconds(shares)
            if after_s > before_s * (1 - max(GAIN, self._doubt(shares))):
                shares = known[1]
        if shares[0] == batch and (known is None or known[1] != shares):
            self._num_to_measure = PROBATION
        self._sizes[batch] = (self._version, shares)
        self._sizes.move_to_end(batch)
        if len(self._sizes) > NUM_SIZES:
            self._sizes.popitem(last=False)
        return shares

    def _best(self, batch: int) -> tuple[int, ...]:
        costs = self._costs()
        if costs is None:
            costs = [Cost(0.0, 1.0)] * len(self._paces)
            return share_by_cost(batch, costs, enough(batch, self._caps))
        shares = share_by_cost(batch, costs, enough(batch, self._caps))
        on_probation = [
            i
            for i, pace in enumerate(self._paces)
            if not shares[i] and pace.num_calls < PROBATION and self._trials.num_missed[i] < REST
            if self._caps[i]
        ]
        if on_probation:
            return self._including(batch, on_probation, costs) or shares
        alone = (batch, *[0] * (len(costs) - 1))
        is_possible = self._caps[0] >= batch and self._paces[0].num_calls >= PROBATION
        if is_possible and self._seconds(alone) <= self._seconds(shares):
            return alone
        return shares

    def _costs(self) -> list[Cost] | None:
        """What samples cost on each device in a call of all; None before the first call."""
        costs = [pace.cost for pace in self._paces]
        known = [cost for cost in costs if cost is not None]
        if not known:
            return None
        # Who has not run yet, because there were more devices than samples, is like the others.
        usual = Cost(
            statistics.median(cost.fixed_s for cost in known),
            statistics.median(cost.per_sample_s for cost in known),
        )
        filled = [usual if cost is None else cost for cost in costs]
        return [
            Cost(cost.fixed_s + lag_s, cost.per_sample_s)
            for cost, lag_s in zip(filled, self._lag_s, strict=True)
        ]

    def _including(
        self, batch: int, devices: Sequence[int], costs: Sequence[Cost]
    ) -> tuple[int, ...] | None:
        """Shares in which some devices have one, whatever it costs; None if there is no room."""
        quotas = share_out(batch, [1 / cost.per_sample_s for cost in costs])
        forced = {i: min(max(1, quotas[i]), self._caps[i]) for i in devices}
        left = batch - sum(forced.values())
        caps = [0.0 if i in forced else cap for i, cap in enumerate(self._caps)]
        if left < 1 or sum(caps) < left:
            return None
        shares = share_by_cost(int(left), costs, caps)
        return tuple(int(forced.get(i, share)) for i, share in enumerate(shares))

    def _seconds(self, shares: Sequence[int]) -> float:
        """How long a call with these shares is expected to last."""
        if not any(shares[1:]):
            return self._paces[0].seconds(shares[0])
        return self._slowest_s(shares) + self._beyond_s

    def _slowest_s(self, shares: Sequence[int]) -> float:
        return max(
            pace.seconds(share) + lag_s
            for pace, share, lag_s in zip(self._paces, shares, self._lag_s, strict=True)
            if share
        )

    def _doubt(self, shares: Sequence[int]) -> float:
        """How wrong what is expected of these shares may be, as a part."""
        pairs = zip(self._paces, shares, strict=True)
        return min(MAX_DOUBT, max(pace.doubt(share) for pace, share in pairs if share))


def _relative(device: int, surprises: dict[int, float]) -> float:
    """The surprise of a device beyond what surprised all: a batch may be longer than others."""
    if len(surprises) == 1:
        return surprises[device]
    others = [surprise for i, surprise in surprises.items() if i != device]
    return surprises[device] - statistics.median(others)
