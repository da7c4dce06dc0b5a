"""The pace of a device: what samples cost on it, from what calls have measured. No torch.

The model is ``seconds = fixed + per sample x samples``, fitted to the latest calls. Two questions
are answered by two different middles of the same ratios, measured seconds to modelled ones:

* Has the device changed? The mean of the calls near their median is what is *typical*. What a call
  takes beyond that is added up, cut to a certain size and less an allowance, and a sum beyond a
  limit means a change. (A cumulative sum test: Page, *Continuous inspection schemes*, 1954.) One
  outlier is too small for it, two in a row suffice, and where the sum was zero last the change
  began: older calls are forgotten, and the model follows at once instead of slowly.
* What will a call cost? The mean of *all* calls, as far as they prove it: a device whose core
  belongs to somebody else every sixth call is slower on average, though most calls do not show it;
  one stolen time slice, on the other hand, proves nothing and must not move anything.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from evener.shares import Cost

#: How many calls a pace remembers.
WINDOW = 32
#: After so many calls a measurement counts half.
HALF_LIFE = 16
#: How far a device's fixed part may lie from what is usual, as a part of its time. It keeps the
#: line through calls of hardly different shares, which may have any slope, near the usual.
FIXED_PART = 0.2
#: So many surprises show how noisy they are.
ENOUGH = 8
#: The noise of a single call, as far as nothing is known.
NOISE = 0.1
#: How wrong the line may be at twice as many samples as near, as a part; near is what lies within
#: half an octave of samples that were measured.
STRETCH = 0.1
NEAR = 0.5
#: More samples never take less time: at least this part of it depends on them.
LEAST_SLOPE = 0.05
#: Fewer values than this have no middle that an outlier does not move.
FEW = 3
#: What one call can add to the evidence of a change, as the logarithm of a ratio; the allowance
#: that is taken off each time; and the limit beyond which there was one.
CLIP, ALLOWANCE, LIMIT = 0.3, 0.05, 0.4

_WEIGHTS = [0.5 ** (age / HALF_LIFE) for age in range(WINDOW)]


class ChangeTest:
    """Tells when something has changed, from how much it surprises each time."""

    def __init__(self) -> None:
        # Evidence for more and for less than before; and how many times have brought it.
        self._evidence = [0.0, 0.0]
        self._since = [0, 0]
        self._sizes: deque[float] = deque(maxlen=WINDOW)

    def weigh(self, surprise: float) -> int:
        """Weigh the latest surprise.

        Args:
            surprise: the logarithm of what is to what was expected.

        Returns:
            Zero; or, if there was a change, how many times it is ago, this one included.
        """
        self._sizes.append(abs(surprise))
        # Of what is noisy more is expected; half of all surprises are smaller than their median.
        noise = 1.48 * statistics.median(self._sizes) if len(self._sizes) > ENOUGH else 0.0
        scale = max(1.0, noise / ALLOWANCE / 2)
        for i, sign in enumerate((1.0, -1.0)):
            step = min(max(sign * surprise, -CLIP * scale), CLIP * scale) - ALLOWANCE * scale
            self._evidence[i] = max(0.0, self._evidence[i] + step)
            self._since[i] = self._since[i] + 1 if self._evidence[i] else 0
            if self._evidence[i] > LIMIT * scale:
                since = self._since[i]
                self._evidence, self._since = [0.0, 0.0], [0, 0]
                return since
        return 0


class Pace:
    """The pace of one device.

    Attributes:
        cost: what samples cost; None before the first call that counts.
        noise: the spread of single calls around the model, as a part of their seconds.
        weight: how much its calls say about its fixed part.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # samples, seconds
        self._is_first = True
        self.cost: Cost | None = None
        self._typical = 1.0  # what measured to modelled seconds typically are
        self._ratios: list[tuple[int, float]] = []
        self.noise = 0.0
        self.weight = 0.0

    @property
    def num_calls(self) -> int:
        """How many calls are remembered."""
        return len(self._calls)

    def observe(self, samples: int, seconds: float) -> None:
        """Note a call; the model is made anew by :meth:`fit`.

        Args:
            samples: how many it had, one or more.
            seconds: how long it was busy with them.
        """
        if self._is_first:  # it pays for what is made once
            self._is_first = False
            return
        self._calls.append((samples, max(seconds, 1e-9)))

    def surprise(self, samples: int, seconds: float) -> float:
        """The logarithm of measured to typical seconds; zero where there is no model."""
        if self.cost is None:
            return 0.0
        return math.log(max(seconds, 1e-9) / (self.cost.seconds(samples) * self._typical))

    def forget(self, num_kept: int) -> None:
        """Forget all calls but the latest."""
        while len(self._calls) > num_kept:
            self._calls.popleft()

    def fit(self, usual_samples: float = 0.0) -> None:
        """Make the model from the calls that are remembered.

        Args:
            usual_samples: what the fixed part is worth, in samples, on devices like this one.
        """
        if not self._calls:
            return
        weights = _WEIGHTS[len(self._calls) - 1 :: -1]
        ridge = max(self.noise, NOISE / math.sqrt(len(self._calls))) / FIXED_PART
        shape = _line(self._calls, weights, ridge, usual_samples)
        ratios = [(n, seconds / shape.seconds(n)) for n, seconds in self._calls]
        values = [ratio for _, ratio in ratios]
        mean = sum(n for n, _ in self._calls) / len(self._calls)
        self.weight = sum((n / mean - 1) ** 2 for n, _ in self._calls) / ridge**2
        typical, self.noise = _typical(values, weights)
        level = max(typical, proven_mean(values))  # as `expected`, of the same typical value
        self.cost = Cost(shape.fixed_s * level, shape.per_sample_s * level)
        self._ratios = [(n, ratio / typical) for n, ratio in ratios]
        self._typical = typical / level

    def seconds(self, samples: int) -> float:
        """How long that many samples are expected to take.

        A line is not the whole truth (caches); what was measured near this number of samples
        corrects it.
        """
        if self.cost is None or not samples:
            return 0.0
        near = [ratio for n, ratio in self._ratios if abs(n - samples) <= samples // 16]
        correction = statistics.median(near) if len(near) >= FEW else 1.0
        return self.cost.seconds(samples) * correction

    def doubt(self, samples: int) -> float:
        """How wrong what is expected of that many samples may be, as a part of it."""
        if not self._calls:
            return 0.0
        stretch = min(abs(math.log2(samples / n)) for n, _ in self._calls)
        return self.noise / math.sqrt(len(self._calls)) + STRETCH * max(0.0, stretch - NEAR)


def expected(values: Sequence[float]) -> float:
    """What a value will be: a typical one, or their mean as far as they prove it."""
    return max(_typical(values, [1.0] * len(values))[0], proven_mean(values))


def proven_mean(values: Sequence[float]) -> float:
    """What the mean of positive numbers is at least, to about one standard error.

    The largest is left out if there are two or more, so that it takes several large ones.
    """
    if len(values) < FEW:
        return min(values)
    kept = sorted(values)[:-1]
    mean = sum(kept) / len(kept)
    variance = sum((value - mean) ** 2 for value in kept) / (len(kept) - 1)
    return max(0.0, mean - math.sqrt(variance / len(kept)))


def _typical(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The mean of the values near the median, and their spread around it as a part of it."""
    if len(values) < FEW:
        return min(values), 0.0
    median = max(statistics.median(values), 1e-9)
    # 1.48: of a normal distribution the standard deviation.
    noise = 1.48 * statistics.median([abs(value / median - 1) for value in values])
    total = weight = 0.0
    for value, its_weight in zip(values, weights, strict=True):
        if abs(value / median - 1) <= 2.5 * noise + 1e-9:
            total += its_weight * value
            weight += its_weight
    return total / weight, noise


def _line(
    calls: Sequence[tuple[int, float]],
    weights: Sequence[float],
    ridge: float,
    usual_samples: float,
) -> Cost:
    """The line through calls with the least relative errors, neither part of it negative.

    ``(fixed + per sample x samples) / seconds`` should be one. In these terms a call that took ten
    times as long as it should errs by 0.9, hardly more than one that took twice as long.

    Args:
        calls: samples and seconds.
        weights: one a call.
        ridge: how strongly the calls have to speak for another fixed part than the usual one.
        usual_samples: the usual one, in samples.
    """
    # In units of the mean, so that both unknowns are parts of it: a x + b y = 1.
    mean_n = sum(n for n, _ in calls) / len(calls)
    mean_s = statistics.median(seconds for _, seconds in calls)
    usual = usual_samples / mean_n
    xx, xy, yy = ridge * ridge, -ridge * ridge * usual, (ridge * usual) ** 2
    x1 = y1 = 0.0
    for (n, seconds), weight in zip(calls, weights, strict=True):
        x = mean_s / seconds
        y = n / mean_n * x
        xx += weight * x * x
        xy += weight * x * y
        yy += weight * y * y
        x1 += weight * x
        y1 += weight * y
    determinant = xx * yy - xy * xy
    a = (x1 * yy - y1 * xy) / determinant if determinant > 1e-9 * xx * yy else 0.0
    b = (y1 - a * xy) / yy
    if a < 0:
        a, b = 0.0, y1 / yy
    elif b < LEAST_SLOPE:
        b = LEAST_SLOPE
        a = max(0.0, (x1 - b * xy) / xx)
    return Cost(a * mean_s, b * mean_s / mean_n)
