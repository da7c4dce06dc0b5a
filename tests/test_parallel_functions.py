"""data_parallel, the function: what torch's tests check on GPUs, on CPU devices."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import parallel_functions
from evener.errors import BatchError, ModuleError
from evener.parallel_functions import data_parallel

TWO = "cpu*2"


class Calls(nn.Module):
    """Calls a function of its inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def gradients(module: nn.Module, output: Tensor, *inputs: Tensor) -> list[Tensor]:
    tensors = [*module.parameters(), *inputs]
    return list(torch.autograd.grad(output.sin().sum(), tensors, retain_graph=True))


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_output_and_gradients_are_those_of_one_device(size: int) -> None:
    module = nn.Linear(10, 5)
    x = torch.randn(size, 10, requires_grad=True)
    expected = module(x)

    for devices in ("cpu*3", [0], None):
        found = data_parallel(module, x, devices)

        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(module, found, x), gradients(module, expected, x))


def test_gradients_are_summed_into_the_module() -> None:
    module = nn.Linear(3, 2)
    for _ in range(2):
        data_parallel(module, torch.ones(4, 3), TWO).sum().backward()

    assert torch.equal(module.weight.grad, torch.full((2, 3), 8.0))


@pytest.mark.parametrize("devices", [TWO, [0]])
def test_several_inputs_by_position_and_by_name(devices: Any) -> None:
    def forward(one: Tensor, two: Tensor, factor: float, three: Any = None) -> Tensor:
        return factor * (one * two + (0 if three is None else three))

    module = Calls(forward)
    one, two, three = (torch.randn(5, 5, requires_grad=True) for _ in range(3))

    found = data_parallel(module, (one, two, 2.5), devices, module_kwargs={"three": three})
    torch.testing.assert_close(found, 2.5 * (one * two + three))
    torch.testing.assert_close(
        gradients(module, found, one, two, three),
        gradients(module, forward(one, two, 2.5, three), one, two, three),
    )
    found = data_parallel(module, (one, two, 2.5), devices, 0)
    torch.testing.assert_close(found, 2.5 * one * two)


def test_inputs_by_name_only_with_empty_containers_and_none_at_all() -> None:
    module = Calls(lambda data=None: None if data is None else data["x"] * 2)
    x = torch.randn(5, 2)

    for unused in ([], {}, ()):
        given = {"data": {"x": x, "unused": unused}}
        torch.testing.assert_close(data_parallel(module, (), TWO, module_kwargs=given), x * 2)
        torch.testing.assert_close(data_parallel(module, None, TWO, module_kwargs=given), x * 2)
    assert data_parallel(module, (), TWO) is None
    assert data_parallel(module, None, TWO) is None


def test_nested_inputs_and_outputs() -> None:
    def forward(x: Tensor, nest: Any) -> Any:
        return [x, (nest[0].sin(), [nest[1]["y"] + 1]), OrderedDict(a=x, b=[x.cos()])]

    x = torch.randn(3, 2)
    nest = (x, {"y": x})

    found = data_parallel(Calls(forward), (x, nest), TWO)

    expected = forward(x, nest)
    torch.testing.assert_close(found, expected)
    assert [type(part) for part in found] == [Tensor, tuple, OrderedDict]


def test_a_0_dim_output_is_a_vector_with_an_entry_for_each_part() -> None:
    x = torch.randn(4, 3)

    with pytest.warns(UserWarning, match="will instead unsqueeze and return a vector"):
        found = data_parallel(Calls(torch.mean), x, TWO)

    torch.testing.assert_close(found, torch.stack([x[:2].mean(), x[2:].mean()]))


def test_another_dimension_holds_the_batch() -> None:
    module = nn.LSTM(3, 4)
    x = torch.randn(6, 5, 3)

    found = data_parallel(module, x, TWO, dim=1)

    torch.testing.assert_close(found, module(x))


def test_no_grad_reaches_the_threads() -> None:
    module = nn.Sequential(nn.Linear(3, 2), Calls(lambda x: (torch.is_grad_enabled(), x)))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            is_enabled, output = data_parallel(module, torch.ones(4, 3), TWO)
        assert is_enabled is enabled
        assert output.requires_grad is enabled


def test_autocast_inside_and_around() -> None:
    linear = nn.Linear(8, 8)
    inside = Calls(torch.autocast("cpu", dtype=torch.bfloat16)(linear.forward))
    x = torch.randn(8, 8)

    assert data_parallel(inside, x, TWO).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert data_parallel(linear, x, TWO).dtype is torch.bfloat16
    assert data_parallel(linear, x, TWO).dtype is torch.float32


def test_sparse_gradients_stay_sparse() -> None:
    module = nn.Embedding(10, 5, sparse=True)
    x = torch.randint(10, (7, 3))
    (expected,) = gradients(module, module(x))

    (found,) = gradients(module, data_parallel(module, x, TWO))

    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


def test_complex_parameters_and_inputs() -> None:
    module = nn.Linear(3, 2, dtype=torch.complex64)
    x = torch.randn(5, 3, dtype=torch.complex64, requires_grad=True)

    found = data_parallel(module, x, TWO)

    torch.testing.assert_close(found, module(x))
    ours, theirs = (torch.view_as_real(y).sum() for y in (found, module(x)))
    torch.testing.assert_close(
        torch.autograd.grad(ours, [x, *module.parameters()]),
        torch.autograd.grad(theirs, [x, *module.parameters()]),
    )


def test_buffers_that_require_a_gradient_get_it() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("learned", torch.randn(4, dtype=torch.double).requires_grad_())
            self.register_buffer("fixed", torch.randn(4, dtype=torch.double))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.learned + self.fixed

    module = Buffered()
    x = torch.randn(3, 4, dtype=torch.double)

    assert torch.autograd.gradcheck(lambda _: data_parallel(module, x, TWO), (module.learned,))


def test_second_derivatives_pass_through() -> None:
    module = nn.Linear(4, 1)
    x = torch.ones(2, 4, requires_grad=True)

    output = data_parallel(module, x, TWO)
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)
    gradient.mean().backward()

    assert torch.equal(module.weight.grad, torch.full((1, 4), 0.25))


def test_gradients_have_the_layout_of_their_parameters() -> None:
    module = nn.Sequential(nn.Conv2d(4, 8, 2), nn.Conv2d(8, 4, 2))
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 4, 6, 6)

    for _ in range(2):  # the first makes the gradients, the second adds to them
        data_parallel(module, x, TWO).sum().backward()

    for layer in module:
        assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_buffers_are_those_of_the_first_part_and_attributes_are_lost() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.num = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num += 1
            y: Tensor = self.norm(x)
            return y

    module, first = Counting(), nn.BatchNorm1d(2)
    x = torch.randn(6, 2) + 3

    data_parallel(module, x, TWO)
    first(x[:3])

    torch.testing.assert_close(module.norm.running_mean, first.running_mean)
    assert module.num == 0


def test_hooks_run_for_each_replica_and_those_of_parameters_once() -> None:
    module = nn.Linear(3, 2)
    sizes: list[Any] = []
    module.register_forward_hook(lambda m, args, output: sizes.append(len(output)))
    module.register_full_backward_hook(lambda m, given, gone: sizes.append(-len(gone[0])))
    module.weight.register_hook(lambda gradient: sizes.append("weight"))

    data_parallel(module, torch.ones(5, 3, requires_grad=True), TWO).sum().backward()

    assert sorted(map(str, sizes)) == ["-2", "-3", "2", "3", "weight"]


def test_an_exception_names_the_replica() -> None:
    def forward(x: Tensor) -> Tensor:
        if x[0] > 0:
            raise LookupError("mine")
        return x

    message = r"Caught LookupError in replica 1 on device cpu:1.*\nOriginal Traceback"
    with pytest.raises(LookupError, match=message):
        data_parallel(Calls(forward), torch.tensor([0, 1]), TWO)


def test_wrong_inputs_are_errors() -> None:
    with pytest.raises(ModuleError, match=r"buffers on device cpu.* found one of them on .* meta"):
        data_parallel(nn.Linear(2, 2, device="meta"), torch.ones(2, 2), TWO)
    with pytest.raises(BatchError, match="gives 2 parts"):
        data_parallel(Calls(print), (torch.ones(2), torch.ones(1)), TWO)


def test_nothing_is_left_for_the_garbage_collector() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2))
    replicas: list[weakref.ref[Any]] = []

    def first(replica: nn.Module, _args: Any, output: Any) -> Any:
        replicas.append(weakref.ref(replica))
        return output[0]

    module[2].register_forward_hook(first)
    x = torch.randn(4, 3)
    data_parallel(module, x, TWO).sum().backward()  # what is made once is made

    with without_collector():
        output = data_parallel(module, {"x": x}["x"], TWO)
        output.sum().backward()
        alive = weakref.ref(output)
        del output

        assert alive() is None
        assert len(replicas) == 4
        assert [replica() for replica in replicas] == [None] * 4

    failing = Calls(lambda x: 1 / 0)
    with without_collector():
        given = torch.ones(2)
        with suppress(ZeroDivisionError):
            data_parallel(failing, given, TWO)
        alive = weakref.ref(given)
        del given

        assert alive() is None


def test_on_accelerators_torchs_own_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_functions, "_torchs_data_parallel", lambda *given: given)
    monkeypatch.setattr(parallel_functions, "on_cpu", lambda places: False)

    found: Any = data_parallel(nn.Identity(), 1, "cpu:0", 3, 2, {"a": 1})

    assert found[1:] == (1, [torch.device("cpu:0")], 3, 2, {"a": 1})
