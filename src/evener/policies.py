"""Policies: what decides the shares, in training and in inference.

Inference has no backward, and devices may differ more in one than in the other.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from evener.balance import Balancer
from evener.devices import Device
from evener.shares import Choice, FixedShares
from evener.timing import Timing

#: What decides the shares of one kind of calls.
Policy: TypeAlias = Balancer | FixedShares


class Policies:
    """Decides the shares of calls, and learns from them.

    Args:
        devices: the devices.
        training: decides those of calls that a backward follows.
        inference: decides those of others.
    """

    def __init__(self, devices: Sequence[Device], training: Policy, inference: Policy) -> None:
        self._devices = devices
        self._training = training
        self._inference = inference
        self._caps: list[float] | None = None

    @property
    def are_fixed(self) -> bool:
        """Whether the user has fixed the shares: then results are to be the same in each run."""
        return isinstance(self._training, FixedShares)

    def limit(self, caps: Sequence[float]) -> None:
        """Set the most samples of each device: zero for one that is not there now."""
        if list(caps) != self._caps:
            self._caps = list(caps)
            self._training.limit(caps)
            self._inference.limit(caps)

    def choose(self, batch: int, forwards: deque[Timing], *, grad: bool, level: int) -> Choice:
        """The shares of the next call.

        Args:
            batch: number of samples.
            forwards: calls that have ended without the backward that they could have had.
            grad: whether a backward may follow.
            level: how far from here the user's line is on the stack.
        """
        if not batch:
            return Choice((0,) * len(self._devices), measured=False)
        while forwards:
            # Gradients were on, and nobody asked for one: an evaluation without no_grad.
            self.learn(forwards.popleft(), grad=False)
        if grad and not self._training.num_observed:
            choice = self._inference.guess(batch)
        else:
            choice = (self._training if grad else self._inference).choose(batch)
        for device in choice.left_out:
            label, what = self._devices[device].label, "training" if grad else "inference"
            warnings.warn(
                f"{label} has no share of batches of {batch} samples in {what}: it would cost "
                "more time than it saves. It is tried again now and then; evener.report(module) "
                'shows the shares, and shares="even", or numbers such as (3, 1), fixes them',
                stacklevel=level,  # the user's line
            )
        return choice

    def learn(self, timing: Timing, *, grad: bool) -> None:
        """Learn from a call that is over.

        Args:
            timing: its times.
            grad: whether it had a backward.
        """
        policy = self._training if grad else self._inference
        policy.observe(timing.shares, timing.busy_s, timing.lags_s, timing.lasted_s)

    def learn_alone(self, shares: Sequence[int], seconds: float) -> None:
        """Learn from a forward of the first device alone."""
        rest = [0.0] * (len(self._devices) - 1)
        self._inference.observe(shares, [seconds, *rest], [0.0, *rest], seconds)
