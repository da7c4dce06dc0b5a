"""What is bounded in CI: all of it runs with EVENER_LONG_TESTS=1."""

from __future__ import annotations

import os

import pytest

LONG = pytest.mark.skipif(
    os.environ.get("EVENER_LONG_TESTS") != "1", reason="EVENER_LONG_TESTS=1 runs all"
)
