"""The networks that are measured: seeded random data in the shapes of well-known data sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Setup:
    """One network with a loss and one batch, ready to run."""

    model: nn.Sequential
    loss: nn.CrossEntropyLoss
    inputs: Tensor
    targets: Tensor

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order in which every result lists them."""
        return list(self.model.parameters())

    @property
    def batch(self) -> int:
        """`N`, the number of samples."""
        return self.inputs.shape[0]


@dataclass(frozen=True)
class Problem:
    """A network, the shape of one sample, and the quantities that are measured on it.

    `check_batch` is the number of samples in the correctness check, smaller than `batch` where the
    reference (a loop over samples and classes) would take minutes.
    """

    name: str
    title: str
    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    classes: int
    batch: int
    quantities: tuple[str, ...]
    check_batch: int | None = None

    def setup(self, batch: int | None = None, seed: int = 0) -> Setup:
        """Draw parameters and `batch` samples; the same seed gives the same problem everywhere."""
        torch.manual_seed(seed)
        model = self.build()
        n = self.batch if batch is None else batch
        inputs = torch.rand(n, *self.shape)
        targets = torch.randint(self.classes, (n,))
        return Setup(model, nn.CrossEntropyLoss(), inputs, targets)

    def check_setup(self) -> Setup:
        """The batch on which results are compared with the reference."""
        return self.setup(self.check_batch)


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


FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
PRODUCTS = ("HMP", "GGNMP", "PCHMP")
DIAGONALS = ("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "DiagHessian", "BatchDiagHessian")
SHARED = ("FirstOrderTogether", "DiagGGNExactWithKFLR")
SMALL = ("NoContext", *FIRST_ORDER, *DIAGONALS, "SqrtGGNExact", "SqrtGGNMC", "KFAC", "KFLR", *PRODUCTS, *SHARED)

PROBLEMS = {
    p.name: p
    for p in (
        Problem("logreg", "Logistic regression, MNIST shapes", logistic_regression, (1, 28, 28), 10, 512,
                (*SMALL, "KFRA")),
        # [C, N, p] would take 6.8 GB here, so no SqrtGGNExact.
        Problem("mlp", "MLP 784-1000-500-100-10, MNIST shapes", mlp, (1, 28, 28), 10, 128,
                (*(q for q in SMALL if q != "SqrtGGNExact"), "KFRA")),
        Problem("3c3d", "3C3D, CIFAR-10 shapes", c3d3, (3, 32, 32), 10, 64, SMALL),
        Problem("3c3d_sigmoid", "3C3D with one sigmoid, CIFAR-10 shapes", c3d3_sigmoid, (3, 32, 32), 10, 16,
                ("DiagHessian", "BatchDiagHessian", "HMP", "GGNMP")),
        # 100 columns: the exact quantities follow at N=4.
        Problem("allcnnc", "All-CNN-C, CIFAR-100 shapes", all_cnn_c, (3, 32, 32), 100, 16,
                ("NoContext", *FIRST_ORDER, "DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC", *PRODUCTS,
                 "FirstOrderTogether"), check_batch=4),
        Problem("allcnnc_n4", "All-CNN-C, CIFAR-100 shapes", all_cnn_c, (3, 32, 32), 100, 4,
                ("DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "KFLR", "DiagGGNExactWithKFLR")),
    )
}  # fmt: skip

TEST_PROBLEMS = {
    p.name: p
    for p in (
        Problem(
            "tiny", "A small convolutional network", tiny, (2, 6, 6), 4, 5, tuple(q for q in SMALL if q != "PCHMP")
        ),
        Problem("tiny_mlp", "A small multilayer perceptron", tiny_mlp, (6,), 3, 4, (*SMALL, "KFRA")),
    )
}
