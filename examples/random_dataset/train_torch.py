"""A model that prints its part of each batch, in plain PyTorch, on one device."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return len(self.data)


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, x):
        output = self.fc(x)
        print("    In Model: input size", x.size(), "output size", output.size())
        return output


torch.manual_seed(0)
loader = DataLoader(RandomDataset(size=5, length=100), batch_size=30, shuffle=True)
net = nn.DataParallel(Model(5, 2), device_ids=[0, 1])

for x in loader:
    output = net(x)
    print("Outside: input size", x.size(), "output size", output.size())

torch.save(net.module.state_dict(), "model.pt")
