"""Replicas of a module inside one process."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener.errors import ModuleError
from evener.parallel_functions import replicas, replicate


class Net(nn.Module):
    """Parameters and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
        self.tied = self.layers[0]
        self.list = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.dict = nn.ParameterDict({"w": nn.Parameter(torch.ones(3))})
        self.register_parameter("none", None)
        self.register_buffer("learned", torch.ones(3, requires_grad=True))
        self.register_buffer("nothing", None)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for layer in self.layers:
            x = layer(x)
        return x * self.list[0] * self.dict["w"] * self.learned * len(list(self.parameters()))


def test_replicas_are_separate_modules_over_the_same_parameters() -> None:
    model = Net()

    first, second = replicate(model, "cpu*2")

    for replica in (first, second):
        assert type(replica) is Net
        assert replica is not model
        assert replica.layers[0] is not model.layers[0]
        assert replica.tied is replica.layers[0]
        assert [id(p) for p in replica.parameters()] == [id(p) for p in model.parameters()]
        assert isinstance(next(replica.parameters()), nn.Parameter)
        assert replica.list[0] is model.list[0]
        assert replica.none is None
        assert replica.nothing is None
        assert replica.learned is model.learned
        assert list(replica.state_dict()) == list(model.state_dict())
    first(torch.randn(4, 3))
    assert (first.num_calls, second.num_calls, model.num_calls) == (1, 0, 0)


def test_gradients_of_all_replicas_add_up_in_the_module() -> None:
    model = Net().eval()
    x = torch.randn(4, 3)
    model(x).sum().backward()
    expected = [p.grad for p in (*model.parameters(), model.learned)]
    model.zero_grad()
    model.learned.grad = None

    first, second = replicate(model, "cpu*2")
    (first(x[:1]).sum() + second(x[1:]).sum()).backward()

    for tensor, gradient in zip((*model.parameters(), model.learned), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_the_first_replica_has_the_modules_buffers_and_others_have_copies() -> None:
    model = nn.BatchNorm1d(3)

    first, second = replicate(model, "cpu*2")
    second(torch.randn(4, 3))
    assert int(model.num_batches_tracked) == 0
    first(torch.randn(4, 3) + 5)

    assert int(model.num_batches_tracked) == 1
    assert first.running_mean is model.running_mean
    assert (model.running_mean > 0.1).all()
    assert not torch.equal(second.running_mean, model.running_mean)


def test_detached_replicas_are_out_of_the_graph() -> None:
    model = nn.Sequential(nn.LSTM(3, 2), nn.Identity())
    model.register_buffer("learned", torch.ones(3, requires_grad=True))
    x = torch.randn(4, 3)

    for replica in replicate(model, "cpu*2", detach=True):
        assert not any(p.requires_grad for p in (*replica.parameters(), replica.learned))
        assert not replica[0](x)[0].requires_grad
        torch.testing.assert_close(replica[0](x)[0], model[0](x)[0])
        assert next(replica.parameters()).data_ptr() == next(model.parameters()).data_ptr()


def test_zero_grad_of_a_replica_warns_and_does_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()

    for replica in replicate(model, "cpu*2"):
        for part in (replica, replica[0]):
            with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) .* has no effect"):
                part.zero_grad(set_to_none=False)

    assert model[0].weight.grad is not None
    assert model[0].weight.grad.any()


def test_replicas_can_be_saved_and_loaded() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    x = torch.randn(3, 2)
    for detach in (False, True):
        file = io.BytesIO()
        torch.save(replicate(model, "cpu*2", detach), file)
        file.seek(0)
        for loaded in torch.load(file, weights_only=False):
            torch.testing.assert_close(loaded(x)[0], model(x)[0])


def test_what_computes_its_weights_works_and_keeps_its_buffers() -> None:
    model = nn.utils.spectral_norm(nn.Linear(4, 4))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    before = model.weight_u.clone()
    x = torch.randn(4, 4)

    first, second = replicate(model, "cpu*2")
    (first(x[:2]).sum() + second(x[2:]).sum()).backward()

    assert model.weight_orig.grad is not None
    assert not torch.equal(model.weight_u, before)
    for replica in replicate(parametrized, "cpu*2"):
        torch.testing.assert_close(replica(x), parametrized(x))


def test_a_parallel_module_is_replicated_as_the_plain_one() -> None:
    model = evener.parallelize(nn.Linear(2, 2), "cpu*2")
    own = evener.parallelize(Patched(), "cpu*2")

    for replica in replicate(model, "cpu*2"):
        assert type(replica) is nn.Linear
        assert vars(replica).keys() >= vars(nn.Linear(2, 2)).keys()
        assert replica(torch.ones(3, 2)).shape == (3, 2)
    assert replicate(own, "cpu*2")[1](1) == "own 1"
    assert evener.release(model) is model
    evener.release(own)


def test_a_module_that_is_compiled_in_place_is_replicated_uncompiled() -> None:
    model = nn.BatchNorm1d(2)
    model.compile(backend="eager")

    for replica in replicate(model, "cpu*2"):
        replica.eval()
        replica(torch.ones(3, 2))  # compiled, it would be the module itself, which trains

    assert int(model.num_batches_tracked) == 0


class Patched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: f"own {x}"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), "not initialised yet; call it once"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), "0 is a TorchScript module"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_cannot_be_replicated_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ModuleError, match=message):
        replicate(make(), "cpu*2")


def test_on_accelerators_torchs_own_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(replicas, "_torchs_replicate", lambda *given: given)
    monkeypatch.setattr(replicas, "on_cpu", lambda places: False)

    assert replicate(model, "cpu:0", detach=True) == (model, [torch.device("cpu:0")], True)  # type: ignore[comparison-overlap]
