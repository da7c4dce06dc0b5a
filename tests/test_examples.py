"""The examples run, and the ones with evener differ from the plain ones by the promised lines."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evener

EXAMPLES = Path(__file__).parents[1] / "examples"
RANDOM = EXAMPLES / "random_dataset"
needs_two_cpu_devices = pytest.mark.skipif(
    len(evener.devices("cpu")) < 2 or torch.accelerator.is_available(),  # which come first
    reason="the output is that of two CPU devices",
)


def run(folder: Path, *words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(evener.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize("name", ["train_torch.py", "train_evener.py"])
def test_fashion_mnist_runs(name: str, tmp_path: Path) -> None:
    few = (
        "import runpy, sys\n"
        "from evener.textbook import fashion_mnist\n"
        "load = fashion_mnist.load\n"
        "fashion_mnist.load = lambda source: load(source).limited(100)\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    result = run(tmp_path, "-c", few, EXAMPLES / "fashion_mnist" / name)

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("loss") == 2


def test_the_chapter_in_the_explicit_style_runs_in_its_own_order(tmp_path: Path) -> None:
    result = run(tmp_path, EXAMPLES / "gluon_resnet" / "train_gluon.py", "--limit", "100")

    assert result.returncode == 0, result.stderr
    assert "'stem.0.weight' was not initialized on cpu:2, only on cpu:0, cpu:1" in result.stdout
    *_, one, two = result.stdout.splitlines()
    for num_devices, line in ((1, one), (2, two)):
        shown = rf"{num_devices} device\(s\), epoch 1: [\d.]+ s, loss 2\.\d+, test accuracy 0\.\d+"
        assert re.fullmatch(shown, line)


def test_the_chapter_in_plain_torch_runs(tmp_path: Path) -> None:
    result = run(tmp_path, EXAMPLES / "gluon_resnet" / "train_torch.py", "--limit", "100")

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("loss 2.") == 2


@needs_two_cpu_devices
@pytest.mark.parametrize(
    ("words", "number", "err"),
    [
        ([RANDOM / "train_torch.py"], 0, ""),
        ([RANDOM / "train_evener.py"], 1, ""),
        (
            ["-m", "evener.cli", "run", "--shares", "even", RANDOM / "train_torch.py"],
            1,
            "evener: DataParallel of Model",
        ),
    ],
)
def test_random_dataset_prints_what_its_readme_says(
    words: list[Any], number: int, err: str, tmp_path: Path
) -> None:
    blocks = re.findall(r"```\n( +In Model.*?)```", (RANDOM / "README.md").read_text(), re.DOTALL)
    result = run(tmp_path, *words)

    assert result.returncode == 0, result.stderr
    assert result.stdout == blocks[number]
    assert (result.stderr.splitlines() or [""])[0] == err
    assert list(torch.load(tmp_path / "model.pt")) == ["fc.weight", "fc.bias"]


def test_the_causal_language_model_learns_the_same_with_evener(tmp_path: Path) -> None:
    results = [
        run(tmp_path, EXAMPLES / "causal_lm" / f"train_{n}.py") for n in ("torch", "evener")
    ]
    numbers = []
    for result in results:
        assert result.returncode == 0, result.stderr
        numbers.append([float(number) for number in re.findall(r"[\d.]+\d", result.stdout)])

    assert len(numbers[0]) == 9
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-3)  # printed to four places


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        (
            "causal_lm",
            [
                "+ import evener",
                "-         return losses, right / num",
                "+         return evener.Sum(losses), evener.Mean(right, num)",
                "- model = CausalLM()",
                '+ model = evener.parallelize(CausalLM(), "cpu*2", shares=(2, 1))',
            ],
        ),
        (
            "fashion_mnist",
            [
                "+ import evener",
                "- model = ResNet18(width=16)",
                "+ model = evener.parallelize(ResNet18(width=16))",
            ],
        ),
        (
            "random_dataset",
            [
                "+ import evener",
                "- net = nn.DataParallel(Model(5, 2), device_ids=[0, 1])",
                '+ net = evener.DataParallel(Model(5, 2), device_ids=[0, 1], shares="even")',
            ],
        ),
    ],
)
def test_the_difference_is_one_import_and_few_lines(folder: str, expected: list[str]) -> None:
    names = ("train_torch.py", "train_evener.py")
    plain, ours = ((EXAMPLES / folder / name).read_text() for name in names)
    lines = difflib.ndiff(plain.splitlines()[1:], ours.splitlines()[1:])

    assert [line for line in lines if line[0] in "+-" and line[2:].strip()] == expected
