"""Coupled calls: each phase is a meeting; see also tests/faults/test_matrix.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evener
from evener.errors import SampleTooLargeError
from evener.pickling import STATE_NAME


def test_more_samples_than_the_devices_have_memory_for_together_are_an_error() -> None:
    model = evener.parallelize(nn.BatchNorm1d(2), "cpu*2", shares="even", batchnorm="exact")
    x = torch.randn(8, 2)
    model(x)
    faults = vars(model)[STATE_NAME].way._faults
    faults.caps[:] = [3, 2]

    with pytest.raises(SampleTooLargeError, match=r'5 samples .* has 8: .*batchnorm="local"'):
        model(x)

    assert model(x[:5]).shape == (5, 2)
    evener.release(model)
