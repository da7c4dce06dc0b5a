from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import evener
from evener.errors import BatchError, DeviceError, ModuleError, SharesError
from evener.textbook.resnet import ResNet18

X = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
TARGET = torch.arange(9) % 5


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def cross_entropy(outputs: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, TARGET)


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x, labels=None):
        logits = self.inner(x)
        return Answer(logits, functional.cross_entropy(logits, labels)), logits.argmax(1)


def test_it_prints_what_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    found = evener.verify(mlp(), X, loss=cross_entropy, devices="cpu*2")

    assert found
    assert capsys.readouterr().out == f"{found}\n"
    assert {row.title for row in found.rows} == {
        *("output", "loss", "gradient 0.weight", "gradient 0.bias"),
        *("gradient 2.weight", "gradient 2.bias"),
    }


@pytest.mark.parametrize(
    ("module", "inputs", "options"),
    [
        (ResNet18(width=2, num_classes=5).eval(), (torch.randn(6, 1, 8, 8),), {}),
        (nn.LSTM(3, 4, 2), (torch.randn(4, 7, 3),), {"in_dims": 1, "out_dims": 1}),
        (
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            (torch.randn(6, 4, 8),),
            {"src_key_padding_mask": torch.zeros(6, 4, dtype=torch.bool)},
        ),
        (Classifier(), (X,), {"labels": TARGET}),
        (nn.ReLU(), (X,), {}),
        (nn.Tanh(), (X.clone().requires_grad_(),), {"shares": (3, 1)}),
        (nn.EmbeddingBag(7, 3), (torch.randint(7, (5, 4)),), {}),
    ],
)
def test_models_of_all_kinds(module: nn.Module, inputs: tuple, options: dict) -> None:
    found = evener.verify(module, *inputs, devices="cpu*2", **options)

    assert found.verdict in ("equal", "rounding")
    assert found.rows


def test_inputs_get_gradients_that_are_compared() -> None:
    found = evener.verify(mlp(), X.clone().requires_grad_(), devices="cpu*2")

    assert "gradient args[0]" in {row.title for row in found.rows}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_has_no_gradients(mode: Any) -> None:
    with mode():
        found = evener.verify(mlp(), X, devices="cpu*2")

    assert found
    assert all(row.verdict == "equal" for row in found.rows if row.kind == "gradient")


class Wild(nn.Module):
    """It changes all that it can reach, and fails if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.drop = nn.Dropout()
        self.embed = nn.Embedding(3, 5, max_norm=0.1)
        self.register_buffer("steps", torch.zeros(1))
        self.history: list[int] = []
        self.eval_me = nn.Dropout().eval()

    def forward(self, x, *, fails=False):
        self.steps += 1
        self.history.append(1)
        self.count = len(self.history)
        x.add_(random.random())  # noqa: S311
        y = self.drop(self.linear(x)) + self.embed(torch.tensor(1))
        self.train()
        if fails:
            raise ArithmeticError("as told")
        return y


def everything(module: Wild, x: Tensor) -> tuple[list[Tensor], list[Any]]:
    tensors = [*module.state_dict().values(), module.linear.weight.grad, x, torch.get_rng_state()]
    others = [
        *(
            [each.training for each in module.modules()],
            list(module.history),
            hasattr(module, "count"),
        ),
        *(random.getstate(), torch.initial_seed(), torch.get_num_threads(), type(module)),
        *(
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            [id(p) for p in module.parameters()],
        ),
    ]
    return [tensor.clone() for tensor in tensors], others


@pytest.mark.parametrize("is_parallel", [False, True])
def test_module_inputs_and_generators_stay_as_they_are(is_parallel: bool) -> None:
    module, x = Wild(), X.clone()
    if is_parallel:
        evener.parallelize(module, "cpu*2", shares="even")
    module(X.clone()).sum().backward()
    module.eval_me.eval()
    tensors, others = everything(module, x)
    found = evener.verify(module, x, devices="cpu*2")
    with pytest.raises(ArithmeticError, match="as told"):
        evener.verify(module, x, devices="cpu*2", fails=True)
    with pytest.raises(ZeroDivisionError):
        evener.verify(module, x, devices="cpu*2", loss=lambda _: 1 / 0)
    new_tensors, new_others = everything(module, x)

    assert not found  # the input is changed in place
    assert all(map(torch.equal, tensors, new_tensors))
    assert others == new_others
    if is_parallel:
        evener.release(module)


class OnTeamOnly(nn.Linear):
    """It fails where it gets a part of a batch."""

    def forward(self, x):
        if len(x) < 9:
            raise ArithmeticError("only a part")
        return super().forward(x)


def test_what_fails_on_the_team_alone_is_raised() -> None:
    module = OnTeamOnly(6, 5)
    threads = torch.get_num_threads()
    with pytest.raises(ArithmeticError, match="only a part"):
        evener.verify(module, X, devices="cpu*2")
    with pytest.raises(BatchError, match="differs among the devices"):
        evener.verify(Lengths(6, 5), X, devices="cpu*2")

    assert torch.get_num_threads() == threads


class Lengths(nn.Linear):
    def forward(self, x):
        return super().forward(x), len(x)


def test_a_parallel_module_is_verified_with_its_own_options() -> None:
    model = nn.LSTM(3, 4)
    evener.parallelize(model, "cpu*3", shares=(3, 2, 1), in_dims=1, out_dims=1)
    found = evener.verify(model, torch.randn(5, 6, 3))
    other = evener.verify(model, torch.randn(5, 6, 3), devices="cpu*2")
    evener.release(model)

    assert found
    assert found.shares == (3, 2, 1)
    assert other
    assert other.shares == (3, 3)


def test_measured_shares_are_even_here() -> None:
    model = evener.parallelize(mlp(), "cpu*2")
    found = evener.verify(model, X)
    evener.release(model)

    assert found.shares == (5, 4)


def test_the_module_inside_of_a_data_parallel() -> None:
    net = evener.DataParallel(
        mlp(), ["cpu:0", "cpu:0"][:1] if len(evener.devices("cpu")) < 2 else None
    )
    found = evener.verify(net, X, devices="cpu*2")
    evener.release(net.module)

    assert found
    assert "gradient 0.weight" in {row.title for row in found.rows}


def test_a_batch_of_one_is_shared_by_nobody() -> None:
    found = evener.verify(mlp(), X[:1], devices="cpu*2")

    assert found.shares == (1, 0)
    assert "Only one device had samples" in str(found)


def test_no_samples_and_no_batch() -> None:
    class Constant(nn.Linear):
        def forward(self):
            return self.weight * 2

    assert evener.verify(mlp(), X[:0], devices="cpu*2")
    assert evener.verify(Constant(2, 3), devices="cpu*2")


def test_a_class_of_the_users_with_a_wrong_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 8), Center(), nn.Linear(8, 5)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    found = evener.verify(Net(), X, devices="cpu*2")

    assert not found
    assert [cause.where for cause in found.causes] == [("layers.1",)]
    assert "* layers.1 (Center): the output for a sample depends" in str(found)


class Center(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_batch_norm_with_statistics_of_each_share_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    found = evener.verify(model, X, devices="cpu*2", batchnorm="local")

    assert [(cause.kind, cause.where) for cause in found.causes] == [("dependent", ("1",))]
    assert "1 (BatchNorm1d): batch norm in training" in str(found)


def test_a_module_with_a_grid_on_a_team_and_on_one_device() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    evener.parallelize(model, "cpu*2", grid=2)
    for options in ({}, {"devices": "cpu:0"}):
        found = evener.verify(model, X, **options)
        assert "in 2 cells, from" in str(found)
        assert [(cause.kind, cause.where) for cause in found.causes] == [("dependent", ("1",))]
        assert "of each cell of the grid" in str(found)
        assert "nothing was shared" not in str(found)
    assert evener.verify(model.eval(), X)
    evener.release(model)


def test_exact_batch_norm_is_equal_and_not_blamed_for_others() -> None:
    fine = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    wrong = nn.Sequential(*fine, Center())
    found = evener.verify(wrong, X, devices="cpu*2", batchnorm="exact")

    assert evener.verify(fine, X, devices="cpu*2", batchnorm="exact").verdict == "rounding"
    assert [(cause.kind, cause.where) for cause in found.causes] == [("dependent", ("3",))]


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (lambda x: x, {}, ModuleError, "expected an nn.Module, not function"),
        (nn.Linear(6, 5), {"devices": "cpu:0"}, DeviceError, "there is nothing to verify"),
        (nn.Linear(6, 5), {"devices": "gpu"}, DeviceError, "there is no device 'gpu'"),
        (nn.Linear(6, 5), {"shares": (1, 2, 3)}, SharesError, "3 numbers for 2 devices"),
        (nn.Linear(6, 5), {"batchnrm": "local"}, TypeError, "batchnrm"),
        (nn.Linear(7, 5), {}, RuntimeError, "shapes cannot be multiplied"),
        (nn.Linear(6, 5), {"loss": lambda y: y}, ValueError, "expected a tensor with one number"),
        (nn.Linear(6, 5), {"in_dims": "x"}, TypeError, "in_dims"),
    ],
)
def test_what_cannot_be_verified(module, options, error, message) -> None:
    options = {"devices": "cpu*2", **options}
    with pytest.raises(error, match=message):
        evener.verify(module, X, **options)


def test_a_compiled_module_is_verified_as_it_is_written() -> None:
    compiled = torch.compile(copy.deepcopy(mlp()), backend="eager")

    assert evener.verify(compiled, X, devices="cpu*2")
