"""Fashion-MNIST in plain PyTorch, on one device."""

import torch
from torch import nn

from evener.textbook import fashion_mnist
from evener.textbook.resnet import ResNet18

torch.manual_seed(0)
data = fashion_mnist.load("sample")
model = ResNet18(width=16)

criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(2):
    order = torch.randperm(len(data.train.labels))
    total = 0.0
    for chosen in order.split(128):
        x = data.train.images[chosen] / 255
        y = data.train.labels[chosen].long()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
    print(f"epoch {epoch + 1}: loss {total / len(order):.3f}")
