import math

import pytest
import torch
from torch import nn

from evener.textbook.resnet import Residual, ResNet18, init_tutorial


def test_the_shapes_are_those_of_the_docstring():
    model = ResNet18(width=4)
    shapes = {}
    for name, child in model.named_children():
        child.register_forward_hook(
            lambda _, __, out, name=name: shapes.update({name: tuple(out.shape)})
        )
    model(torch.randn(2, 1, 28, 28))
    assert shapes == {
        "stem": (2, 4, 28, 28),
        "stage1": (2, 4, 28, 28),
        "stage2": (2, 8, 14, 14),
        "stage3": (2, 16, 7, 7),
        "stage4": (2, 32, 4, 4),
        "pool": (2, 32, 1, 1),
        "head": (2, 10),
    }


def test_width_64_has_the_layers_of_the_tutorial():
    model = ResNet18()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert sum(c.kernel_size == (3, 3) for c in convolutions) == 17
    assert sum(c.kernel_size == (1, 1) for c in convolutions) == 3
    # Reckoned by hand: 3x3 convolutions, shortcuts with bias, norms, head.
    stages = [9 * (a * b + 3 * b * b) for a, b in [(64, 64), (64, 128), (128, 256), (256, 512)]]
    shortcuts = [a * b + b for a, b in [(64, 128), (128, 256), (256, 512)]]
    norms = 2 * (64 + 4 * (64 + 128 + 256 + 512))
    expected = 9 * 64 + sum(stages) + sum(shortcuts) + norms + 512 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == expected == 11_171_914


def test_other_classes_and_channels():
    assert ResNet18(2, num_classes=3, in_channels=5)(torch.randn(2, 5, 9, 9)).shape == (2, 3)


@pytest.mark.parametrize("wrong", [(0, 10, 1), (8, 0, 1), (8, 10, -1)])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        ResNet18(*wrong)


def test_a_block_adds_its_input():
    block = Residual(3, 3).eval()
    nn.init.zeros_(block.norm2.weight)
    pictures = torch.randn(2, 3, 5, 5)
    assert torch.equal(block(pictures), pictures.relu())


def test_a_block_has_a_shortcut_only_where_the_shape_changes():
    assert Residual(3, 3).shortcut is None
    assert Residual(3, 4).shortcut is not None
    assert Residual(3, 3, stride=2).shortcut is not None
    assert Residual(3, 4, stride=2)(torch.randn(1, 3, 7, 7)).shape == (1, 4, 4, 4)


def test_modern_weights_keep_the_size_of_the_signal():
    torch.manual_seed(0)
    model = ResNet18(width=16)
    weight = model.stage3[1].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.05)
    assert not model.stage2[0].shortcut.bias.any()
    assert not model.head.bias.any()


def test_tutorial_weights():
    torch.manual_seed(0)
    model = ResNet18(width=16)
    init_tutorial(model)
    for layer in (model.stage3[1].conv1, model.head, model.stage2[0].shortcut):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.1)
        assert abs(layer.weight.mean().item()) < 0.001
    assert model.stem[1].weight.eq(1).all()
