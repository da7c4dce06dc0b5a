"""The data way with a grid: the same bits for any devices, shares and faults."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from bounds import LONG
from evener.errors import (
    BatchError,
    DeviceError,
    FaultWarning,
    ModuleError,
    SharesError,
)
from evener.pickling import STATE_NAME

DEVICES = evener.devices("cpu*4")
#: (devices, shares): what must give the same bits.
WAYS: list[tuple[int, Any]] = [(1, "auto"), (2, (3, 1)), (3, (0, 1, 2))]

# ------------------------------------------------------------------ the same bits


class Convolutional(nn.Module):
    """Batch norm, dropout, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.linear = nn.Linear(6 * 25, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.frozen(self.linear(self.drop(y)))


class Attention(nn.Module):
    """A layer of a transformer with dropout, over an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0].flatten(1) * 3).long().remainder(11)
        return self.linear(self.layer(self.embedding(tokens)).mean(1))


def team_of(model: nn.Module) -> Any:
    return vars(model)[STATE_NAME].way._run.team


def parallel(
    make: Callable[[], nn.Module], num: int = 2, shares: Any = "even", **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    options = {"grid": 8} | options
    return evener.parallelize(make(), DEVICES[:num], shares=shares, **options)


def sum_of(tensors: Sequence[Tensor | None]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"" if tensor is None else tensor.detach().to_dense().numpy().tobytes())
    return found.hexdigest()


def train(
    model: nn.Module,
    batches: Sequence[int] = (16, 13, 5, 16, 1, 16),
    between: Callable[[int], None] = lambda _step: None,
) -> str:
    """Train; gives the sum of all gradients, weights and buffers.

    ``between`` is called before each forward with 2 x its number, and before each backward.
    """
    momentum = 0.0 if isinstance(model, Attention) else 0.9  # sparse gradients take none
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    seen: list[Tensor | None] = []
    for number, batch in enumerate(batches):
        x = torch.randn(batch, 3, 5, 5, generator=generator)
        optimizer.zero_grad()
        between(2 * number)
        loss = model(x).square().mean()
        between(2 * number + 1)
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
    return sum_of([*seen, *model.state_dict().values()])


def same(make: Callable[[], nn.Module], use: Callable[[nn.Module], str], **options: Any) -> str:
    """The one sum that all ways give."""
    sums = []
    for num, shares in WAYS:
        model = parallel(make, num, shares, **options)
        try:
            sums.append(use(model))
        finally:
            evener.release(model)
    assert len(set(sums)) == 1, sums
    return sums[0]


@cache
def expected(make: Callable[[], nn.Module]) -> str:
    return same(make, train)


@pytest.mark.parametrize("make", [Convolutional, Attention])
def test_training_is_the_same_for_any_devices_and_shares(make: Callable[[], nn.Module]) -> None:
    four = parallel(make, 4, "auto")
    assert train(four) == expected(make)
    evener.release(four)
    other = parallel(make, 1, "auto", grid=4)
    assert train(other) != expected(make)
    evener.release(other)


@pytest.mark.parametrize(
    ("make", "when"),
    [
        (Convolutional, 4),
        (Attention, 7),
        pytest.param(Convolutional, 7, marks=LONG),
        pytest.param(Attention, 4, marks=LONG),
    ],
)
def test_a_death_changes_no_bit(make: Callable[[], nn.Module], when: int) -> None:
    model = parallel(make, 3, (1, 1, 1))

    def kill(step: int) -> None:
        if step == when:
            os.kill(team_of(model)._seats[1].member.pid, signal.SIGKILL)

    with pytest.warns(FaultWarning, match="SIGKILL"):
        assert train(model, between=kill) == expected(make)
    evener.release(model)


def test_nor_does_the_helper_that_comes_afterwards() -> None:
    batches = (16,) * 20
    model = parallel(Convolutional, 1, "auto")
    alone = train(model, batches)
    evener.release(model)
    model = parallel(Convolutional, 2, (1, 3))

    def kill_and_wait(step: int) -> None:
        if step == 3:
            os.kill(team_of(model)._seats[1].member.pid, signal.SIGKILL)
        if step > 4 and not team_of(model).present[1]:
            time.sleep(0.5)

    with pytest.warns(FaultWarning):
        assert train(model, batches, kill_and_wait) == alone
    assert team_of(model).present[1]
    evener.release(model)


def test_inputs_that_want_a_gradient_get_the_same_bits() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor, scale: Tensor, mask: Tensor) -> dict[str, Any]:
            y = self.linear(x * scale + mask[: len(x)].sum())
            return {"y": y, "loss": y.square().mean(), "sum": y.sum(1)}

    def use(model: nn.Module) -> str:
        seen: list[Tensor | None] = []
        torch.manual_seed(3)
        for batch in (12, 7, 3):
            x = torch.randn(batch, 6, requires_grad=True)
            scale = torch.rand(6, requires_grad=True)
            out = model(x, scale, torch.ones(20, 2))
            (out["loss"] + out["y"].sigmoid().sum() + out["sum"].max()).backward()
            seen += [*out.values(), x.grad, scale.grad, *(p.grad for p in model.parameters())]
        return sum_of(seen)

    same(Scaled, use, in_dims=(0, None, None), grid=5)


def test_how_a_tensor_lies_in_memory_changes_no_bit() -> None:
    """Not that of an input with gaps, nor that of an output, from which the loss is computed."""

    def make() -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 40, 3))
        return layers.to(memory_format=torch.channels_last)

    class Reducing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 16, 3, padding=1)
            self.linear = nn.Linear(37, 33)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).mean(2) * x.sum(1).mean(1)[:, None]
            return self.linear(y).transpose(1, 2)

    def use(model: nn.Module) -> str:
        generator = torch.Generator().manual_seed(5)
        seen: list[Tensor | None] = []
        for batch in (19, 32):
            y = model(torch.randn(batch, 8, 21, 74, generator=generator)[..., ::2])
            loss = y.sum() + y.square().mean()
            loss.backward()
            seen += [loss, *(p.grad for p in model.parameters())]
        return sum_of(seen)

    same(make, use, grid=16)
    same(Reducing, use, grid=16)


def test_batch_norm_on_cells_of_one_sample_is_explained() -> None:
    model = parallel(lambda: nn.BatchNorm1d(3), 2)
    with pytest.raises(BatchError, match="a batch of 13 in 8 cells has cells of one; give grid=6"):
        model(torch.randn(13, 3))
    evener.release(model)


def test_several_calls_before_one_backward_accumulation_and_retained_graphs() -> None:
    def use(model: nn.Module) -> str:
        torch.manual_seed(3)
        first = model(torch.randn(9, 3, 5, 5))
        second = model(torch.randn(6, 3, 5, 5))
        with torch.no_grad():
            third = model(torch.randn(7, 3, 5, 5))
        loss = (first.sum() * second.square().sum()).tanh() + first.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        model(torch.randn(5, 3, 5, 5)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        model.eval()
        with torch.inference_mode():
            fourth = model(torch.randn(20, 3, 5, 5))
        return sum_of([first, second, third, fourth, *grads, *model.state_dict().values()])

    same(Convolutional, use)


def test_parameters_that_only_some_cells_use() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.ways[int(x[0, 0] * 100) % 3](x)

    def use(model: nn.Module) -> str:
        torch.manual_seed(2)
        seen: list[Tensor | None] = []
        for batch in (16, 3, 11):
            model.zero_grad()
            model(torch.rand(batch, 3)).square().sum().backward()
            seen += [p.grad for p in model.parameters()]
        assert any(grad is None for grad in seen)
        return sum_of(seen)

    same(Routed, use)


def test_large_outputs_and_a_module_that_sets_attributes() -> None:
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 9000)
            self.num_calls = 0
            self.last = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            y = self.linear(x) * self.num_calls + self.last
            self.last = x.detach().mean()
            return y

    def use(model: nn.Module) -> str:
        torch.manual_seed(2)
        seen: list[Tensor | None] = []
        for batch in (16, 24):
            y = model(torch.rand(batch, 4))
            y.square().mean().backward()
            seen += [y, *(p.grad for p in model.parameters())]
        assert model.num_calls == 2
        return sum_of([*seen, model.last])

    same(Setting, use)


def test_means_over_tokens_and_sums() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.linear(x).square()[:, 0]
            mask = x[:, 0] > 0
            return {"loss": evener.Mean((y * mask).sum(), mask.sum()), "sum": evener.Sum(y.sum())}

    def use(model: nn.Module) -> str:
        torch.manual_seed(3)
        seen: list[Tensor | None] = []
        for batch in (12, 7, 3):
            x = torch.randn(batch, 6, requires_grad=True)
            out = model(x)
            (out["loss"] + out["sum"].tanh()).backward()
            y = (x @ model.linear.weight.T + model.linear.bias).square()[:, 0]
            torch.testing.assert_close(out["loss"], y[x[:, 0] > 0].mean())
            torch.testing.assert_close(out["sum"], y.sum())
            seen += [*out.values(), x.grad, *(p.grad for p in model.parameters())]
        return sum_of(seen)

    same(Weighted, use)


def test_it_equals_the_plain_module_but_for_rounding() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model = parallel(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double())
    x = torch.randn(21, 5, dtype=torch.float64)
    for each in (plain, model):
        each(x).logsumexp(0).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)
    evener.release(model)


RESUMED = """
import hashlib, os, sys, torch
from torch import nn
import evener
num, stop = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
evener.parallelize(model, evener.devices("cpu*4")[:num], grid=8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
start = 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["epoch"]
for epoch in range(start, stop):
    torch.manual_seed(epoch)
    for _ in range(2):
        x = torch.randn(21, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": stop}
torch.save(state, "state.pt")
values = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(hashlib.sha256(values).hexdigest())
"""


def test_a_run_that_goes_on_from_a_checkpoint_on_other_devices_ends_the_same(
    tmp_path: Path,
) -> None:
    def run(folder: str, num: int, stop: int) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", RESUMED, str(num), str(stop)],
            cwd=tmp_path / folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    whole = run("whole", 1, 3)
    run("parts", 2, 1)
    assert run("parts", 1, 3) == whole


def test_the_report_shows_the_grid() -> None:
    model = parallel(lambda: nn.Linear(3, 2), 1, "auto", grid=4)
    assert "cut into 4 cells." in str(evener.report(model))
    model(torch.randn(10, 3)).sum().backward()
    report = evener.report(model)
    assert report.grid == 4
    assert "cut into 4 cells, the last one into 4 of up to 3 samples" in str(report)
    assert report.shares == (10,)
    evener.release(model)


def test_an_empty_batch_is_the_plain_call() -> None:
    model = parallel(lambda: nn.Linear(3, 2))
    assert model(torch.randn(0, 3)).shape == (0, 2)
    evener.release(model)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("grid", [0, -1, 2.0, True, "16"])
def test_a_grid_is_a_number_of_cells(grid: Any) -> None:
    with pytest.raises(ValueError, match="grid="):
        evener.parallelize(nn.Linear(2, 2), "cpu*2", grid=grid)


def test_exact_batch_norm_is_refused() -> None:
    with pytest.raises(ValueError, match='grid=4 and batchnorm="exact": with a grid'):
        evener.parallelize(nn.Linear(2, 2), "cpu*2", grid=4, batchnorm="exact")


def test_devices_with_other_numbers_of_cores_are_refused() -> None:
    core = DEVICES[0].cores
    one = DEVICES[0]
    two = evener.Device("cpu", 7, (*core, *DEVICES[1].cores), one.memory_bytes, one.name)
    if two.cores == core * 2:
        pytest.skip("one core only")
    with pytest.raises(DeviceError, match="cpu:0 has 1, cpu:7 has 2"):
        evener.parallelize(nn.Linear(2, 2), [one, two], grid=4)


class InPlace(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(3, 3)
        self.plain = torch.zeros(3)
        self.generator = torch.Generator()
        self.register_buffer("kept", torch.zeros(3))
        self.alias = self.kept

    def forward(self, x: Tensor, common: Tensor) -> Tensor:
        with torch.no_grad():
            if self.what == "plain":
                self.plain += 1
            if self.what == "alias":
                self.alias.add_(1)
            if self.what == "parameter":
                self.linear.weight.mul_(0.9)
            if self.what == "form":
                self.kept = torch.zeros(4)
            if self.what == "common":
                common.add_(1)
            if self.what == "generator":
                torch.rand(1, generator=self.generator)
            if self.what == "new":
                self.register_buffer("other", torch.zeros(1))
        return self.linear(x + common)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("plain", "changes plain in place"),
        ("alias", "changes (alias|kept) in place"),
        ("parameter", "changes linear.weight in place"),
        ("form", "buffer kept"),
        ("common", "not cut along the batch"),
        ("new", "adds or removes a buffer"),
        ("generator", "draws from generator"),
    ],
)
@pytest.mark.parametrize("shares", [(1, 0), pytest.param((0, 1), marks=LONG)])
def test_what_cells_would_see_of_each_other_is_refused(what: str, match: str, shares: Any) -> None:
    num = len(shares) if shares[1] else 1  # a helper takes its time
    model = parallel(lambda: InPlace(what), num, shares[:num], in_dims=(0, None))
    with pytest.raises((ModuleError, BatchError), match=match):
        model(torch.randn(8, 3), torch.randn(3))
    evener.release(model)


def test_compiled_modules_are_refused() -> None:
    model = parallel(lambda: nn.Linear(3, 2))
    model.compile(backend="eager")
    with pytest.raises(ModuleError, match="compile"):
        model(torch.randn(4, 3))
    evener.release(model)


def test_shards_of_the_explicit_style_are_refused() -> None:
    model = parallel(lambda: nn.Linear(3, 2))
    with pytest.raises(ModuleError, match="grid=8"):
        evener.gluon.initialize(model, devices=DEVICES[:2])
    with pytest.raises(SharesError, match="grid=8"):
        vars(model)[STATE_NAME].way.call(
            model, model.forward, (torch.ones(2, 3),), {}, shares=(1, 1)
        )
    evener.release(model)
