"""Reductions: means and sums over the batch, alone, taken apart, and on a team."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evener
from evener import gluon, parallel_functions
from evener.alone import settled
from evener.batches import Batch
from evener.errors import BatchError, FaultWarning
from evener.piece import Piece, run_backward
from evener.portions import Portions, Split
from evener.reductions import Derived, Mean, Means, Sum
from evener.trees import derived, flatten, summed, unflatten


def assert_close(found: Any, expected: Any) -> None:
    """Equal up to the rounding of sums in another order, which is that of the largest value."""
    largest = max(1.0, float(expected.detach().abs().max().nan_to_num()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * largest, equal_nan=True)


def total(value: float = 6.0) -> Tensor:
    return torch.tensor(value, requires_grad=True) * 1


# ------------------------------------------------------------------ as a tensor


def test_it_is_a_tensor_of_its_value_with_a_graph() -> None:
    w = torch.tensor(2.0, requires_grad=True)
    mean = Mean(w * 3, 4)

    assert isinstance(mean, Tensor)
    assert (mean.item(), f"{mean:.2f}", repr(mean.detach())) == (1.5, "1.50", "Mean(1.5000)")
    (2 * mean).backward()
    assert w.grad is not None
    assert w.grad.item() == 1.5
    assert Sum(torch.tensor([3.0, 4.0])).tolist() == [3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [3001, 3001.0, torch.tensor(3001)])
def test_its_value_is_that_of_the_division_in_torch(dtype: torch.dtype, weight: Any) -> None:
    whole = torch.tensor(1000.0, dtype=dtype)

    mean = Mean(whole, weight)

    assert mean.dtype is dtype
    assert torch.equal(settled(mean), whole / weight)
    assert Mean(torch.tensor(3), weight).dtype is torch.float32


def test_no_weight_is_not_a_number() -> None:
    assert Mean(torch.tensor(0.0), 0).isnan()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mean("text", 1), "total is a str; expected a tensor or a number"),
        (lambda: Mean(total(), None), "weight is a NoneType"),
        (lambda: Sum(torch.tensor(True)), "total is bool, which does not add up"),
        (lambda: Mean(2 * Mean(total(), 3), 3), "total is a result of 'mul'"),
        (lambda: Sum(Mean(total(), 3)), "total is a result of 'Mean'"),
    ],
)
def test_what_cannot_be_summed_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_a_mean_may_be_made_of_sums() -> None:
    mean = Mean(Sum(total()), Sum(3))

    assert (mean.total.item(), mean.weight.item()) == (6, 3)


def test_copies_and_pickles_can_still_be_joined() -> None:
    mean = Mean(torch.tensor(6.0), 4.0)
    file = io.BytesIO()
    torch.save(mean, file)
    file.seek(0)
    others = [
        copy.copy(mean),
        copy.deepcopy(mean),
        pickle.loads(pickle.dumps(mean)),
        torch.load(file, weights_only=False),
        mean.detach(),
    ]

    for other in others:
        assert type(other) is Mean
        assert summed(flatten(other)[1]) == {0, 1}
        assert other.item() == 1.5


def test_what_is_computed_from_one_is_plain_where_it_is_kept() -> None:
    double = 2 * Mean(torch.tensor(6.0), 4)

    assert type(double) is Derived
    assert type(copy.deepcopy(double)) is Tensor
    assert type(pickle.loads(pickle.dumps(double))) is Tensor


# ------------------------------------------------------------------ apart, and together


def test_it_is_taken_apart_into_rows_and_put_together_from_more() -> None:
    leaves, structure = flatten({"a": Mean(total(), 4), "b": Sum(total())})

    assert [leaf.tolist() for leaf in leaves] == [[6.0], [4], [6.0]]
    assert summed(structure) == {0, 1, 2}
    assert derived(structure) == {}
    rows = [torch.tensor([6.0, 2.0]), torch.tensor([4, 1]), torch.tensor([6.0, 1.0])]
    assert unflatten(structure, rows) == {"a": torch.tensor(1.6), "b": torch.tensor(7.0)}
    apart = unflatten(structure, [Means(each) for each in rows])
    assert [apart[key].values.tolist() for key in "ab"] == [[1.5, 2.0], [6.0, 1.0]]
    assert apart["b"].empty == 0


def in_place(mean: Tensor) -> Tensor:
    mean += 1
    return mean


def into_another(mean: Tensor) -> Tensor:
    other = torch.zeros(())
    other += mean
    return other


@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda mean: 2 * mean, "mul"),
        (lambda mean: mean.data, "data"),
        (lambda mean: torch.stack([mean, mean]).unbind()[0], "unbind"),
        (lambda mean: mean.reshape(1).max(0).values, "max"),
        (lambda mean: mean.clone().detach(), "detach"),
        (in_place, "a change in place"),
        (into_another, "add"),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_is_computed_from_it_remembers_the_operation(
    compute: Callable[[Tensor], Tensor], operation: str, mode: Any
) -> None:
    with mode():
        leaves, structure = flatten([compute(Mean(torch.tensor(6.0) * 1, 4))])

    assert derived(structure) == {0: operation}
    assert type(leaves[0]) is Tensor


def test_a_total_that_changes_afterwards_is_noticed() -> None:
    whole = torch.tensor(6.0)
    mean = Mean(whole, 4)
    whole += 1

    assert derived(flatten(mean)[1]) == {0: "a change in place"}


def test_among_inputs_it_is_its_value() -> None:
    w = torch.tensor(6.0, requires_grad=True)

    batch = Batch((torch.ones(3), Mean(w * 1, 4), [2 * Mean(w * 1, 4)]), {})

    assert [type(leaf) for leaf in batch.leaves] == [Tensor] * 3
    assert batch.cut_dims == [0, None, None]
    batch.leaves[1].backward()
    assert w.grad == 0.25


# ------------------------------------------------------------------ on a team


class Tokens(nn.Module):
    """Means over what the mask counts; ``how`` chooses what is returned."""

    def __init__(self, how: str = "all") -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.how = how

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        if self.how == "killed" and "EVENER_HELPER" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        y = self.linear(x)
        losses = (y.square().sum(1) + y[:, 0]) * mask
        mean = Mean(losses.sum(), mask.sum().long())
        others: dict[str, Callable[[], Any]] = {
            "all": lambda: {
                "mean": mean,
                "rows": y,
                "logged": [mean.detach(), Sum((y[:, 0] > 0).sum())],
                "vector": Mean((y * mask[:, None]).sum(0), float(mask.sum())),
                "learned": Mean(losses.sum(), y.square().sum()),
                "large": Sum(y.sum(0)[:, None].expand(2, 10_000) * 1.0),
            },
            "twice": lambda: 2 * mean,
            "shapes": lambda: Sum(losses),
            "plain": lambda: losses.sum() / mask.sum(),
        }
        return others.get(self.how, others["all"])()


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Nine samples of which three, the first among them, count nothing, and others up to 7."""
    x = torch.linspace(-1, 1, 27, dtype=dtype).view(9, 3).sin()
    return x, torch.tensor([0, 7, 1, 0, 2, 1, 0, 5, 3], dtype=dtype)


def tensors_of(outputs: Any) -> list[Tensor]:
    found: list[Tensor] = flatten(settled(outputs))[0]
    return found


def objective(tensors: list[Tensor]) -> Tensor:
    """Something that every output has a part in."""
    flowing = [tensor for tensor in tensors if tensor.requires_grad]
    return torch.stack([(i + 1) * each.sum() for i, each in enumerate(flowing)]).sum()


def assert_same_step(model: nn.Module, plain: nn.Module, *given: Tensor) -> None:
    found, expected = (tensors_of(each(*given)) for each in (model, plain))
    for one, other in zip(found, expected, strict=True):
        assert (type(one), one.dtype) == (Tensor, other.dtype)
        assert one.requires_grad == other.requires_grad
        assert_close(one, other)
    for each, outputs in ((model, found), (plain, expected)):
        each.zero_grad()
        objective(outputs).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad)


@pytest.fixture
def plain() -> Tokens:
    torch.manual_seed(0)
    return Tokens().double()


Parallel = Callable[..., Any]


@pytest.fixture
def parallel(plain: Tokens) -> Iterator[Parallel]:
    made: list[nn.Module] = []

    def make(shares: Any, devices: str = "cpu*3", how: str = "all") -> nn.Module:
        model = copy.deepcopy(plain)
        model.how = how
        made.append(evener.parallelize(model, devices, shares=shares))
        return model

    yield make
    for model in made:
        evener.release(model)


@pytest.mark.parametrize("shares", [(5, 1, 3), (1, 0, 20), (0, 1, 0), (1, 0, 0), "even"])
def test_on_a_team_each_is_that_of_one_device(
    plain: Tokens, parallel: Parallel, shares: Any
) -> None:
    model = parallel(shares)

    assert_same_step(model, plain, *inputs())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for one, other in zip(
                tensors_of(model(*inputs())), tensors_of(plain(*inputs())), strict=True
            ):
                assert_close(one, other)


def test_where_nothing_counts_it_is_not_a_number(plain: Tokens, parallel: Parallel) -> None:
    x, mask = inputs()

    assert parallel("even")(x, mask * 0)["mean"].isnan()


def test_what_is_computed_from_a_mean_cannot_be_joined(parallel: Parallel) -> None:
    model = parallel("even", how="twice")

    with pytest.raises(BatchError, match=r"output 0 was made by mul .*Mean\(2 \* total"):
        model(*inputs())
    model.how = "all"
    assert model(*inputs())["mean"].dim() == 0  # it works on


def test_totals_of_two_shapes_are_refused(parallel: Parallel) -> None:
    model = parallel((2, 1), "cpu*2", "shapes")

    with pytest.raises(BatchError, match=r"a total or weight .* is \(6,\), torch.float64 on"):
        model(*inputs())


def test_a_plain_mean_is_joined_by_samples(plain: Tokens, parallel: Parallel) -> None:
    """What the guide warns of: it is not the mean over what the mask counts."""
    x, mask = inputs()
    model = parallel((2, 1), "cpu*2", "plain")
    plain.how = "plain"
    parts = [plain(x[:6], mask[:6]), plain(x[6:], mask[6:])]

    found = model(x, mask)

    assert_close(found, parts[0] * 6 / 9 + parts[1] * 3 / 9)
    assert not torch.isclose(found, plain(x, mask), rtol=1e-2)


@pytest.mark.filterwarnings("ignore::evener.errors.FaultWarning")
def test_a_helper_that_is_killed_changes_nothing(plain: Tokens, parallel: Parallel) -> None:
    whole = parallel((2, 1), "cpu*2")
    model = parallel((2, 1), "cpu*2", "killed")
    expected, found = tensors_of(whole(*inputs())), []

    with pytest.warns(FaultWarning, match="SIGKILL"):
        found = tensors_of(model(*inputs()))
    for outputs in (expected, found):
        objective(outputs).backward()

    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_portions_give_what_the_whole_piece_gives(plain: Tokens, most: int) -> None:
    batch = Batch(inputs(), {})
    assert batch.size is not None
    given = (batch.leaves, batch.wanted, batch.structure, 5)
    split = Split(batch.size, most, batch.cut_dims, batch.dims)
    piece, portions = Piece(*given, grad=True), Portions(*given, grad=True, split=split)
    found: list[list[Any]] = []
    for runner in (piece, portions):
        model = copy.deepcopy(plain)
        structure = runner.forward(model)
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in runner.outputs]
        objective(tensors_of(unflatten(structure, leaves))).backward()
        gradients = [leaf.grad for leaf in leaves]
        if isinstance(runner, Portions):
            runner.backward(model, gradients)
        else:
            run_backward(*runner.roots(gradients), keep_graph=False)
        values = [leaf.detach() for leaf in leaves]
        found.append([*values, *(each.grad for each in model.parameters())])

    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("shares", [[4, 0, 5], [0, 9, 0]])
def test_in_the_explicit_style_each_shard_has_its_own(plain: Tokens, shares: list[int]) -> None:
    devices = evener.devices("cpu*3")
    net = copy.deepcopy(plain)
    gluon.initialize(net, devices=devices)
    plain.load_state_dict(net.state_dict())
    xs, masks = (
        gluon.split_and_load(each, devices, even_split=False, shares=shares) for each in inputs()
    )

    for x, mask in zip(xs, masks, strict=True):
        found, expected = net(x, mask), plain(x, mask)
        for name in ("mean", "vector", "large"):
            assert_close(found[name], settled(expected)[name])
        assert found["logged"][1] == expected["logged"][1]
        if len(x):
            for outputs in (found, expected):
                objective([outputs[name] for name in ("mean", "vector", "large")]).backward()
    evener.release(net)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad)


def test_the_functions_of_torchs_parallel_join_it(plain: Tokens) -> None:
    found = parallel_functions.data_parallel(plain, inputs(), "cpu*2")
    assert_close(found["mean"], settled(plain(*inputs()))["mean"])
    plain.how = "twice"
    with pytest.raises(BatchError, match="made by mul"):
        parallel_functions.data_parallel(plain, inputs(), "cpu*2")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_a_compiled_module_may_return_it(plain: Tokens) -> None:
    model = copy.deepcopy(plain)
    model.compile(backend="aot_eager")
    evener.parallelize(model, "cpu*2", shares=(2, 1))
    try:
        assert_same_step(model, plain, *inputs())
    finally:
        evener.release(model)


def test_with_one_device_it_is_the_plain_call(plain: Tokens, parallel: Parallel) -> None:
    found = parallel("even", "cpu:0")(*inputs())["mean"]

    assert type(found) is Mean
    assert torch.equal(found, plain(*inputs())["mean"])


def test_a_module_may_call_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1).double()

        def forward(self, x: Tensor, *, top: bool = True) -> Tensor:
            return self(x, top=False) if top else Mean(self.linear(x).sum(), len(x))

    model = evener.parallelize(Twice(), "cpu*2", shares=(2, 1))
    x = inputs()[0]
    found = model(x)
    evener.release(model)

    assert type(found) is Tensor
    assert_close(found, model.linear(x).mean())
