"""The code that the documents show is run, each block as the script that a reader makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import evener

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

#: What a reader has around the lines of the README.
FRAME = """
import json
import torch
from torch import nn

torch.manual_seed(0)
Net = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
loader = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in (8, 8, 5)]
criterion = nn.CrossEntropyLoss()
{lines}
print(json.dumps(nn.utils.parameters_to_vector(model.parameters()).tolist()))
"""


def blocks(language: str) -> list[tuple[str, str]]:
    """The blocks of a language in the documents, each with where it stands."""
    found = []
    for path in [README, *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text() if path.exists() else ""
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 2
            found.append((f"{path.relative_to(ROOT)}:{line}", match[1]))
    return found


def run(code: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(evener.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_shows_code() -> None:
    shown = [where for where, _ in [*blocks("python"), *blocks("diff")]]

    assert any(where.startswith("README.md:") for where in shown)


def as_script(code: str, folder: Path) -> None:
    run(code, folder)


def as_change(diff: str, folder: Path) -> None:
    """The lines that are added run, and change no result."""
    lines = diff.splitlines()
    with_them = "\n".join(line[1:] for line in lines if line[:1] != "-")
    without = "\n".join(line[1:] for line in lines if line[:1] != "+")

    parameters, expected = (
        json.loads(run(FRAME.format(lines=code), folder)) for code in (with_them, without)
    )

    assert "evener" in with_them
    assert "evener" not in without
    assert parameters == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("check", "code"),
    [
        pytest.param(check, code, id=where)
        for language, check in {"python": as_script, "diff": as_change}.items()
        for where, code in blocks(language)
    ],
)
def test_a_block_does_what_it_says(
    check: Callable[[str, Path], None], code: str, tmp_path: Path
) -> None:
    check(code, tmp_path)
