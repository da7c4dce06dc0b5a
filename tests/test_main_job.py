import itertools
import os

import pytest
import torch
from torch import nn

import evener
from evener.textbook import fashion_mnist, main_job
from evener.textbook.record import Recorder, Run, Settings

CPU = torch.device("cpu")
TINY = Settings(epochs=2, batch_size=12, width=2, lr=0.05)


@pytest.fixture(scope="module", autouse=True)
def first_optimizer():
    """The first optimizer of a process sets an environment variable of torch's compiler."""
    torch.optim.SGD([torch.zeros(1)])


@pytest.fixture(scope="module")
def data():
    return fashion_mnist.load("sample").limited(30)


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))


def test_the_loop_is_plain_sgd(data):
    """Step by step the same as the rule written by hand: v = m v + g, p = p - lr v."""
    model, run = mlp(), Run(())
    main_job.train(model, data, TINY, Recorder(run))

    other = mlp()
    velocity = [torch.zeros_like(p) for p in other.parameters()]
    shuffler = torch.Generator().manual_seed(TINY.seed)
    losses = []
    for _ in range(TINY.epochs):
        for chosen in torch.randperm(30, generator=shuffler).split(12):
            pictures = (data.train.images[chosen] / 255 - 0.2860) / 0.3530
            loss = nn.functional.cross_entropy(other(pictures), data.train.labels[chosen])
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss, list(other.parameters()))
            with torch.no_grad():
                for p, v, g in zip(other.parameters(), velocity, gradients, strict=True):
                    v.mul_(TINY.momentum).add_(g)
                    p.sub_(v, alpha=TINY.lr)
    assert [step.loss for step in run.steps] == pytest.approx(losses, rel=1e-4)
    assert [step.num_images for step in run.steps] == [12, 24, 30] * 2
    assert run.epochs[-1].test_accuracy == main_job.evaluate(other, data.test, CPU)


def test_the_model_is_trained_in_train_mode_and_tested_in_eval_mode(data):
    modes = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, pictures):
            modes.append((self.training, torch.is_grad_enabled()))
            return self.inner(pictures)

    main_job.train(Spy(), data, TINY, Recorder(Run(())))
    assert modes == [*[(True, True)] * 3, (False, False)] * 2


def test_evaluate_counts_what_is_right(data):
    class Always4(nn.Module):
        def forward(self, pictures):
            return torch.eye(10)[4].expand(len(pictures), 10)

    expected = int((data.test.labels == 4).sum()) / 30
    assert main_job.evaluate(Always4(), data.test, CPU) == expected


def test_batches_cover_all_once_in_an_order_of_the_seed(data):
    def labels(seed):
        shuffler = torch.Generator().manual_seed(seed)
        return [b.tolist() for _, b in main_job.batches(data.train, 8, CPU, shuffler)]

    assert [len(batch) for batch in labels(0)] == [8, 8, 8, 6]
    assert sorted(itertools.chain(*labels(0))) == sorted(data.train.labels.tolist())
    assert labels(0) == labels(0) != labels(1)
    in_order = [b.tolist() for _, b in main_job.batches(data.train, 8, CPU)]
    assert list(itertools.chain(*in_order)) == data.train.labels.tolist()


def test_batches_are_normalised():
    sample = fashion_mnist.load("sample").train
    pictures = torch.cat([pictures for pictures, _ in main_job.batches(sample, 500, CPU)])
    assert pictures.shape == (3000, 1, 28, 28)
    assert pictures.dtype == torch.float32
    assert pictures.mean().item() == pytest.approx(0, abs=0.02)
    assert pictures.std().item() == pytest.approx(1, abs=0.02)


def test_equal_settings_build_equal_weights_and_nobody_elses_numbers_change():
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    one, two = main_job.build(TINY), main_job.build(TINY)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    other = main_job.build(Settings(width=2, seed=1))
    assert not torch.equal(one.head.weight, other.head.weight)
    tutorial = main_job.build(Settings(width=8, init="tutorial"))
    assert tutorial.head.weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_one_device_is_confined_to_its_cores_and_let_go(data):
    device = evener.devices("cpu*1")[0]
    device = evener.Device("cpu", 0, device.cores[-1:], 0, "one core")
    allowed, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    seen = set()

    def look(_):
        seen.add((tuple(os.sched_getaffinity(0)), torch.get_num_threads()))

    run = main_job.run([device], data, TINY, on_step=look)
    assert seen == {(device.cores, 1)}
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (allowed, num_threads)
    assert run.devices == (device,)
    assert run.uses_batch_norm
    assert (len(run.steps), len(run.epochs)) == (6, 2)


@pytest.mark.parametrize("spec", ["cpu:0", "cpu*2"])
def test_an_error_leaves_everything_as_it_was(data, spec):
    allowed, num_threads = os.sched_getaffinity(0), torch.get_num_threads()

    def fail(_):
        raise RuntimeError("from the listener")

    with pytest.raises(RuntimeError, match="from the listener"):
        main_job.run(evener.devices(spec), data, TINY, on_step=fail)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (allowed, num_threads)


def test_a_device_without_cores_is_confined_to_none():
    allowed = os.sched_getaffinity(0)
    with main_job.confined_to(()):
        assert os.sched_getaffinity(0) == allowed


def test_two_devices_train_as_one_does(data):
    devices = evener.devices("cpu*2")
    alone, together = (
        main_job.run(team, data, TINY, on_step=None) for team in (devices[:1], devices)
    )
    assert together.devices == tuple(devices)
    assert together.start_s > 0
    # The first step has the same weights and images; batch norm differs by the share of a device.
    assert together.steps[0].loss == pytest.approx(alone.steps[0].loss, rel=0.2)
    assert together.largest_loss_difference(alone) < 1.0
    assert [step.num_images for step in together.steps] == [12, 24, 30] * 2
