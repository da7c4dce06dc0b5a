"""Shares: how many samples of a batch each device gets.

Pure arithmetic on numbers; no torch. A share is a whole number of samples, and zero is legal: a
device then rests for that call. A batch is cut in proportion to given numbers, or so that the
slowest device is done as early as can be::

    device 0   ├ fixed ┼──── samples ──────┤
    device 1   ├ fixed ┼─────── sample ────┤   seconds = fixed_s + per_sample_s x samples
    device 2   (none: one sample would take it beyond T)
                                           T   the least by which the batch can be done
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from evener.errors import SharesError


def share_out(batch: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Cut a batch in proportion to speeds, by the method of the largest remainder.

    Each device first gets the whole part of its exact quota; the samples left over go one each
    to the largest fractions; of equal ones the faster device comes first, then the earlier.
    (Hamilton's method, 1792; the rounding error of each share stays below one sample, and no share
    depends on the order of unequal devices.)

    Args:
        batch: number of samples, zero or more.
        speeds: one number a device, any unit, zero or more, not all zero.

    Returns:
        One share a device, in the order of ``speeds``; their sum is ``batch``.

    Raises:
        SharesError: if ``batch`` is negative, or ``speeds`` is empty, has a negative or
            non-finite number, or is all zero.

    Example:
        >>> share_out(10, (3, 1))
        (8, 2)
        >>> share_out(2, (1, 1, 1))
        (1, 1, 0)
        >>> share_out(0, (1, 1))
        (0, 0)
    """
    if batch < 0:
        raise SharesError(f"a batch has zero samples or more, not {batch}")
    _check(speeds)
    # Scaled by the largest first: a sum of huge speeds must not overflow to infinity.
    largest = max(speeds)
    scaled = [speed / largest for speed in speeds]
    total = math.fsum(scaled)
    quotas = [batch * part / total for part in scaled]
    shares = [math.floor(quota) for quota in quotas]
    left = batch - sum(shares)
    by_fraction = sorted(range(len(quotas)), key=lambda i: (shares[i] - quotas[i], -speeds[i], i))
    receivers = [i for i in by_fraction if scaled[i] > 0]
    for i in range(left):
        shares[receivers[i % len(receivers)]] += 1
    return tuple(shares)


class Cost(NamedTuple):
    """What samples cost on a device: ``fixed_s + per_sample_s x samples``; none cost nothing."""

    fixed_s: float
    per_sample_s: float

    def seconds(self, samples: int) -> float:
        """How long that many samples take."""
        return self.fixed_s + self.per_sample_s * samples if samples else 0.0


def share_by_cost(
    batch: int, costs: Sequence[Cost], caps: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Cut a batch so that the slowest device is done as early as possible.

    First with fractions of samples: the time T at which the devices' samples by T, each
    ``(T - fixed_s) / per_sample_s`` between zero and its cap, add up to the batch. Their whole
    parts are a beginning of the best shares, for every sample in them is done by T; each sample
    left over goes to the device that is done with it first. (A greedy choice, and optimal because
    a device's seconds only grow with its samples: Federgruen and Groenevelt, 1986.)

    Args:
        batch: number of samples, zero or more.
        costs: one a device; seconds that are not negative, and above zero for a sample.
        caps: the most samples that each device can have, such as for want of memory. Default:
            no limits.

    Returns:
        One share a device; their sum is ``batch``. No other shares have a smaller
        ``max(cost.seconds(share))``.

    Raises:
        SharesError: if ``batch`` is negative, a cost is not as above, or the caps do not leave
            room for the batch.

    Example:
        >>> share_by_cost(12, [Cost(0, 1), Cost(0, 2)])
        (8, 4)
        >>> share_by_cost(12, [Cost(0, 1), Cost(20, 2)])
        (12, 0)
        >>> share_by_cost(12, [Cost(0, 1), Cost(0, 2)], caps=(6, 12))
        (6, 6)
    """
    if batch < 0:
        raise SharesError(f"a batch has zero samples or more, not {batch}")
    for cost in costs:
        if not (0 <= cost.fixed_s < math.inf and 0 < cost.per_sample_s < math.inf):
            raise SharesError(f"{cost!r}: expected seconds of zero or more, above zero a sample")
    limits = [math.inf] * len(costs) if caps is None else list(caps)
    if sum(limits) < batch:
        raise SharesError(
            f"a batch of {batch} samples for devices that can have {tuple(limits)}; "
            "give a smaller batch"
        )
    done_s = _done_s(batch, costs, limits)
    shares = []
    for cost, limit in zip(costs, limits, strict=True):
        quota = (done_s - cost.fixed_s) / cost.per_sample_s
        # Rounded down by a hair more, so that a rounding error cannot make it one too many.
        shares.append(math.floor(min(max(0.0, quota * (1 - 1e-12)), limit)))
    heap = [
        (cost.seconds(share + 1), i)
        for i, (cost, share, limit) in enumerate(zip(costs, shares, limits, strict=True))
        if share < limit
    ]
    heapq.heapify(heap)
    for _ in range(batch - sum(shares)):
        _, i = heap[0]
        shares[i] += 1
        if shares[i] < limits[i]:
            heapq.heapreplace(heap, (costs[i].seconds(shares[i] + 1), i))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def enough(batch: int, caps: Sequence[float]) -> list[float]:
    """Caps that leave room for a batch: the same, or a multiple, where that is too little.

    A device that gets more than it can hold does it in several portions.

    Example:
        >>> enough(10, (2, 0, 3)), enough(5, (2, 0, 3))
        ([4, 0, 6], [2, 0, 3])
    """
    total = sum(caps)
    times = max(1, math.ceil(batch / total)) if 0 < total < math.inf else 1
    return [cap if cap == math.inf else cap * times for cap in caps]


def _done_s(batch: int, costs: Sequence[Cost], limits: Sequence[float]) -> float:
    """When the batch is done, if samples could be cut."""
    # By T a device does nothing until its fixed seconds are over, then a constant number of
    # samples a second until its limit: what all do together is a chain of straight lines.
    turns = []
    for cost, limit in zip(costs, limits, strict=True):
        if limit > 0:
            turns.append((cost.fixed_s, 1 / cost.per_sample_s))
            turns.append((cost.fixed_s + limit * cost.per_sample_s, -1 / cost.per_sample_s))
    turns.sort()
    done, rate, now_s = 0.0, 0.0, 0.0
    for turn_s, change in turns:
        by_turn = done + rate * (turn_s - now_s) if rate > 0 else done
        if by_turn >= batch:
            return now_s + (batch - done) / rate if rate > 0 else now_s
        done, rate, now_s = by_turn, rate + change, turn_s
    return now_s


class Choice(NamedTuple):
    """The shares of a batch, and what else to do with it.

    Attributes:
        shares: one a device.
        measured: whether to observe the call even if the first device does it alone.
        left_out: devices that have been without a share for a while now, said once.
    """

    shares: tuple[int, ...]
    measured: bool = True
    left_out: tuple[int, ...] = ()


def weights_of(shares: str | Sequence[float], num_devices: int) -> tuple[float, ...] | None:
    """Read the ``shares`` argument of :func:`evener.parallelize`.

    Args:
        shares: ``"auto"``, ``"even"``, or one number a device such as ``(3, 1)``: the first
            device gets three samples for each one of the second.
        num_devices: how many devices there are.

    Returns:
        One weight a device; None for ``"auto"``, which has to find them.

    Raises:
        SharesError: if the word is unknown, the number of weights is not the number of devices,
            or the weights are negative, not finite or all zero.

    Example:
        >>> weights_of("even", 2)
        (1.0, 1.0)
        >>> weights_of((3, 1), 2)
        (3.0, 1.0)
    """
    if isinstance(shares, str):
        if shares == "auto":
            return None
        if shares == "even":
            return (1.0,) * num_devices
        raise SharesError(
            f'shares={shares!r} is not known; give "auto", "even", or one number a device such as '
            "(3, 1)"
        )
    try:
        weights = tuple(float(weight) for weight in shares)
    except (TypeError, ValueError, OverflowError) as error:
        raise SharesError(
            f'shares={shares!r}: expected "auto", "even", or one number a device such as (3, 1)'
        ) from error
    if len(weights) != num_devices:
        raise SharesError(
            f"shares={shares!r} has {len(weights)} numbers for {num_devices} devices; "
            "give one number a device (zero lets a device rest)"
        )
    _check(weights)
    return weights


class FixedShares:
    """Shares in constant proportion.

    Args:
        weights: one a device.
    """

    num_observed = 0

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = tuple(weights)
        self._caps = [math.inf] * len(weights)

    def limit(self, caps: Sequence[float]) -> None:
        """Set the most samples of each device; what is above goes to others in proportion."""
        self._caps = list(caps)

    def choose(self, batch: int) -> Choice:
        """The shares of a batch."""
        shares = share_out(batch, self._weights)
        if any(share > cap for share, cap in zip(shares, self._caps, strict=True)):
            caps = enough(batch, self._caps)
            # Who is to rest works only if there is nobody else.
            costs = [Cost(0.0, 1 / max(weight, 1e-9)) for weight in self._weights]
            shares = share_by_cost(batch, costs, caps)
        return Choice(shares, measured=False)

    def guess(self, batch: int) -> Choice:
        """The same."""
        return self.choose(batch)

    def observe(
        self,
        shares: Sequence[int],
        busy_s: Sequence[float],
        lags_s: Sequence[float],
        lasted_s: float,
    ) -> None:
        """Nothing is learned."""


def _check(speeds: Sequence[float]) -> None:
    if not speeds:
        raise SharesError("shares for no devices; give one number a device")
    for speed in speeds:
        try:
            is_finite = math.isfinite(speed)
        except OverflowError:  # an int beyond all floats
            is_finite = False
        if not is_finite or speed < 0:
            raise SharesError(f"{speed!r} in {tuple(speeds)!r}: expected numbers of zero or more")
    if max(speeds) == 0:
        raise SharesError(f"{tuple(speeds)!r}: at least one device must have a share above zero")
