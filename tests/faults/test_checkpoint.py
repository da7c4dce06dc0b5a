"""The main process's own death: with two lines of the user's a run goes on as if it had lived."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "assumptions.md"


def program() -> str:
    """The program in the document."""
    (found,) = re.findall(r"```python\n(# train\.py\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return str(found)


def run(folder: Path, *, killed_at: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run it; perhaps it is killed in the backward of some step of its third epoch."""
    text = program()
    if killed_at is not None:
        deadly = f"""
def die(gradient, seen=[]):
    seen.append(epoch)
    if seen.count(2) == {killed_at}:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
model[0].weight.register_hook(die)
"""
        text = text.replace("for epoch in range", deadly + "for epoch in range", 1)
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_killed_run_that_is_started_again_ends_like_one_that_was_not(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    first = run(whole)
    assert first.returncode == 0, first.stderr

    assert run(broken, killed_at=3).returncode == -signal.SIGKILL
    assert torch.load(broken / "state.pt")["epoch"] == 2
    second = run(broken)
    assert second.returncode == 0, second.stderr

    one, other = (torch.load(folder / "state.pt") for folder in (whole, broken))
    assert one["epoch"] == other["epoch"] == 5
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    assert {path.name for path in broken.iterdir()} == {"state.pt", "train.py"}
