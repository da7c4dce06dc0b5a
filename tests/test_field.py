"""What breaks with other ways of training on several devices, and not here.

The numbers are those of a survey of what users of nn.DataParallel, DistributedDataParallel and the
libraries built on them ask for help with, most often first. What concerns several machines or
accelerators only is left out, and so is 8, means over tokens, which a later version brings.
Where another file has the test already, the table names it.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import evener

ELSEWHERE = {
    "1: a weak device drags the run": ("unequal", "the_shares_follow_a_neighbour"),
    "2: another batch for each device": ("data_parallel", "training_and_inference_are_measured"),
    "9: another result than on one device": ("transparency", "training_is_that_of_one_device"),
    "13: lost statistics": ("data_parallel", "statistics_of_batch_norm_reach_evaluation"),
    "14: kinds of outputs": ("any_module", "outputs_come_as_they_are"),
    "18: parameters that are not used": ("data_parallel", "frozen_and_unused_parameters"),
    "20: a device dies, and all wait": ("team", "a_death_is_survived_and_told"),
    "21: processes that stay": ("parallelize", "helpers_end_with_the_process_however_it_ends"),
    "23: notebooks, fork, pickle": ("parallelize", "a_notebook_cell_or_a_piped_program"),
}


@pytest.mark.parametrize("pain", ELSEWHERE)
def test_what_another_file_tests_is_there(pain: str) -> None:
    file, name = ELSEWHERE[pain]

    assert f"\ndef test_{name}" in (Path(__file__).parent / f"test_{file}.py").read_text()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.heads = nn.ParameterList([nn.Parameter(torch.randn(6, 3)) for _ in range(2)])
        self.rate = 1.0

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        assert len(list(self.parameters())) == 6
        assert len(self.heads) == 2
        scores = sum(self.features(x) @ head for head in self.heads) * self.rate
        assert isinstance(scores, Tensor)
        return scores if target is None else functional.cross_entropy(scores, target)

    def features(self, x: Tensor) -> Tensor:
        """A method that a user calls beside the forward."""
        hidden: Tensor = self.lstm(x)[0]
        return hidden[:, -1]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Classifier, Classifier]]:
    """A plain and a parallel model."""
    torch.manual_seed(0)
    plain = Classifier().double()
    parallel = evener.parallelize(copy.deepcopy(plain), "cpu*3", shares=(2, 1, 1))
    parallel(torch.randn(4, 2, 4, dtype=torch.float64))
    yield plain, parallel
    evener.release(parallel)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    return torch.randn(103, 5, 4, dtype=torch.float64), torch.randint(0, 3, (103,))


def train(
    model: Classifier, data: tuple[Tensor, Tensor], *, inside: bool, sums: bool = False
) -> dict[str, Tensor]:
    """An epoch of batches of 10, the last of 3; the state is put back afterwards."""
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    for x, y in zip(*(part.split(10) for part in data), strict=True):
        optimizer.zero_grad()
        if sums:
            loss = functional.cross_entropy(model(x), y, reduction="sum") / len(x)
        else:
            loss = model(x, y) if inside else functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 11  # 12: one step is one step, however many devices
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(before)
    return after


@pytest.mark.parametrize("kind", ["mean outside", "mean inside", "sum outside"])
def test_5_7_10_11_an_epoch_with_an_uneven_last_batch_is_that_of_one_device(
    pair: tuple[Classifier, Classifier], data: tuple[Tensor, Tensor], kind: str
) -> None:
    """The batch and the learning rate are those of the script; 3: only a loss need travel."""
    one, other = (
        train(model, data, inside=kind == "mean inside", sums=kind == "sum outside")
        for model in pair
    )
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [0, 1, 2, 4, 7])
def test_6_a_batch_smaller_than_the_devices_or_that_does_not_divide(
    pair: tuple[Classifier, Classifier], batch: int
) -> None:
    x = torch.randn(batch, 5, 4, dtype=torch.float64)

    torch.testing.assert_close(pair[1](x), pair[0](x), rtol=1e-12, atol=1e-14)


def test_15_16_names_and_parameters_are_those_of_the_model(
    pair: tuple[Classifier, Classifier], tmp_path: Path
) -> None:
    plain, parallel = pair

    assert list(parallel.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in parallel.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    torch.save(parallel.state_dict(), tmp_path / "a.pt")
    Classifier().double().load_state_dict(torch.load(tmp_path / "a.pt"))


def test_17_attributes_and_methods_are_the_models_own(
    pair: tuple[Classifier, Classifier],
) -> None:
    plain, parallel = pair
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    assert isinstance(parallel, Classifier)
    parallel.rate = plain.rate = 0.5
    torch.testing.assert_close(parallel(x), plain(x), rtol=1e-12, atol=1e-14)
    parallel.rate = plain.rate = 1.0

    for model in pair:  # a method beside the forward has gradients too, on the first device
        model.zero_grad()
        model.features(x).sum().backward()
    torch.testing.assert_close(
        parallel.lstm.weight_hh_l0.grad, plain.lstm.weight_hh_l0.grad, rtol=1e-12, atol=1e-14
    )


def test_19_recurrent_weights_are_one_chunk_and_nothing_warns(
    pair: tuple[Classifier, Classifier], capfd: pytest.CaptureFixture[str]
) -> None:
    pair[1](torch.randn(6, 3, 4, dtype=torch.float64))

    assert "contiguous chunk of memory" not in capfd.readouterr().err


def test_22_no_port_and_no_named_file(pair: tuple[Classifier, Classifier]) -> None:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    helpers = [process for process in processes if "evener.process" in " ".join(process.cmdline())]

    assert len(helpers) == 2
    for process in helpers:
        assert process.net_connections(kind="inet") == []
        opened = [Path(file.path).parts[:3] for file in process.open_files()]
        assert ("/", "dev", "shm") not in opened


def test_24_evaluation_counts_each_sample_once_in_its_order(
    pair: tuple[Classifier, Classifier], data: tuple[Tensor, Tensor]
) -> None:
    plain, parallel = pair
    x, y = data
    with torch.no_grad():
        outputs = torch.cat([parallel(part) for part in x.split(10)])
        expected = plain(x)

    assert len(outputs) == len(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-14)
    assert (outputs.argmax(1) == y).sum() == (expected.argmax(1) == y).sum()


def test_26_helpers_and_replicas_stay_from_call_to_call(
    pair: tuple[Classifier, Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are not copied to the devices at each step: one memory holds them."""
    from evener import team  # noqa: PLC0415

    x = torch.randn(8, 3, 4, dtype=torch.float64)
    pair[1](x)
    sent: list[str] = []
    post = team.Team.post
    monkeypatch.setattr(
        team.Team,
        "post",
        lambda self, device, message, work=None: (
            sent.append(type(message).__name__),
            post(self, device, message, work),
        ),
    )
    optimizer = torch.optim.SGD(pair[1].parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        pair[1](x).sum().backward()
        optimizer.step()

    assert sent == ["Forward", "Forward", "Backward", "Backward"] * 3


def test_27_one_process_to_manage_and_one_copy_of_what_it_prints(tmp_path: Path) -> None:
    """The script runs once, whatever it prints and writes at its top level."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, evener\n"
        "print('started')\n"
        "open('log.txt', 'a').write('once\\n')\n"
        "model = evener.parallelize(torch.nn.Linear(2, 1), 'cpu*3', shares='even')\n"
        "model(torch.ones(6, 2)).sum().backward()\n"
        "print('done')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(evener.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (result.stdout, result.stderr) == ("started\ndone\n", "")
    assert (tmp_path / "log.txt").read_text() == "once\n"
