"""Real handwritten digits without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from _check import needs
from _torchvision import import_torchvision


@dataclass(frozen=True)
class Digits:
    """Images `[N, 1, S, S]` in [0, 1] and labels `[N]`, split into a part to train on and a part to look at."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def size(self) -> int:
        """Height and width of an image."""
        return self.train_x.shape[-1]


def load_digits(root: Path = Path("data"), download: bool = False, held_out: int = 297) -> Digits:
    """MNIST at 14 x 14 where `root` holds it, otherwise the 1797 digits of 8 x 8 that ship with scikit-learn.

    `download` lets torchvision fetch MNIST into `root`. The digits of scikit-learn are the test part of the UCI
    "Optical Recognition of Handwritten Digits" set: written by 13 people, counted in blocks of 4 x 4 pixels.
    """
    if download or (root / "MNIST" / "raw").is_dir():
        name, x, y = _mnist(root, download)
    else:
        name, x, y = _scikit_learn()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Digits(name, x[:-held_out], y[:-held_out], x[-held_out:], y[-held_out:])


def _mnist(root: Path, download: bool) -> tuple[str, Tensor, Tensor]:
    import_torchvision()
    from torchvision.datasets import MNIST

    data = MNIST(str(root), train=True, download=download)
    x = avg_pool2d(data.data[:, None].float() / 255, 2)
    return f"MNIST from {root}, 14 x 14", x, data.targets


def _scikit_learn() -> tuple[str, Tensor, Tensor]:
    needs("sklearn")
    from sklearn import datasets

    data = datasets.load_digits()
    x = torch.from_numpy(data.images).float()[:, None] / 16
    return "scikit-learn's handwritten digits, 8 x 8", x, torch.from_numpy(data.target).long()
