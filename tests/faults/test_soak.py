"""The soak, for a few seconds."""

from __future__ import annotations

import os

import pytest
import soak


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_training_that_is_disturbed_comes_to_the_same() -> None:
    seconds = float(os.environ.get("EVENER_SOAK_S", "5"))
    num_steps = 10 if seconds < 60 else 80

    tally = soak.soak(seconds, num_steps=num_steps, every_s=0.6)

    assert tally.wrong == []
    assert tally.num_lost == 0
    assert tally.rounds.keys() == {"fixed", "auto"}
