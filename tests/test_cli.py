import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

import evener
from evener import cli
from evener.textbook import comparison, fashion_mnist, main_job
from evener.textbook.record import Epoch, Run, Settings, Step

QUICK = ("--width", "1", "--limit", "24", "--batch-size", "12", "--epochs", "2")


@pytest.fixture(scope="module", autouse=True)
def first_optimizer_and_plot(tmp_path_factory):
    """The first ones of a process set a variable of torch, and open fonts for matplotlib."""
    torch.optim.SGD([torch.zeros(1)])
    if importlib.util.find_spec("matplotlib"):
        run = Run(tuple(evener.devices("cpu:0")))
        run.steps.append(Step(1.0, 2.5, 10, 10.0))
        run.epochs.append(Epoch(1, 1.0, 10.0, 0.5))
        comparison.plot([run], tmp_path_factory.mktemp("plot") / "loss.png")


@pytest.fixture
def call():
    return lambda *args: CliRunner().invoke(cli.app, list(args))


def one_line(result):
    """The only line of an expected error: no box, no usage, no traceback."""
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("evener: ")
    return lines[0]


# ------------------------------------------------------------------ train


def test_train_compares_and_writes(call, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "out"
    result = call("train", *QUICK, "--devices", "cpu*2", "--out", str(out), "--seed", "5")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    running = [line for line in lines if line.startswith("running on: ")]
    assert len(running) == 2
    assert re.fullmatch(r"running on: cpu:0 \(.*\)", running[0])
    assert re.fullmatch(r"running on: cpu:0 \(.*\), cpu:1 \(.*\)", running[1])
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in epochs] == ["epoch 1", "epoch 2"] * 2
    for line in epochs:
        assert re.fullmatch(r"epoch \d: \d+\.\d sec, \d+ images/sec, test acc \d\.\d\d", line)
    for word in ("devices", "epoch", "images/", "speed-", "reached", "acc", "cpu:0 +", "cpu:1"):
        assert word in result.stdout
    assert "batch norm" in result.stdout
    assert result.stderr == ""

    report = json.loads((out / "report.json").read_text())
    assert report["settings"]["seed"] == 5
    assert report["data"] == {
        "source": str(fashion_mnist.SAMPLE_FOLDER),
        "num_train": 24,
        "num_test": 24,
    }
    assert [len(run["devices"]) for run in report["runs"]] == [1, 2]
    assert [len(run["steps"]) for run in report["runs"]] == [4, 4]
    assert report["speedup"] > 0
    assert report["largest_loss_difference"] >= 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_train_without_comparison(call):
    result = call("train", *QUICK, "--devices", "cpu*2", "--no-compare")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("running on: ") == 1
    assert "same step" not in result.stdout


def test_one_device_has_nothing_to_compare_with(call):
    result = call("train", *QUICK, "--devices", "cpu:0")
    assert result.exit_code == 0, result.output
    assert "one device: there is nothing to compare it with" in result.stdout
    assert result.stdout.count("running on: ") == 1


@pytest.mark.parametrize(("is_coupled", "exit_code"), [(False, 0), (True, 1)])
def test_verify_checks_one_step(call, monkeypatch, is_coupled, exit_code):
    class Centered(torch.nn.Flatten):
        def forward(self, pictures):
            flat = super().forward(pictures)
            return flat - flat.mean(0) if is_coupled else flat

    def build(settings):
        return torch.nn.Sequential(Centered(), torch.nn.Linear(784, 10))

    monkeypatch.setattr(main_job, "build", build)
    result = call("train", *QUICK, "--devices", "cpu*2", "--verify")

    assert result.exit_code == exit_code, result.output
    assert "cpu:0 (6 samples), cpu:1 (6 samples)" in result.stdout
    assert ("0 (Centered)" in result.stdout) is is_coupled
    assert "running on" not in result.stdout


def test_verify_names_the_layers_of_the_main_job_itself(call):
    result = call("train", *QUICK, "--devices", "cpu*2", "--verify")

    assert result.exit_code in (0, 1), result.output
    assert ("batch norm in training" in result.stdout) is (result.exit_code == 1)


def test_verify_needs_a_team(call):
    assert "there is nothing to verify" in one_line(
        call("train", *QUICK, "--devices", "cpu:0", "--verify")
    )


@pytest.mark.parametrize("batch_and_lr", [("256", "0.1"), ("512", "0.2")])
def test_the_runs_of_the_tutorial_can_be_given(call, batch_and_lr):
    batch_size, lr = batch_and_lr
    options = ("--batch-size", batch_size, "--lr", lr, "--momentum", "0", "--init", "tutorial")
    result = call(
        "train", "--devices", "cpu:0", *options, "--width", "1", "--limit", "20", "--epochs", "1"
    )
    assert result.exit_code == 0, result.output
    assert f"batch {batch_size}, lr {lr}, momentum 0.0" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "gpu"), "there is no device 'gpu'"),
        (("--epochs", "0"), "epochs=0: expected 1 or more"),
        (("--epochs", "x"), "--epochs"),
        (("--lr", "nan"), "lr=nan: expected a number above 0"),
        (("--momentum", "1"), "momentum=1.0"),
        (("--init", "zeros"), "init='zeros': expected 'modern' or 'tutorial'"),
        (("--limit", "0"), "limit=0: expected at least 1 image"),
        (("--data", "/nowhere"), "apt install dataset-fashion-mnist"),
        (("--nonsense",), "--nonsense"),
        (("--verify", "--out", "."), "--verify does not train"),
        (("extra",), "extra"),
    ],
)
def test_a_bad_option_is_one_line(call, options, message):
    assert message in one_line(call("train", *options))


def test_a_truncated_file_is_one_line_that_names_it(call, tmp_path):
    for path in fashion_mnist.SAMPLE_FOLDER.glob("*.gz"):
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(content[:-100] if "t10k-l" in path.name else content)
    line = one_line(call("train", "--data", str(tmp_path)))
    assert str(tmp_path / "t10k-labels-idx1-ubyte.gz") in line


def test_out_that_cannot_be_made_is_known_before_the_training(call, tmp_path):
    (tmp_path / "file").write_text("")
    result = call("train", "--out", str(tmp_path / "file" / "out"))
    assert "cannot make" in one_line(result)
    assert result.stdout == ""


def test_out_that_cannot_be_written_is_known_before_the_training(call, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    assert "cannot write into" in one_line(call("train", "--out", str(tmp_path)))


def test_missing_matplotlib_is_known_before_the_training(call, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = call("train", "--out", str(tmp_path / "out"))
    assert "pip install 'evener[plot]'" in one_line(result)
    assert result.stdout == ""


# ------------------------------------------------------------------ run


def test_a_program_that_is_not_there_is_one_line(call):
    assert "there is no file 'nowhere.py'" in one_line(call("run", "nowhere.py", "--lr", "1"))
    assert "cpu:99" in one_line(call("run", "--devices", "cpu:99", "-m", "this"))
    assert "SCRIPT" in one_line(call("run"))


# ------------------------------------------------------------------ devices, help


def test_devices_is_a_table(call):
    result = call("devices", "cpu*2")
    assert result.exit_code == 0
    for word in ("device", "cores", "memory", "name", "cpu:0", "cpu:1", "GiB"):
        assert word in result.stdout
    assert evener.devices()[0].label in call("devices").stdout


def test_devices_that_are_not_there(call):
    assert "cpu:0" in one_line(call("devices", "cpu:99"))


def test_no_command_and_an_unknown_one(call):
    assert "Missing command" in one_line(call())
    assert "nonsense" in one_line(call("nonsense"))


def test_help_names_the_runs_of_the_tutorial(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = call("train", "--help")
    assert result.exit_code == 0
    assert "--batch-size 256 --lr 0.1" in result.stdout
    assert "--batch-size 512 --lr 0.2" in result.stdout
    for name in Settings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in result.stdout
    assert call("--help").exit_code == 0


# ------------------------------------------------------------------ as a program


def start(*args):
    source = str(Path(evener.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-m", "evener.cli", *args],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_is_one_line_and_leaves_no_helper():
    options = ("--no-compare", "--devices", "cpu*2", "--width", "1", "--limit", "24")
    with start("train", *options, "--epochs", "1000000") as program:
        for line in program.stdout:
            if line.startswith("epoch 2:"):
                break
        helpers = psutil.Process(program.pid).children(recursive=True)
        assert helpers
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the helpers, too
        _, stderr = program.communicate(timeout=60)
    assert stderr == "evener: interrupted\n"
    assert program.returncode == 130
    _, alive = psutil.wait_procs(helpers, timeout=10)
    assert alive == []


def test_a_program_in_a_pipe_prints_plain_text():
    with start("devices") as program:
        stdout, stderr = program.communicate(timeout=60)
    assert (program.returncode, stderr) == (0, "")
    assert "\x1b" not in stdout
    assert "cpu:0" in stdout or evener.devices()[0].label in stdout


def test_nothing_slow_is_imported_for_help():
    code = (
        "import sys, evener; before = set(sys.modules); import evener.cli; "
        "print(*sorted({'matplotlib', 'rich.progress', 'evener.textbook.main_job'}"
        " & (set(sys.modules) - before)))"
    )
    source = str(Path(evener.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "\n"
