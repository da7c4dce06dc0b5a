"""DataParallel: torch's class by the name, evener's devices behind it."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import evener
from evener import dropin, parallel_functions
from evener.devices import Device, devices
from evener.errors import DeviceError, ModuleError, SharesError


class Net(nn.Module):
    """Returns what a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Any = None, mode: str = "plain") -> Any:
        if x is None:
            return "no input"
        y = self.linear(x["x"] if isinstance(x, dict) else x)
        if mode == "mean":
            return y.sin().mean()
        if mode == "raise":
            raise LookupError("mine")
        return y


class OwnGather(evener.DataParallel[nn.Module]):
    """As programs have it that compute the loss of each part."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        assert output_device == self.output_device
        return outputs


# ------------------------------------------------------------------ the names


def test_it_has_the_names_of_torchs_and_is_one() -> None:
    model = Net()
    first, second = devices("cpu*2")

    net = evener.DataParallel(model, "cpu*2")

    assert isinstance(net, nn.DataParallel)
    assert net.module is model
    assert list(net.state_dict()) == ["module.linear.weight", "module.linear.bias"]
    assert (net.device_ids, net.output_device, net.dim) == ([0, 1], 0, 0)
    assert net.src_device_obj == model.linear.weight.device
    assert repr(net).splitlines()[1] == "  (module): Net("
    assert evener.DataParallel(model, [first, second], second).output_device == 1
    assert evener.DataParallel(model).device_ids == [d.index for d in devices()]
    assert evener.DataParallel(model, [0], "cpu").output_device == -1
    assert evener.DataParallel(model, [torch.device("cpu:0")], -1, 1).dim == 1
    for name in ("__init__", "replicate", "scatter", "parallel_apply", "gather"):
        ours, theirs = (getattr(kind, name) for kind in (evener.DataParallel, nn.DataParallel))
        parameters = [name for name in inspect.signature(ours).parameters if name != "shares"]
        assert parameters == list(inspect.signature(theirs).parameters)
    for name in parallel_functions.__all__:
        theirs = getattr(nn.parallel.scatter_gather, name, None) or getattr(nn.parallel, name)
        ours = getattr(parallel_functions, name)
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Net(), [0, 99]), DeviceError, "no device number 99"),
        ((Net(), []), DeviceError, "names no device"),
        ((Net(), [0, 0]), DeviceError, "names cpu:0 twice"),
        ((Net(), [0], 99), DeviceError, "no device number 99"),
        ((Net(), "cpu*2", None, 1.5), TypeError, "float"),
        ((Net(), ["cuda:7"]), DeviceError, "cuda"),
        ((Net().forward, [0]), ModuleError, "expected an nn.Module, not method"),
        ((Net().to("meta"), "cpu*2"), ModuleError, "but found one of them on device: meta"),
    ],
)
def test_wrong_arguments_are_errors(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        evener.DataParallel(*arguments)


# ------------------------------------------------------------------ the usual way


def test_a_call_is_that_of_one_device() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    net = evener.DataParallel(model, "cpu*2")
    for size in (0, 1, 5):
        x = torch.randn(size, 4, requires_grad=True)
        for call in (
            lambda f, x: f(x),
            lambda f, x: f(x=x),
            lambda f, x: f(x={"x": x, "unused": []}),
        ):
            found, expected = call(net, x), call(plain, x)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(
                torch.autograd.grad(found.sum(), [x, *net.parameters()]),
                torch.autograd.grad(expected.sum(), [x, *plain.parameters()]),
            )
    assert len(psutil.Process().children()) == 1
    # Torch gives a vector, whose mean is this number for even parts.
    loss = net(x, mode="mean")
    assert loss.shape == ()
    torch.testing.assert_close(loss.mean(), plain(x, mode="mean"))
    loss.backward()
    assert net() == "no input"
    y = x.detach()
    torch.testing.assert_close(torch.compile(net, backend="eager")(y), plain(y))
    with torch.no_grad():
        assert not net(x).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(x).dtype is torch.bfloat16
    with pytest.raises(LookupError, match="mine"):
        net(x, mode="raise")

    report = evener.report(net)

    assert len(report.devices) == 2
    assert report.num_calls > 10
    gc.disable()
    try:
        output = net(x)
        output.sum().backward()
        alive = weakref.ref(output)
        del output
        assert alive() is None  # no cycle holds it
    finally:
        gc.enable()
    evener.release(net.module)


def test_copies_and_pickles_work_as_it_does() -> None:
    net = evener.DataParallel(Net(), "cpu*2", output_device=1)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)

    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(net), loaded):
        assert type(other) is evener.DataParallel
        assert other.module is not net.module
        assert (other.device_ids, other.output_device, other.dim) == ([0, 1], 1, 0)
        assert other(torch.ones(0, 4)).shape == (0, 3)  # which starts no helpers
        assert len(evener.report(other).devices) == 2
    x = torch.randn(3, 4)
    torch.testing.assert_close(loaded(x), loaded.module.linear(x))
    assert copy.copy(net).module is net.module
    evener.release(loaded.module)


def test_even_shares_are_how_torch_cuts_a_batch() -> None:
    net = evener.DataParallel(Net(), "cpu*2", shares="even")
    other = copy.deepcopy(net)

    for size in (5, 4, 3, 2):
        net(torch.ones(size, 4))
        assert evener.report(net).shares == ((size + 1) // 2, size // 2)
    evener.release(net.module)
    with pytest.raises(SharesError, match="3 numbers for 2 devices"):
        evener.DataParallel(Net(), "cpu*2", shares=(1, 2, 3))
    assert vars(other)["_shares"] == "even"


def test_a_pickle_of_another_machine_gets_the_devices_of_this_one() -> None:
    net = evener.DataParallel(Net(), ["cpu:0"])
    net._places = [Device("cpu", i, (4000 + i,), 1, "another") for i in range(2)]
    net.device_ids = [0, 1]

    other = pickle.loads(pickle.dumps(net))

    assert other.device_ids == [device.index for device in devices()]
    assert other.output_device == 0


def test_what_torch_itself_saved_is_completed() -> None:
    net = evener.DataParallel(Net(), ["cpu:0"])
    # On a machine without accelerators there is not much in it.
    state = nn.DataParallel(Net()).__dict__
    given = {name: value for name, value in state.items() if name.startswith("_")}

    net.__setstate__({**given, "device_ids": []})

    assert net.device_ids == ([device.index for device in devices()])
    assert (net.dim, net.output_device) == (0, 0)


def test_another_module_may_be_put_into_it_and_one_wrapped_again() -> None:
    net = evener.DataParallel(Net(), ["cpu:0"])
    x = torch.randn(3, 4)

    net.module = other = Net()

    assert torch.equal(net(x), other(x))
    assert len(evener.report(net).devices) == 1
    again = evener.DataParallel(net.module, "cpu*2")
    assert len(evener.report(net).devices) == len(evener.report(again).devices) == 2
    evener.release(other)


def test_the_batch_may_be_in_another_dimension() -> None:
    lstm = nn.LSTM(3, 4)
    plain = copy.deepcopy(lstm)
    x = torch.randn(6, 5, 3)

    net = evener.DataParallel(lstm, "cpu*2", dim=1)
    output, state = net(x)
    output.sum().backward()

    expected = plain(x)
    expected[0].sum().backward()
    torch.testing.assert_close((output, state), expected)
    for one, other in zip(lstm.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    evener.release(lstm)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("learned", torch.randn(4, dtype=torch.double).requires_grad_())
        self.embedding = nn.Embedding(5, 4, sparse=True, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embedding(x) * self.learned
        return y


def test_buffers_that_require_a_gradient_and_sparse_gradients() -> None:
    net = evener.DataParallel(Buffered(), "cpu*2")
    x = torch.tensor([0, 1, 4])

    assert torch.autograd.gradcheck(lambda _: net(x), (net.module.learned,))
    net(x).sum().backward()

    gradient = net.module.embedding.weight.grad
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[0, 1, 4]]
    evener.release(net.module)


# ------------------------------------------------------------------ in parts


def test_a_subclass_with_its_own_gather_gets_the_output_of_each_part() -> None:
    model = Net()
    net = OwnGather(model, "cpu*2", output_device=1)
    x = torch.randn(5, 4)

    losses = net(x, mode="mean")

    assert len(losses) == 2
    expected = (3 * losses[0] + 2 * losses[1]) / 5
    torch.testing.assert_close(expected, model(x, mode="mean"))
    sum(losses).backward()
    assert model.linear.weight.grad is not None
    assert net() == ["no input"]
    assert psutil.Process().children() == []
    assert torch.equal(OwnGather(model, ["cpu:0"])(x), model(x))
    assert len(copy.deepcopy(net)(x)) == 2
    with pytest.raises(ModuleError, match="not parallel"):
        evener.report(net)
    with pytest.raises(LookupError, match=r"in replica 0 on device cpu:0(.|\n)*mine"):
        net(x, mode="raise")
    model.to("meta")
    with pytest.raises(ModuleError, match="on device: meta"):
        net(x)


@pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply", "gather"])
def test_each_of_the_four_steps_may_be_replaced(name: str) -> None:
    num_calls = 0

    def own(self: Any, *args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return getattr(evener.DataParallel, name)(self, *args)

    kind = type("Own", (evener.DataParallel,), {name: own})
    net = kind(Net(), "cpu*2")
    x = torch.randn(5, 4)
    expected = net.module(x)

    torch.testing.assert_close(net(x), expected)
    assert num_calls == 1
    net = evener.DataParallel(net.module, "cpu*2")
    setattr(net, name, lambda *args: own(net, *args))
    torch.testing.assert_close(net(x), expected)
    assert num_calls == 2
    assert psutil.Process().children() == []


def test_a_subclass_may_go_the_four_steps_in_its_own_forward() -> None:
    class Own(evener.DataParallel[nn.Module]):
        def forward(self, *args: Any, **given: Any) -> Any:
            inputs, kwargs = self.scatter(args, given, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            outputs = self.parallel_apply(replicas, inputs, kwargs)
            return self.gather(outputs, self.output_device)

    net = Own(Net(), "cpu*3")  # numbers of its own devices, whatever the machine has
    x = torch.randn(5, 4)

    torch.testing.assert_close(net(x), net.module.linear(x))
    assert psutil.Process().children() == []
    with torch.no_grad():
        assert not net(x).requires_grad


def test_on_accelerators_a_call_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Device("cuda", i, (), 1, "a GPU") for i in range(2)]
    moved: list[Any] = []
    monkeypatch.setattr(dropin, "devices", lambda spec: gpus if spec == "auto" else list(spec))
    monkeypatch.setattr(Net, "to", lambda self, device: moved.append(device))

    net = evener.DataParallel(Net())

    assert net.goes_in_parts
    assert net.src_device_obj == torch.device("cuda:0")
    assert (net.device_ids, net.output_device, moved) == ([0, 1], 0, [])
    with pytest.raises(ModuleError, match="on device cuda:0"):
        net(torch.ones(2, 4))
    evener.DataParallel(Net(), gpus[1:])
    assert moved == [torch.device("cuda:1")]
