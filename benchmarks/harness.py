"""How the benchmarks measure: contenders in processes of their own, taking turns.

A shared machine drifts by more than the differences that are measured. So nothing is measured
alone and compared later: every contender is started once, warmed up, and then all of them take
short turns, round after round. A figure is a ratio within one round; the result is the median
over the rounds, with the lowest and the highest beside it. A contender that waits for its turn
is blocked on its standard input and must not use the processor; the harness watches that.

    main.py ──{"do": "run", "num_steps": 40}──► stdin   worker.py, one or more processes
            ◄──{"seconds": 1.52, ...}────────── stdout  (blocked between turns)

This file does not import torch, nor must any program that starts workers: shared pages would
make a worker's memory look smaller than it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil
from typing_extensions import Self

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent

# Settings of the caller's shell that would decide in the place of a contender.
FOREIGN_SETTINGS = ("OMP_", "KMP_", "GOMP_", "MKL_", "ACCELERATE_", "LT_", "TORCH_", "PL_")


class ContenderError(RuntimeError):
    """A contender failed, did not answer in time, or left something behind."""


@dataclass(frozen=True)
class Spread:
    """What several measurements of one thing say: the middle one and the two ends."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Worker:
    """One process of a contender."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def last_words(self, num_chars: int = 3000) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-num_chars:].strip()

    def family(self) -> list[psutil.Process]:
        """The process and all that it started, whether child or only of its session."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            found = {p.pid: p for p in [own, *own.children(recursive=True)]}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.process.pid:
                    found.setdefault(process.pid, process)
        return list(found.values())


class Group:
    """The processes of one contender, from the start to the last of them gone.

    Args:
        title: names the contender in errors.
        program: the script every process runs.
        tasks: for each process what it is told as its argument; the rank is its position.
        cores: for each process the cores it may use.
    """

    def __init__(
        self,
        title: str,
        program: Path,
        tasks: Sequence[dict[str, Any]],
        cores: Sequence[Sequence[int]],
    ) -> None:
        self.title = title
        self.workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        port = free_port()
        try:
            for rank, (task, allowed) in enumerate(zip(tasks, cores, strict=True)):
                environment = worker_environment(rank, len(tasks), port)
                self._start(program, task | {"cores": list(allowed)}, environment)
        except BaseException:
            self._kill()
            raise

    def _start(self, program: Path, task: dict[str, Any], environment: dict[str, str]) -> None:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the worker)
        # A session of its own, so that Ctrl-C reaches the main program only, which then ends
        # the workers in order.
        process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        self.workers.append(Worker(process, errors))
        self._selector.register(_pipe(process.stdout), selectors.EVENT_READ, len(self.workers) - 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = self._end() if kind is None else self._kill()
        if left and kind is None:
            raise ContenderError(f"{self.title} left {len(left)} processes behind: {left}")

    def ask(
        self,
        request: dict[str, Any],
        limit_s: float,
        meanwhile: Callable[[], None] | None = None,
        every_s: float = 0.05,
    ) -> list[dict[str, Any]]:
        """Tells every process the same and returns their answers, by rank.

        Args:
            request: what to do.
            limit_s: seconds after which a missing answer is an error.
            meanwhile: called every `every_s` seconds until all have answered.
            every_s: seconds between two calls of `meanwhile`.

        Raises:
            ContenderError: if a process fails, ends, or does not answer in time.
        """
        for worker in self.workers:
            # A worker that has ended shows when its answer is waited for, with its last words.
            with contextlib.suppress(BrokenPipeError):
                _pipe(worker.process.stdin).write(json.dumps(request).encode() + b"\n")
                _pipe(worker.process.stdin).flush()
        return self.hear(limit_s, meanwhile, every_s)

    def hear(
        self,
        limit_s: float,
        meanwhile: Callable[[], None] | None = None,
        every_s: float = 0.05,
    ) -> list[dict[str, Any]]:
        """Waits for one answer of every process; see `ask`."""
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + limit_s
        while len(answers) < len(self.workers):
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise ContenderError(f"{self.title} did not answer within {limit_s:.0f} s")
            ready = self._selector.select(min(left_s, every_s) if meanwhile else left_s)
            for key, _ in ready:
                answers[key.data] = self._answer(key.data)
            if meanwhile is not None:
                meanwhile()
        return [answers[rank] for rank in range(len(self.workers))]

    def _answer(self, rank: int) -> dict[str, Any]:
        worker = self.workers[rank]
        line = _pipe(worker.process.stdout).readline()
        if not line:
            raise ContenderError(
                f"{self.title}: process {rank} ended. Its last words:\n{worker.last_words()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(f"{self.title}: process {rank} failed: {answer['error']}")
        return answer

    def family(self) -> list[psutil.Process]:
        return [process for worker in self.workers for process in worker.family()]

    def cpu_s(self) -> float:
        """Seconds of processor time that the processes have used so far."""
        total_s = 0.0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def pss_bytes(self) -> int:
        """Memory of all processes; pages that several share are counted once."""
        total = 0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def _end(self, limit_s: float = 10.0) -> list[str]:
        """Lets the workers end by themselves; returns what had to be killed."""
        family = self.family()
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError):
                _pipe(worker.process.stdin).close()
        _, alive = psutil.wait_procs(family, timeout=limit_s)
        left = [_describe(process) for process in alive]
        self._kill(alive)
        return left

    def _kill(self, also: Sequence[psutil.Process] = ()) -> list[str]:
        for process in [*also, *self.family()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for worker in self.workers:
            worker.process.wait()
            _pipe(worker.process.stdout).close()
            with contextlib.suppress(BrokenPipeError):
                _pipe(worker.process.stdin).close()
            worker.errors.close()
        self._selector.close()
        return []


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {' '.join(process.cmdline())[:80]}"
    return str(process.pid)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def worker_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment of a process: `torchrun`'s variables where there are several of them."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_SETTINGS)}
    paths = [str(BENCHMARKS), str(REPOSITORY / "src"), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "GLOO_SOCKET_IFNAME": "lo"}
    if num_ranks > 1:
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": "1",
        }
    return environment
