"""The same network and loop in plain PyTorch, on one device, for comparison."""

import argparse
import time

import torch
from torch import nn

from evener.gluon import Normal
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
Normal(sigma=0.01)(net)

x = torch.rand(4, 1, 28, 28)
print(net(x))

print(net.stem[0].weight.data[0])


# Training ---------------------------------------------------------------------


def batches(part, batch_size, *, shuffle):
    order = torch.randperm(len(part)) if shuffle else torch.arange(len(part))
    for chosen in order.split(batch_size):
        yield part.images[chosen] / 255, part.labels[chosen]


@torch.no_grad()
def evaluate_accuracy(net, data_iter):
    net.eval()
    num_right, num = 0, 0
    for features, labels in data_iter:
        num_right += int((net(features).argmax(1) == labels).sum())
        num += len(labels)
    return num_right / num


def train(batch_size, lr):
    Normal(sigma=0.01)(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss = nn.CrossEntropyLoss()
    for epoch in range(options.epochs):
        start_s, total = time.perf_counter(), 0.0
        net.train()
        for X, y in batches(data.train, batch_size, shuffle=True):
            optimizer.zero_grad()
            l = loss(net(X), y)
            l.backward()
            optimizer.step()
            total += l.item() * len(X)
        took_s = time.perf_counter() - start_s
        accuracy = evaluate_accuracy(net, batches(data.test, batch_size, shuffle=False))
        print(
            f"batches of {batch_size}, epoch {epoch + 1}: {took_s:.1f} s, "
            f"loss {total / len(data.train):.3f}, test accuracy {accuracy:.3f}"
        )


train(batch_size=256, lr=0.1)
train(batch_size=512, lr=0.2)
