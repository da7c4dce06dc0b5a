"""The data way seen by a training loop: accumulation, clipping, hooks, randomness, threads."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import evener
from bounds import LONG
from evener.errors import BatchError, EvenerError, FaultWarning
from evener.pickling import STATE_NAME


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.fixture(scope="module")
def parallel() -> Iterator[nn.Module]:
    """A parallel module on three devices, whose helpers start once for this file."""
    model = evener.parallelize(make(), "cpu*3", shares=(3, 1, 2))
    model(batch(6)).sum().backward()
    yield model
    evener.release(model)


@pytest.fixture
def pair(parallel: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A parallel module on three devices, and the same module, plain."""
    plain = make()
    parallel.load_state_dict(plain.state_dict())
    parallel.zero_grad()
    yield parallel, plain
    for hooks in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    ):
        getattr(parallel, hooks).clear()
    parallel._is_full_backward_hook = None
    for parameter in parallel.parameters():
        parameter._backward_hooks = None
        parameter._post_accumulate_grad_hooks = None


def batch(size: int = 11) -> Tensor:
    return torch.randn(size, 4, dtype=torch.float64)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ gradients


def test_accumulation(pair: tuple[nn.Module, nn.Module]) -> None:
    for size in (5, 11, 2):
        x = batch(size)
        for module in pair:
            module(x).square().sum().backward()

        assert_same_gradients(*pair)


def test_accumulation_into_zeroed_gradients(pair: tuple[nn.Module, nn.Module]) -> None:
    for size in (5, 11, 2):
        x = batch(size)
        for module in pair:
            module.zero_grad(set_to_none=False)
            module(x).square().sum().backward()

        assert_same_gradients(*pair)


def test_old_gradients_may_be_kept(pair: tuple[nn.Module, nn.Module]) -> None:
    kept: list[list[Tensor]] = []
    expected: list[list[Tensor]] = []
    for _ in range(4):
        x = batch()
        for module, history in zip(pair, (kept, expected), strict=True):
            module.zero_grad()
            module(x).square().sum().backward()
            history.append([parameter.grad for parameter in module.parameters()])

    for one, other in zip(kept, expected, strict=True):
        for gradient, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_old_outputs_may_be_kept() -> None:
    """Large outputs lie in the arena; they are the user's as long as the user wants."""
    plain = nn.Linear(4, 9000)
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    inputs = [torch.randn(6, 4) for _ in range(4)]

    with torch.no_grad():
        kept = [model(x) for x in inputs]

        for x, output in zip(inputs, kept, strict=True):
            torch.testing.assert_close(output, plain(x))
    evener.release(model)
    torch.testing.assert_close(kept[0], plain(inputs[0]))


def test_gradients_of_inputs(pair: tuple[nn.Module, nn.Module]) -> None:
    data = batch()
    gradients = []
    for module in pair:
        x = data.clone().requires_grad_()
        module(x * 2).sum().backward()
        gradients.append(x.grad)

    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_gradient_of_a_0_dim_input_is_the_sum_over_the_devices() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x * scale

    model = evener.parallelize(Scaled(), "cpu*2", shares=(2, 1))
    x = torch.arange(6.0)
    scale = torch.tensor(3.0, requires_grad=True)

    model(x, scale).sum().backward()

    assert scale.grad is not None
    assert scale.grad.item() == 15.0
    evener.release(model)


def test_autograd_grad_leaves_grad_alone(pair: tuple[nn.Module, nn.Module]) -> None:
    x = batch()
    results = [
        torch.autograd.grad(module(x).square().sum(), list(module.parameters())) for module in pair
    ]

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for module in pair for p in module.parameters())


def test_clipping_and_a_scheduler(pair: tuple[nn.Module, nn.Module]) -> None:
    loops = []
    for module in pair:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        loops.append((module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)))
    for _ in range(5):
        x = batch()
        norms = []
        for module, optimizer, scheduler in loops:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
            optimizer.step()
            scheduler.step()

        torch.testing.assert_close(*norms, rtol=1e-12, atol=1e-12)
        assert_same_gradients(*pair)


def test_an_optimizer_may_change_between_calls(pair: tuple[nn.Module, nn.Module]) -> None:
    model, plain = pair
    x = batch()
    for module in pair:
        module(x).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()

    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (nn.Linear(4, 4) for _ in range(3))
            self.frozen.requires_grad_(requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x))

    plain = Partial().double()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = batch()
    for module in (model, plain):
        module(x).sum().backward()
    assert_same_gradients(model, plain)

    for module in (model, plain):  # thawed, and others frozen, between two calls
        module.zero_grad()
        module.frozen.requires_grad_()
        module.used.requires_grad_(requires_grad=False)
        module(x).sum().backward()

    assert_same_gradients(model, plain)
    evener.release(model)


def test_a_parameter_that_only_some_devices_use() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positive, self.negative = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.positive(x) if bool((x > 0).all()) else self.negative(x)

    x = torch.tensor([[-1.0], [-2.0], [3.0], [4.0]], dtype=torch.float64)
    plain = Branching().double()
    for devices, parts in (("cpu*2", (x[:2], x[2:])), ("cpu*4", (x[:1], x[1:2], x[2:3], x[3:]))):
        model = evener.parallelize(copy.deepcopy(plain), devices, shares="even")
        model(x).sum().backward()
        plain.zero_grad()
        sum(plain(part).sum() for part in parts).backward()

        assert_same_gradients(model, plain)
        evener.release(model)


def test_a_module_without_any_gradient() -> None:
    model = evener.parallelize(make().requires_grad_(requires_grad=False), "cpu*2", shares="even")

    assert not model(batch()).requires_grad
    evener.release(model)


def test_several_forwards_before_their_backwards(pair: tuple[nn.Module, nn.Module]) -> None:
    inputs = [batch(size) for size in (3, 8, 5)]
    for module in pair:
        outputs = [module(x) for x in inputs]
        for output in reversed(outputs):
            output.square().sum().backward()

    assert_same_gradients(*pair)


def test_no_grad_forward_between_forward_and_backward(pair: tuple[nn.Module, nn.Module]) -> None:
    x = batch()
    for module in pair:
        output = module(x)
        with torch.no_grad():
            module(x * 3)
        output.sum().backward()

    assert_same_gradients(*pair)


def test_a_retained_graph_can_be_used_twice(pair: tuple[nn.Module, nn.Module]) -> None:
    x = batch()
    for module in pair:
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same_gradients(*pair)


def test_a_freed_graph_is_an_error_like_torchs(pair: tuple[nn.Module, nn.Module]) -> None:
    x = batch()
    for module in pair:
        output = module(x)
        (output * 2).sum().backward()

        with pytest.raises(RuntimeError, match="second time"):
            output.sum().backward()


def test_create_graph_is_refused(pair: tuple[nn.Module, nn.Module]) -> None:
    loss = pair[0](batch()).square().sum()

    with pytest.raises(EvenerError, match="create_graph=True"):
        torch.autograd.grad(loss, list(pair[0].parameters()), create_graph=True)


def test_sparse_gradients_are_summed() -> None:
    plain = nn.Embedding(7, 3, sparse=True).double()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*3", shares="even")
    words = torch.tensor([1, 4, 1, 6, 0, 1])
    for module in (model, plain):
        module(words).square().sum().backward()

    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    torch.testing.assert_close(model.weight.grad.to_dense(), plain.weight.grad.to_dense())
    evener.release(model)


def test_checkpointed_layers() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layers, x, use_reentrant=False)

    plain = Checkpointed()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = batch()
    for module in (model, plain):
        module(x).square().sum().backward()

    assert_same_gradients(model, plain)
    evener.release(model)


# ------------------------------------------------------------------ hooks


def test_hooks_on_parameters_run_once_with_the_full_gradient(
    pair: tuple[nn.Module, nn.Module],
) -> None:
    x = batch()
    seen: list[list[Tensor]] = [[], []]
    for module, log in zip(pair, seen, strict=True):
        weight = module[0].weight
        weight.register_hook(lambda gradient, log=log: log.append(gradient.clone()))
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
        module(x).square().sum().backward()

    assert [len(log) for log in seen] == [2, 2]
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert_same_gradients(*pair)


def test_hooks_on_the_module_see_the_whole_batch(pair: tuple[nn.Module, nn.Module]) -> None:
    model, _ = pair
    shapes = []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    model.register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape)))
    model.register_full_backward_hook(lambda _, gi, go: shapes.append(tuple(go[0].shape)))

    model(batch().requires_grad_()).sum().backward()

    assert shapes == [(11, 4), (11, 3), (11, 3)]


def test_hooks_on_a_submodule_run_on_every_device() -> None:
    plain = make()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = batch()
    model(x)
    for module in (model, plain):
        module[0].register_forward_hook(lambda _, args, output: output * 3)

    torch.testing.assert_close(model(x), plain(x))
    evener.release(model)


# ------------------------------------------------------------------ what changes between calls


def test_modes_attributes_and_layers_follow() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.temperature = 1.0
            self.config = {"bias": 0.0}

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)) / self.temperature + self.config["bias"]

    plain = Changing().double().eval()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = batch()

    def both(change: Any) -> None:
        for module in (model, plain):
            change(module)
        torch.testing.assert_close(model(x), plain(x))

    both(lambda m: None)
    both(lambda m: setattr(m, "temperature", 0.5))
    both(lambda m: m.config.update(bias=2.0))
    both(lambda m: m.norm.running_mean.fill_(3.0))
    both(lambda m: setattr(m.norm, "running_var", torch.full((4,), 2.0, dtype=torch.float64)))
    both(lambda m: m.linear.weight.data.fill_(0.25))
    both(lambda m: setattr(m, "linear", copy.deepcopy(plain.linear)))
    both(lambda m: setattr(m.linear, "bias", None))
    both(lambda m: m.float().double())
    both(lambda m: m.norm.requires_grad_(requires_grad=False))
    new = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    both(lambda m: setattr(m, "linear", copy.deepcopy(new)))
    evener.release(model)


def test_statistics_of_batch_norm_reach_evaluation_on_every_device() -> None:
    """In training a helper's own statistics are of its share; in evaluation the user's count."""
    model = evener.parallelize(nn.BatchNorm1d(4).double(), "cpu*2", shares="even")
    for _ in range(3):
        model(batch() * 5 + 1)
    model.eval()
    x = batch()

    expected = functional.batch_norm(
        x, model.running_mean, model.running_var, model.weight, model.bias
    )
    torch.testing.assert_close(model(x), expected)
    evener.release(model)


def test_buffers_change_as_on_one_device_even_where_the_first_device_rests() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("decay", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.decay = self.decay * 0.5  # a new tensor each time
            return x * self.decay

    for shares in ((1, 1), (0, 1), (1, 0)):
        model = evener.parallelize(Counter(), "cpu*2", shares=shares)
        for _ in range(3):
            output = model(torch.ones(4, 2))

        assert int(model.calls) == 3
        assert model.decay.tolist() == [0.125, 0.125]
        assert torch.equal(output, torch.full((4, 2), 0.125))
        evener.release(model)


def test_autocast_and_the_default_dtype_hold_in_the_helpers() -> None:
    plain = nn.Linear(4, 3)
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = torch.randn(6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(x), plain(x)

    assert outputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(*outputs)
    evener.release(model)


def test_a_lazy_module_is_made_by_its_first_call() -> None:
    model = evener.parallelize(nn.LazyLinear(3), "cpu*2", shares="even")
    x = torch.randn(6, 4)
    model(x)
    model(x).sum().backward()

    assert model.weight.shape == (3, 4)
    assert model.weight.grad is not None
    evener.release(model)


def test_low_precision_and_complex_parameters() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.complex64):
        plain = nn.Linear(4, 3, dtype=dtype)
        model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
        x = torch.randn(6, 4).to(dtype)
        for module in (model, plain):
            module(x).abs().sum().backward()

        torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=2e-2, atol=2e-2)
        evener.release(model)


def test_channels_last_parameters_and_inputs() -> None:
    plain = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last)
    for module in (model, plain):
        module(x).square().sum().backward()

    assert model.weight.stride() == plain.weight.stride()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
    evener.release(model)


# ------------------------------------------------------------------ randomness


def test_dropout_differs_among_devices_and_repeats_with_the_seed() -> None:
    def masks(devices: str) -> list[Tensor]:
        torch.manual_seed(5)
        model = evener.parallelize(nn.Dropout(0.5), devices, shares="even")
        outputs = [model(torch.ones(8, 64)) for _ in range(2)]
        evener.release(model)
        return outputs

    first, second = masks("cpu*2")
    again, _ = masks("cpu*2")

    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:4], first[4:])


def test_the_users_generator_is_not_advanced(pair: tuple[nn.Module, nn.Module]) -> None:
    x = batch()
    before = torch.get_rng_state()

    pair[0](x).sum().backward()
    pair[0](x[:1])

    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ inputs and outputs


def test_different_batch_sizes_are_an_error_that_names_both() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x * mask

    model = evener.parallelize(Two(), "cpu*2", shares="even")

    with pytest.raises(
        BatchError, match=r"args\[0\] has \(4, 2\) and kwargs\['mask'\] has \(3,\)"
    ):
        model(torch.ones(4, 2), mask=torch.ones(3))
    evener.release(model)


def test_outputs_without_a_batch_are_an_error_that_says_what_to_do() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()

    model = evener.parallelize(Transposed(), "cpu*2", shares="even")

    with pytest.raises(BatchError, match=r"output 0 has the shape \(4, 6\) on cpu:0.*share.*is 6"):
        model(batch(11))
    assert torch.equal(evener.release(model)(torch.ones(2, 4)), torch.ones(4, 2))


def test_values_that_differ_among_devices_are_an_error_that_shows_both() -> None:
    class Length(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x, len(x)

    model = evener.parallelize(Length(), "cpu*2", shares="even")

    assert model(batch(4))[1] == 2
    with pytest.raises(BatchError, match=r"3 on cpu:0, 2 on cpu:1"):
        model(batch(5))
    evener.release(model)


def test_a_call_without_tensors_is_the_plain_call() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, times: int) -> Tensor:
            return self.weight * times

    model = evener.parallelize(Constant(), "cpu*2", shares="even")
    model(3).sum().backward()

    assert torch.equal(model.weight.grad, torch.full((3,), 3.0))
    evener.release(model)


# ------------------------------------------------------------------ the program around


def test_a_module_may_call_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, times: int = 2) -> Tensor:
            return self.linear(x) if times == 0 else self(self.linear(x), times - 1)

    plain = Twice().double()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
    x = batch()

    torch.testing.assert_close(model(x), plain(x))
    evener.release(model)


def test_two_parallel_modules_one_inside_the_loss_of_the_other() -> None:
    torch.manual_seed(1)
    plain = [nn.Linear(4, 4).double(), nn.Linear(4, 1).double()]
    models = [
        evener.parallelize(copy.deepcopy(module), "cpu*2", shares="even") for module in plain
    ]
    x = batch()
    for generator, critic in (models, plain):
        critic(generator(x)).square().sum().backward()

    for model, module in zip(models, plain, strict=True):
        assert_same_gradients(model, module)
        evener.release(model)


def test_a_parallel_module_inside_a_parallel_module() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model = copy.deepcopy(plain)
    evener.parallelize(model[0], "cpu*2", shares="even")
    evener.parallelize(model, "cpu*2", shares="even")
    x = batch()
    for module in (model, plain):
        module(x).square().sum().backward()

    assert_same_gradients(model, plain)
    evener.release(model)
    evener.release(model[0])


def test_calls_from_several_threads(pair: tuple[nn.Module, nn.Module]) -> None:
    model, plain = pair
    inputs = [batch(size) for size in (3, 8, 5, 1, 9, 7)]
    outputs: dict[int, Tensor] = {}

    def work(i: int) -> None:
        outputs[i] = model(inputs[i])
        outputs[i].square().sum().backward()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(inputs):
        torch.testing.assert_close(outputs[i], plain(x))
        plain(x).square().sum().backward()

    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_data_loader_workers_neither_hold_nor_confuse_the_helpers() -> None:
    model = evener.parallelize(make(), "cpu*2", shares="even")
    model(batch())
    loader = DataLoader(TensorDataset(batch(12)), batch_size=4, num_workers=2)
    iterator = iter(loader)

    for (x,) in iterator:
        model(x).sum().backward()
    evener.release(model)

    del iterator
    gc.collect()


def test_a_forked_process_runs_the_plain_module() -> None:
    model = evener.parallelize(make(), "cpu*2", shares="even")
    x = batch()
    expected = model(x)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # no exception may leave this block
        same = torch.allclose(model(x), expected)
        os.write(writing, b"same" if same else b"different")
        os._exit(0)
    os.waitpid(pid, 0)

    assert os.read(reading, 100) == b"same"
    os.close(reading)
    os.close(writing)
    torch.testing.assert_close(model(x), expected)
    evener.release(model)


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What gloo opens for the first DDP of a process, it keeps."""
    with group_of_one(tmp_path_factory.mktemp("gloo")):
        DistributedDataParallel(nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()


@pytest.mark.usefixtures("gloo")
def test_distributed_data_parallel_around_it(tmp_path: Path) -> None:
    """DDP of one rank: its hooks on the parameters' accumulators see the full gradient once."""
    with group_of_one(tmp_path):
        plain = make()
        model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares="even")
        wrapped = DistributedDataParallel(model)
        x = batch()
        for _ in range(2):
            for module in (wrapped, plain):
                module.zero_grad()
                module(x).square().sum().backward()

            assert_same_gradients(model, plain)
        del wrapped
        evener.release(model)


TWO_RANKS = """
import copy, torch, evener
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
model = evener.parallelize(copy.deepcopy(plain), "cpu*2", shares=(3, 2))
wrapped = DistributedDataParallel(model)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
for _ in range(3):
    x, y = torch.randn(10, 4).double(), torch.randn(10, 3).double()  # the same on both ranks
    half = slice(5 * rank, 5 * rank + 5)
    losses = [(wrapped(x[half]) - y[half]).square().mean(), (plain(x) - y).square().mean()]
    for optimizer, loss in zip(optimizers, losses):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
for one, other in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
print(f"rank {rank} is like one device")
evener.release(model)
torch.distributed.destroy_process_group()
"""


@LONG
def test_two_ranks_of_two_devices_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, "--local-addr=127.0.0.1", "--nproc-per-node=2", script],
        env={**os.environ, "PYTHONPATH": str(Path(evener.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is like one device") == 2  # lines of two processes may mix


# ------------------------------------------------------------------ measured shares


def test_a_device_that_costs_more_than_it_saves_is_left_out_and_said_once() -> None:
    plain = make()
    model = evener.parallelize(copy.deepcopy(plain), "cpu*2")
    x = batch()

    def train() -> None:
        for _ in range(60):  # so little work that one device alone is twenty times as fast
            for module in (model, plain):
                module.zero_grad()
                module(x).square().sum().backward()
            assert_same_gradients(model, plain)

    with pytest.warns(UserWarning, match="cpu:1 has no share of batches of 11") as warned:
        train()

    assert len(warned) == 1
    assert warned[0].filename == __file__
    report = evener.report(model)
    assert report.num_calls == 60
    assert report.devices[0].num_calls == 60
    assert report.devices[1].num_calls < 30
    assert report.lasted_s > 0
    evener.release(model)


def test_gradients_that_nobody_asks_for_are_inference() -> None:
    model = evener.parallelize(make(), "cpu*2")
    policies = vars(model)[STATE_NAME].way._policies
    training, inference = policies._training, policies._inference
    for _ in range(4):  # an evaluation without no_grad
        model(batch())
    gc.collect()
    model(batch())

    assert training.num_observed == 0
    assert inference.num_observed == 4
    evener.release(model)


def test_training_and_inference_are_measured_apart() -> None:
    model = evener.parallelize(make(), "cpu*2")
    policies = vars(model)[STATE_NAME].way._policies
    training, inference = policies._training, policies._inference
    for _ in range(2):
        model(batch()).sum().backward()
    with torch.no_grad():
        model(batch())

    assert (training.num_observed, inference.num_observed) == (2, 1)
    report = evener.report(model)
    assert report.num_calls == 3
    assert sum(report.shares) == 11
    evener.release(model)


def lose_the_helper(model: nn.Module) -> None:
    vars(model)[STATE_NAME].way._run.team._seats[1].member._process.kill()


def test_a_lost_helper_is_a_fault_in_the_report() -> None:
    model = evener.parallelize(make(), "cpu*2", shares="even")
    model(batch())
    lose_the_helper(model)
    with pytest.warns(FaultWarning, match="SIGKILL") as caught:
        model(batch())
    model(batch())

    report = evener.report(model)
    assert [device.num_faults for device in report.devices] == [0, 1]
    (fault,) = report.faults
    assert (fault.device, fault.call) == (1, 2)
    assert "SIGKILL" in fault.cause
    assert [warning.filename for warning in caught] == [__file__]
    evener.release(model)


def test_calls_with_a_fault_are_not_measured() -> None:
    """They are slow, and so are the first ones of a new helper: that says nothing of speeds."""
    model = evener.parallelize(make(), "cpu*2")
    way = vars(model)[STATE_NAME].way
    for _ in range(2):
        model(batch()).sum().backward()
    assert way._policies._training.num_observed == 2
    outputs = model(batch())
    lose_the_helper(model)
    with pytest.warns(FaultWarning, match="SIGKILL"):
        outputs.sum().backward()

    assert way._policies._training.num_observed == 2
    assert evener.report(model).num_calls == 3
    evener.release(model)
