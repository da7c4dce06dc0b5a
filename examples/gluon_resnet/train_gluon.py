"""The multi-GPU chapter of "Dive into Deep Learning" in its own order, in the explicit style."""

import argparse
import time

import torch
from torch import nn

import evener
from evener import gluon
from evener.textbook import fashion_mnist
from evener.textbook.resnet import ResNet18

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="sample", help='"full", or a folder with the four files')
parser.add_argument("--limit", type=int, default=512, help="images to train and to test with")
parser.add_argument("--width", type=int, default=8, help="channels of the first stage; 64 there")
parser.add_argument("--epochs", type=int, default=1, help="10 in the chapter")
options = parser.parse_args()

torch.manual_seed(0)
data = fashion_mnist.load(options.data).limited(options.limit)


# The network ------------------------------------------------------------------


def resnet18(num_classes):
    return ResNet18(options.width, num_classes)


net = resnet18(10)
devices = evener.devices("cpu*2")
gluon.initialize(net, init=gluon.Normal(sigma=0.01), devices=devices)

# A batch is split, and each shard computed on its own device: both by the first call, at the same
# time.
x = torch.rand(4, 1, 28, 28)
x_shards = gluon.split_and_load(x, devices)
print(net(x_shards[0]), net(x_shards[1]))

# A parameter is where it was put, and nowhere else.
weight = gluon.collect_params(net)["stem.0.weight"]
try:
    weight.data("cpu:2")
except RuntimeError as error:
    print(error)
print(weight.data(devices[0])[0], weight.data(devices[1])[0])


# Training ---------------------------------------------------------------------


def split_batch(X, y, devices):
    return (
        gluon.split_and_load(X, devices, even_split=False),
        gluon.split_and_load(y, devices, even_split=False),
    )


def batches(part, batch_size, *, shuffle):
    order = torch.randperm(len(part)) if shuffle else torch.arange(len(part))
    for chosen in order.split(batch_size):
        yield part.images[chosen] / 255, part.labels[chosen]


@torch.no_grad()
def evaluate_accuracy_gpus(net, data_iter, split_f=split_batch):
    net.eval()
    devices = next(iter(gluon.collect_params(net).values())).list_devices()
    num_right, num = 0, 0
    for features, labels in data_iter:
        X_shards, y_shards = split_f(features, labels, devices)
        pred_shards = [net(X_shard) for X_shard in X_shards]  # in parallel
        for pred_shard, y_shard in zip(pred_shards, y_shards, strict=True):
            num_right += int((pred_shard.argmax(1) == y_shard).sum())
        num += len(labels)
    return num_right / num


def train(num_devices, batch_size, lr):
    devices = evener.devices("cpu*2")[:num_devices]
    gluon.initialize(net, init=gluon.Normal(sigma=0.01), devices=devices, force_reinit=True)
    trainer = gluon.Trainer(gluon.collect_params(net), "sgd", {"learning_rate": lr})
    loss = nn.CrossEntropyLoss(reduction="sum")  # a sum: the trainer divides by the batch size
    few = data.limited(num_devices).test
    evaluate_accuracy_gpus(net, batches(few, batch_size, shuffle=False))  # starts the helpers
    for epoch in range(options.epochs):
        start_s, total = time.perf_counter(), 0.0
        net.train()
        for X, y in batches(data.train, batch_size, shuffle=True):
            X_shards, y_shards = split_batch(X, y, devices)
            losses = [loss(net(a), b) for a, b in zip(X_shards, y_shards, strict=True)]
            for l in losses:
                l.backward()
            trainer.step(len(X))
            total += sum(l.item() for l in losses)
        took_s = time.perf_counter() - start_s
        accuracy = evaluate_accuracy_gpus(net, batches(data.test, batch_size, shuffle=False))
        print(
            f"{num_devices} device(s), epoch {epoch + 1}: {took_s:.1f} s, "
            f"loss {total / len(data.train):.3f}, test accuracy {accuracy:.3f}"
        )


train(num_devices=1, batch_size=256, lr=0.1)
train(num_devices=2, batch_size=512, lr=0.2)
# The chapter doubles both, so that each device keeps its 256 samples. That is not needed:
# train(num_devices=2, batch_size=256, lr=0.1) is the first run again, in less time.
