"""Shares: how many samples of a batch each device gets.

Pure arithmetic on numbers; no torch. A share is a whole number of samples, and zero is legal: a
device then rests for that call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def weights_of(shares: str | Sequence[float], num_devices: int) -> tuple[float, ...]:
    """Read the ``shares`` argument of :func:`evener.parallelize`.

    Args:
        shares: ``"even"``, or one number a device such as ``(3, 1)``: the first device gets three
            samples for each one of the second.
        num_devices: how many devices there are.

    Returns:
        One weight a device.

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
        if shares == "even":
            return (1.0,) * num_devices
        raise SharesError(
            f'shares={shares!r} is not known; give "even", or one number a device such as (3, 1)'
        )
    try:
        weights = tuple(float(weight) for weight in shares)
    except (TypeError, ValueError, OverflowError) as error:
        raise SharesError(
            f'shares={shares!r}: expected "even", or one number a device such as (3, 1)'
        ) from error
    if len(weights) != num_devices:
        raise SharesError(
            f"shares={shares!r} has {len(weights)} numbers for {num_devices} devices; "
            "give one number a device (zero lets a device rest)"
        )
    _check(weights)
    return weights


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
