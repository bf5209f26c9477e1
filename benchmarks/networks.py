"""Networks that are chains of layers."""

from __future__ import annotations

import itertools

from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm


def logistic_regression() -> nn.Sequential:
    """784-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Sequential:
    """784-1000-500-100-10 with ReLU."""
    sizes = (784, 1000, 500, 100)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(100, 10))


def _c3d3(last: type[nn.Module]) -> nn.Sequential:
    """Three convolutions and three linear layers (3C3D of the DeepOBS suite)."""

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, stride=2, ceil_mode=True)

    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), pool(),
        nn.Conv2d(64, 96, 3), nn.ReLU(), pool(),
        nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), pool(),
        nn.Flatten(),
        nn.Linear(1152, 512), nn.ReLU(),
        nn.Linear(512, 256), last(),
        nn.Linear(256, 10),
    )  # fmt: skip


def c3d3() -> nn.Sequential:
    """3C3D with ReLU throughout."""
    return _c3d3(nn.ReLU)


def c3d3_sigmoid() -> nn.Sequential:
    """3C3D with a sigmoid before the classification layer, so that the Hessian has a residual."""
    return _c3d3(nn.Sigmoid)


def c3d3_weight_norm() -> nn.Sequential:
    """3C3D with ReLU, whose weights are normalised (Salimans, Kingma, 2016): functions compute them."""
    model = c3d3()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weight_norm(layer)
    return model


def c3d3_pruned() -> nn.Sequential:
    """3C3D with a sigmoid before the classification layer, of which half of the weights are masked."""
    model = c3d3_sigmoid()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            prune.random_unstructured(layer, "weight", amount=0.5)
    return model


def lenet5() -> nn.Sequential:
    """LeNet-5 (LeCun et al., 1998) with tanh: curved from the first layer on, of 156 weights and 4,704 outputs."""
    convolutions = [
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)
    ]  # fmt: skip
    linear = [nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, nn.Flatten(), *linear)


def all_cnn_c() -> nn.Sequential:
    """All-CNN-C (Springenberg et al., 2015) without dropout, for 100 classes.

    The global average is an `AvgPool2d` over all 6 x 6 positions, which every peer knows.
    """
    spec = [
        (3, 96, 3, 1, 1), (96, 96, 3, 1, 1), (96, 96, 3, 2, 1),
        (96, 192, 3, 1, 1), (192, 192, 3, 1, 1), (192, 192, 3, 2, 1),
        (192, 192, 3, 1, 0), (192, 192, 1, 1, 0), (192, 100, 1, 1, 0),
    ]  # fmt: skip
    layers: list[nn.Module] = []
    for fan_in, fan_out, kernel, stride, padding in spec:
        layers += [nn.Conv2d(fan_in, fan_out, kernel, stride, padding), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(6), nn.Flatten())


def tiny() -> nn.Sequential:
    """Every kind of layer above, small enough for a test."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 4)
    )


def tiny_mlp() -> nn.Sequential:
    """A small multilayer perceptron for a test."""
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
