"""The examples run, and the one with evener differs from the plain one by the promised lines."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.glob("*/train_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, EXAMPLES / script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("loss") == 2


def test_the_difference_is_one_import_and_one_line() -> None:
    folder = EXAMPLES / "fashion_mnist"
    plain, ours = ((folder / name).read_text() for name in ("train_torch.py", "train_evener.py"))
    lines = difflib.ndiff(plain.splitlines()[1:], ours.splitlines()[1:])
    changed = [line for line in lines if line[0] in "+-"]

    assert changed == [
        "+ import evener",
        "- model = ResNet18(width=16)",
        "+ model = evener.parallelize(ResNet18(width=16))",
    ]
