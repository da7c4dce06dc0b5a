"""What stands in torch's place during evener run; how programs end is in test_program."""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import evener
from evener import parallel_functions
from evener.devices import devices
from evener.errors import DeviceError
from evener.standin import StandIn

PLACES = (
    ("torch.nn", "DataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("torch.nn.parallel", "data_parallel"),
    ("torch.nn.parallel", "scatter"),
    ("torch.nn.parallel.scatter_gather", "scatter"),
    ("torch.nn.parallel.scatter_gather", "scatter_kwargs"),
    ("torch.nn.parallel", "gather"),
    ("torch.nn.parallel", "replicate"),
    ("torch.nn.parallel.replicate", "replicate"),
    ("torch.nn.parallel", "parallel_apply"),
)


def names() -> dict[tuple[str, str], Any]:
    return {(where, name): getattr(sys.modules[where], name) for where, name in PLACES}


def told(stand_in: StandIn, main: Any, capsys: pytest.CaptureFixture[str]) -> str:
    stand_in.tell(main)
    return capsys.readouterr().err


def program(path: Any = None) -> ModuleType:
    main = ModuleType("__main__")
    main.__file__ = str(path)
    return main


def test_torchs_names_mean_ours_for_the_block_and_no_longer() -> None:
    before = names()
    real = nn.DataParallel

    with suppress(KeyboardInterrupt), StandIn(devices("cpu*2")).in_torchs_place():
        during = names()
        assert issubclass(nn.DataParallel, evener.DataParallel)
        assert issubclass(nn.DataParallel, real)
        assert isinstance(nn.DataParallel(nn.Identity()), nn.DataParallel)
        assert nn.DataParallel is nn.parallel.DataParallel
        raise KeyboardInterrupt

    assert names() == before
    for place, value in before.items():
        assert during[place] is not value
        assert (
            during[place].__doc__
            == getattr(
                evener if place[1] == "DataParallel" else parallel_functions, place[1]
            ).__doc__
        )


def test_numbers_are_those_of_the_devices_of_this_run() -> None:
    with StandIn(devices("cpu*3")).in_torchs_place():
        assert nn.DataParallel(nn.Identity()).device_ids == [0, 1, 2]
        assert nn.DataParallel(nn.Identity(), [0, 2], 2).device_ids == [0, 2]
        assert nn.DataParallel(nn.Identity(), device_ids=range(2)).device_ids == [0, 1]
        assert nn.DataParallel(nn.Identity(), [torch.device("cpu:0")]).device_ids == [0]
        x = torch.ones(3, 2)
        assert len(nn.parallel.scatter(x, [0, 1, 2])) == 3
        assert len(nn.parallel.scatter(x, target_gpus=2)) == 1
        replicas = nn.parallel.replicate(nn.Identity(), [0, 2])
        assert len(nn.parallel.parallel_apply(replicas, [x, x], None, [0, 2])) == 2
        assert len(nn.parallel.parallel_apply(replicas, [x, x])) == 2
        assert nn.parallel.data_parallel(nn.Identity(), x, [2, 1]).shape == (3, 2)
        message = r'device_ids=\[0, 3\].* cpu:0, cpu:1, cpu:2; .*evener run --devices "cpu\*4"'
        with pytest.raises(DeviceError, match=message):
            nn.DataParallel(nn.Identity(), [0, 3])


def test_what_a_program_saves_is_torchs_class() -> None:
    real = nn.DataParallel
    with StandIn(devices("cpu*2")).in_torchs_place():
        net = nn.DataParallel(nn.Linear(3, 2))
        data = pickle.dumps(net)
        again = pickle.loads(data)
        assert type(again) is nn.DataParallel
        assert again(torch.ones(0, 3)).shape == (0, 2)
        theirs = pickle.loads(pickle.dumps(net.module))
        assert type(theirs) is nn.Linear

    assert b"evener" not in data
    loaded = pickle.loads(data)
    assert type(loaded) is real
    assert loaded.device_ids == [0, 1]
    assert torch.equal(loaded.module.weight, net.module.weight)


def test_it_tells_what_each_device_did_also_of_modules_that_are_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in = StandIn(devices("cpu*2"))
    with stand_in.in_torchs_place():

        class Own(nn.DataParallel[nn.Module]):
            def gather(self, outputs: Any, output_device: Any) -> Any:
                return outputs

        net = nn.DataParallel(nn.Linear(3, 2))
        for _ in range(3):
            net(torch.ones(4, 3)).sum().backward()
        evener.release(net.module)
        del net
        nn.DataParallel(nn.Identity())
        assert len(Own(nn.Flatten())(torch.ones(4, 3))) == 2
        nn.parallel.data_parallel(nn.Identity(), torch.ones(4, 3))

    lines = told(stand_in, None, capsys).splitlines()

    assert lines[0] == "evener: DataParallel of Linear"
    assert any(line.startswith("cpu:1 ") or " cpu:1 " in line for line in lines)
    assert "evener: DataParallel of Identity: no call on its devices" in lines
    in_threads = "in threads of this process, for cpu:0, cpu:1; calls: 1"
    assert any(line.startswith(f"evener: Own of Flatten: {in_threads}") for line in lines)
    assert any(in_threads in line and "torch.nn.parallel.data_parallel" in line for line in lines)
    assert not any("used no" in line for line in lines)


def test_it_tells_that_nothing_was_used_and_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\n\n    if torch.cuda.device_count() > 1:\n")
    stand_in = StandIn(devices("cpu:0"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    lines = told(stand_in, program(script), capsys).splitlines()

    assert lines[0] == "evener: the program used no torch.nn.DataParallel"
    assert lines[1] == "evener: likely because of line 3: if torch.cuda.device_count() > 1:"
    assert "take the condition away" in lines[2]
    script.write_text("print()\n")
    assert len(told(stand_in, program(script), capsys).splitlines()) == 1
    assert len(told(stand_in, program(None), capsys).splitlines()) == 1
    assert told(stand_in, None, capsys) == ""


def test_a_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _: str) -> None:
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(sys, "stderr", Closed())

    StandIn(devices("cpu:0")).tell(program())
