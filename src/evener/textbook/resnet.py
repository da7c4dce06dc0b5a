"""The ResNet-18 of the multi-GPU chapter of "Dive into Deep Learning", for small pictures.

The tutorial takes ResNet-18 and fits it to 28x28 pixels: the first convolution is 3x3 with
stride 1 instead of 7x7 with stride 2, and there is no max-pool, so the pictures are not shrunk
before the first stage. Shapes for a batch of ``n`` at width 64::

    pictures                           (n,   1, 28, 28)
    stem      3x3, batch norm, ReLU    (n,  64, 28, 28)
    stage 1   two blocks, stride 1     (n,  64, 28, 28)
    stage 2   two blocks, stride 2     (n, 128, 14, 14)
    stage 3   two blocks, stride 2     (n, 256,  7,  7)
    stage 4   two blocks, stride 2     (n, 512,  4,  4)
    pool      mean over the picture    (n, 512)
    head      linear                   (n,  10)

``width`` is the number of channels of the first stage and scales all others with it; time and
memory for the weights go with its square.

One difference to the tutorial: a convolution that batch norm follows has no bias. Batch norm
subtracts the mean and the bias with it, so the function is the same, without parameters whose
gradient is nothing but rounding.

Source: https://d2l.ai/chapter_computational-performance/multiple-gpus-concise.html
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ResNet18", "Residual", "init_modern", "init_tutorial"]


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, added to their own input.

    The input is taken as it is, or through a 1x1 convolution where the number of channels or the
    size of the picture changes.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: 1 keeps height and width, 2 halves them (rounded up).
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        changes = stride != 1 or in_channels != out_channels
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride) if changes else None

    def forward(self, pictures: Tensor) -> Tensor:
        """Run the block.

        Args:
            pictures: (batch, in_channels, height, width).

        Returns:
            (batch, out_channels, ceil(height / stride), ceil(width / stride)).
        """
        out = functional.relu(self.norm1(self.conv1(pictures)))
        out = self.norm2(self.conv2(out))
        kept = pictures if self.shortcut is None else self.shortcut(pictures)
        return functional.relu(out + kept)


class ResNet18(nn.Module):
    """ResNet-18 for small pictures: a stem, four stages of two residual blocks, a linear head.

    Args:
        width: channels of the first stage; the stages have 1, 2, 4 and 8 times as many.
            Default 64, as in the tutorial: 11.2 million parameters. Width 16: 0.7 million.
        num_classes: outputs of the head. Default 10.
        in_channels: channels of a picture. Default 1 (grey).

    Raises:
        ValueError: if one of them is less than 1.
    """

    def __init__(self, width: int = 64, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        if min(width, num_classes, in_channels) < 1:
            raise ValueError(
                f"width ({width}), num_classes ({num_classes}) and in_channels ({in_channels})"
                " must each be at least 1"
            )
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.stage1 = _stage(width, width, stride=1)
        self.stage2 = _stage(width, 2 * width, stride=2)
        self.stage3 = _stage(2 * width, 4 * width, stride=2)
        self.stage4 = _stage(4 * width, 8 * width, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8 * width, num_classes)
        init_modern(self)

    def forward(self, pictures: Tensor) -> Tensor:
        """Compute the scores of each class.

        Args:
            pictures: (batch, in_channels, height, width), float; 28x28 in the tutorial.

        Returns:
            (batch, num_classes): scores before softmax, as ``nn.CrossEntropyLoss`` wants them.
        """
        features = self.stage4(self.stage3(self.stage2(self.stage1(self.stem(pictures)))))
        scores: Tensor = self.head(self.pool(features).flatten(start_dim=1))
        return scores


def _stage(in_channels: int, out_channels: int, *, stride: int) -> nn.Sequential:
    """Make the two blocks of a stage; the first one changes the shape."""
    return nn.Sequential(
        Residual(in_channels, out_channels, stride=stride),
        Residual(out_channels, out_channels),
    )


@torch.no_grad()
def init_modern(model: nn.Module) -> None:
    """Draw the weights so that the signal keeps its size from layer to layer, in place.

    Convolutions: normal with variance 2 / (out_channels * kernel area) (He et al. 2015,
    https://arxiv.org/abs/1502.01852). Biases start at zero; the linear head keeps the weights
    of ``nn.Linear``. ``ResNet18`` starts like this.

    Args:
        model: any module; its ``nn.Conv2d`` and ``nn.Linear`` are changed.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def init_tutorial(model: nn.Module) -> None:
    """Draw all weights of convolutions and linear layers from normal(0, 0.01), in place.

    As the tutorial does. Biases are left as they are.

    Args:
        model: any module; its ``nn.Conv2d`` and ``nn.Linear`` are changed.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, mean=0.0, std=0.01)
