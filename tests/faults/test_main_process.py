"""The main process: however it ends, nothing is left; Ctrl-C is prompt, and all works on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection

import pytest

from bounds import LONG

Start = Callable[..., subprocess.Popen[str]]
OutputOf = Callable[..., str]
LeftOf = Callable[[Collection[int]], list[int]]

#: Four helpers: one computes, one holds the interpreter's lock, one is stopped, one is idle.
#: They are as said when the program prints who they are; then it ends in some way.
BUSY = """
import ctypes, os, signal, sys, threading, time
import psutil, torch, evener
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        mood = int(x[0, 0])
        if mood == 1:
            while True:
                x @ x.T
        if mood == 2:
            ctypes.PyDLL(None).sleep(60)
        if mood == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        if mood == 4:
            time.sleep(0.01)
        if mood == 5:
            time.sleep(60)
        return self.linear(x)

model = evener.parallelize(Model(), "cpu*5", shares="even")
model(torch.zeros(5, 1)).sum().backward()
helpers = [each.pid for each in psutil.Process().children()]
moods = torch.tensor([[5.0], [1.0], [2.0], [3.0], [4.0]])
thread = threading.Thread(target=model, args=(moods,), daemon=True)
"""

IN_A_CALL = (
    BUSY
    + """
thread.start()
time.sleep(1.0)
print(*helpers, flush=True)
sys.stdin.close()
"""
)

ENDS = {
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "is told to end": "os.kill(os.getpid(), signal.SIGTERM)",
    "aborts": "os.abort()",
    "exits hard": "os._exit(3)",
    "becomes another program": "os.execv('/bin/sleep', ['sleep', '30'])",
}

LONG_ENDS = ("aborts", "exits hard", "becomes another program")


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(end, id=name, marks=LONG if name in LONG_ENDS else [])
        for name, end in ENDS.items()
    ],
)
def test_nothing_is_left_however_it_ends_in_a_call(
    start_program: Start, left_of: LeftOf, end: str
) -> None:
    main = start_program(IN_A_CALL + end)
    assert main.stdout is not None
    pids = [*map(int, main.stdout.readline().split())]

    assert len(pids) == 4
    assert left_of(pids) == []
    if "execv" in end:
        assert main.poll() is None  # it is still there
    else:
        main.wait(20)


SOFT_ENDS = {
    "ends": "pass",
    "exits": "sys.exit(3)",
    "raises": "raise ValueError('on purpose')",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)",
}
#: While a thread is in a call, or not.
FIRST_ENDS = ((True, "is interrupted"), (False, "ends"))


@pytest.mark.parametrize(
    ("busy", "name"),
    [
        pytest.param(busy, name, marks=[] if (busy, name) in FIRST_ENDS else LONG)
        for busy in (True, False)
        for name in SOFT_ENDS
    ],
)
def test_nothing_is_left_when_the_interpreter_ends(
    start_program: Start, left_of: LeftOf, name: str, *, busy: bool
) -> None:
    end = SOFT_ENDS[name]
    program = IN_A_CALL if busy else BUSY + "print(*helpers, flush=True)\n"

    main = start_program(program + end)
    assert main.stdout is not None
    pids = [*map(int, main.stdout.readline().split())]
    main.wait(20)

    assert len(pids) == 4
    assert left_of(pids) == []


def test_helpers_that_start_end_with_a_main_process_that_is_killed(
    start_program: Start, left_of: LeftOf
) -> None:
    program = BUSY.partition("model(torch.zeros")[0] + (
        """
def end():
    while len(psutil.Process().children()) < 4:
        time.sleep(0.001)
    print(*(each.pid for each in psutil.Process().children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end).start()
model(torch.zeros(5, 1))
"""
    )

    main = start_program(program)
    assert main.stdout is not None
    pids = [*map(int, main.stdout.readline().split())]
    main.wait(20)

    assert len(pids) == 4
    assert left_of(pids) == []


def test_a_module_that_was_first_called_in_a_short_thread_keeps_its_helpers(
    output_of: OutputOf,
) -> None:
    printed = output_of(
        """
import threading, psutil, torch, evener
from torch import nn
model = evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even")
x = torch.ones(4, 2)
first = threading.Thread(target=model, args=(x,))
first.start()
first.join()
before = psutil.Process().children()
model(x).sum().backward()
print(psutil.Process().children() == before)
"""
    )

    assert printed.split() == ["True"]


FORKS = """
import os, signal, sys, time
import psutil, torch, evener
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_default_dtype(torch.float64)
model = evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even")
data = TensorDataset(torch.ones(64, 2))
model(torch.ones(4, 2)).sum().backward()
helpers = [each.pid for each in psutil.Process().children()]
"""


def test_a_data_loader_beside_it_works_and_keeps_no_helper(
    start_program: Start, left_of: LeftOf
) -> None:
    program = (
        FORKS
        + """
plain = nn.Linear(2, 2)
plain.load_state_dict(model.state_dict())
batches = iter(DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"))
for _ in range(4):
    (x,) = next(batches)
    assert torch.allclose(model(x), plain(x))
workers = [each.pid for each in psutil.Process().children() if each.pid not in helpers]
assert len(workers) == 2
for each in workers:
    os.kill(each, signal.SIGSTOP)  # they hold whatever they hold
os.kill(helpers[0], signal.SIGSTOP)
print(*helpers, *workers, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )

    main = start_program(program)
    assert main.stdout is not None
    helper, *workers = map(int, main.stdout.readline().split())
    try:
        assert left_of([helper]) == []
    finally:
        for each in workers:
            os.kill(each, signal.SIGKILL)


def test_a_process_that_the_user_forked_neither_uses_nor_ends_the_helpers(
    output_of: OutputOf,
) -> None:
    printed = output_of(
        FORKS
        + """
x = torch.ones(4, 2)
expected = model(x)
for leave in (os._exit, sys.exit):
    child = os.fork()
    if not child:
        is_right = torch.allclose(model(x), expected)
        evener.release(model)
        leave(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(model(x), expected)
print([each.pid for each in psutil.Process().children()] == helpers)
"""
    )

    assert printed.split() == ["True"]


STEPS = """
import os, random, signal, sys, time
import psutil, torch, evener
from evener.exchange import host
from torch import nn

host.SCATTER_BYTES = 1 << 12  # so that helpers sum gradients
num, kills = int(sys.argv[1]), sys.argv[2] == "kills"
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
model.load_state_dict(plain.state_dict())
evener.parallelize(model, "cpu*3", shares="even", restarts=1000)
x = torch.randn(600, 64, dtype=torch.float64)
plain(x).sin().sum().backward()

def step():
    model.zero_grad()
    model(x).sin().sum().backward()

def assert_right():
    step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, plain.get_parameter(name).grad), name

signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
assert_right()
start_s = time.monotonic()
for _ in range(5):
    step()
seconds = (time.monotonic() - start_s) / 5
num_interrupted, longest_s = 0, 0.0
for i in range(num):
    if kills:  # a helper ends before the step, or somewhere in it
        children = psutil.Process().children()
        if children:
            children[i % len(children)].kill()
    after_s = 1e-5 + i / num * seconds * (20 if kills else 1.2)
    start_s = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        while time.monotonic() < start_s + after_s:
            step()
        time.sleep(1.0)  # idle
    except KeyboardInterrupt:
        num_interrupted += 1
        longest_s = max(longest_s, time.monotonic() - start_s - after_s)
    assert_right()
# One that falls into a bare except of the standard library, or into a finalizer, is lost.
assert num_interrupted >= 0.95 * num
assert len(psutil.Process().children()) <= 2
evener.release(model)
assert psutil.Process().children() == []
print("right", longest_s)
"""


@pytest.mark.parametrize(("num", "what"), [(150, "nothing"), (6, "kills")])
def test_ctrl_c_at_any_moment_of_a_step(output_of: OutputOf, num: int, what: str) -> None:
    """In its forward, output, exchange, backward; while a helper's work is done again."""
    word, longest_s = output_of(STEPS, num, what).split()

    assert word == "right"
    assert float(longest_s) < 5.0


STARTS = """
import os, signal, sys, time, warnings
import psutil, torch, evener
from torch import nn

warnings.simplefilter("ignore")
torch.set_default_dtype(torch.float64)
x = torch.randn(8, 4)
num_interrupted = 0
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
for after_s in (0.0005, 0.002, 0.005, 0.01, 0.1, 0.8):
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    evener.parallelize(model, "cpu*3", shares="even")
    start_s = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        model(x)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        num_interrupted += 1
        assert time.monotonic() < start_s + after_s + 5.0
        end_s = time.monotonic() + float(sys.argv[1])
        while children := psutil.Process().children():
            assert time.monotonic() < end_s or all(
                each.status() == psutil.STATUS_ZOMBIE for each in children)
            if time.monotonic() >= end_s:
                break
    assert num_interrupted
    if after_s > 0.5:
        assert torch.allclose(model(x), plain(x))
    evener.release(model)
print("works on")
"""


def test_ctrl_c_while_helpers_start(output_of: OutputOf, end_s: float) -> None:
    assert output_of(STARTS, end_s).split() == ["works", "on"]
