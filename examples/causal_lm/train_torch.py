"""A small causal language model on texts of very uneven lengths, with gradient accumulation."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

TEXTS = [
    "yes",
    "no",
    "who is there?",
    "it is only the wind",
    "a causal model sees the letters before, never the ones behind",
    "short texts are filled up with padding, and padding must not count in the loss",
    "why?",
    "because the mean is one over letters and not over texts",
    "so a device whose texts are short has few letters, and its mean must count less than others",
    "good",
    "the sum of all losses by the number of all letters is right, however the batch was cut",
    "end",
]
PADDING = -100  # cross_entropy's own mark of what does not count
MICRO = 6  # texts of a micro-batch; an optimizer step has two


class CausalLM(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 128)

    def forward(self, letters, targets):
        scores = self.out(self.rnn(self.embed(letters))[0])
        losses = functional.cross_entropy(scores.transpose(1, 2), targets, reduction="sum")
        right = (scores.argmax(-1) == targets).sum()
        num = (targets != PADDING).sum()
        return losses, right / num


def batch_of(texts):
    rows = [torch.tensor([ord(letter) for letter in text]) for text in texts]
    letters = pad_sequence([row[:-1] for row in rows], batch_first=True)
    targets = pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=PADDING)
    return letters, targets


torch.manual_seed(0)
model = CausalLM()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batches = [batch_of(TEXTS[i : i + MICRO]) for i in range(0, len(TEXTS), MICRO)]
num_letters = sum(int((targets != PADDING).sum()) for _, targets in batches)

for step in range(1, 31):
    optimizer.zero_grad()
    loss = 0.0
    for letters, targets in batches:
        losses, accuracy = model(letters, targets)
        (losses / num_letters).backward()  # by the letters of the whole step
        loss += losses.item() / num_letters
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.4f}, accuracy in the last batch {accuracy:.3f}")
