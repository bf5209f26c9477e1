"""Data for examples, and references by automatic differentiation alone."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bpk.hessianfree.ggnvp import ggn_vector_product_from_plist
from bpk.hessianfree.hvp import hessian_vector_product
from bpk.jacobians.core.errors import explain, runtime_error

MEAN, STD = 0.1307, 0.3081
"""Mean and standard deviation of MNIST's pixels, with which images are normalised."""

ROOT = Path.home() / ".cache" / "bpk"
"""Where MNIST is downloaded to."""

LossFunction = Callable[[Tensor, Tensor], Tensor]


# ---- data ---------------------------------------------------------------------------------------


def load_mnist_dataset(root: str | Path = ROOT, download: bool = True) -> Dataset[Any]:
    """MNIST's training data: normalised images `[1, 28, 28]` and labels.

    Without torchvision, or where nothing can be downloaded, the 1797 handwritten digits of scikit-learn take its
    place, scaled from 8 x 8 to 28 x 28 pixels; a warning says so.

    Args:
        root: The folder for torchvision's data sets.
        download: Whether MNIST may be downloaded if it is not there.
    """
    try:
        from torchvision.datasets import MNIST
        from torchvision.transforms import Compose, Normalize, ToTensor

        transform = Compose([ToTensor(), Normalize((MEAN,), (STD,))])
        return MNIST(str(root), train=True, transform=transform, download=download)
    except (ImportError, RuntimeError, OSError) as error:  # no torchvision, one that does not load, no data
        reason = str(error).splitlines()[0]
    return small_digits(reason)


def small_digits(reason: str) -> Dataset[Any]:
    """The digits of scikit-learn in MNIST's format, with a warning why."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise runtime_error(
            "No handwritten digits are at hand.",
            f"MNIST could not be loaded ({reason}), and scikit-learn is not installed.",
            "pip install torchvision (with a connection to download MNIST), or pip install scikit-learn.",
        ) from error
    warnings.warn(
        f"MNIST could not be loaded ({reason}): using the 8 x 8 digits of scikit-learn, scaled to 28 x 28.",
        UserWarning,
        stacklevel=3,
    )
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    scaled = functional.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    return TensorDataset((scaled - MEAN) / STD, torch.from_numpy(digits.target).long())


def get_mnist_dataloader(
    batch_size: int = 64, shuffle: bool = True, root: str | Path = ROOT, download: bool = True
) -> DataLoader[Any]:
    """Batches of `load_mnist_dataset`."""
    return DataLoader(load_mnist_dataset(root, download), batch_size=batch_size, shuffle=shuffle)


def load_one_batch_mnist(
    batch_size: int = 64, shuffle: bool = True, root: str | Path = ROOT, download: bool = True
) -> tuple[Tensor, Tensor]:
    """One batch of `load_mnist_dataset`: images `[N, 1, 28, 28]` and labels `[N]`."""
    x, y = next(iter(get_mnist_dataloader(batch_size, shuffle, root, download)))
    return x, y


# ---- references ---------------------------------------------------------------------------------


def autograd_diag_ggn_exact(
    X: Tensor, y: Tensor, model: nn.Module, loss_function: LossFunction, idx: Sequence[int] | Tensor | None = None
) -> Tensor:
    """The diagonal of the GGN `J^T H J` by products with unit vectors: a slow reference without any extension.

    Args:
        X: The model's input.
        y: The loss's target.
        model: A model, extended or not.
        loss_function: `loss_function(model(X), y)` is a scalar.
        idx: Entries of the flattened and concatenated trainable parameters. Default: all of them.

    Returns:
        The entries `idx` of the diagonal, `[len(idx)]`.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> autograd_diag_ggn_exact(X, torch.zeros(2, 1), layer, torch.nn.MSELoss(reduction="sum"))
    tensor([20., 40.,  4.])
    >>> autograd_diag_ggn_exact(X, torch.zeros(2, 1), layer, torch.nn.MSELoss(reduction="sum"), idx=[1])
    tensor([40.])
    """
    params = [p for p in model.parameters() if p.requires_grad]
    output = model(X)
    loss = loss_function(output, y)

    def times_ggn(param: Tensor, unit: Tensor) -> Tensor:
        return ggn_vector_product_from_plist(loss, output, param, unit)[0]

    return diagonal(times_ggn, params, idx)


def autograd_diag_hessian(
    X: Tensor, y: Tensor, model: nn.Module, loss_function: LossFunction, idx: Sequence[int] | Tensor | None = None
) -> Tensor:
    """The diagonal of the Hessian, like `autograd_diag_ggn_exact`.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> autograd_diag_hessian(X, torch.zeros(2, 1), layer, torch.nn.MSELoss(reduction="sum"))
    tensor([20., 40.,  4.])
    """
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    loss = loss_function(model(X), y)
    gradients = dict(zip(params, torch.autograd.grad(loss, params, create_graph=True, allow_unused=True), strict=True))

    def times_hessian(param: Tensor, unit: Tensor) -> Tensor:
        gradient = gradients[param]
        return torch.zeros_like(param) if gradient is None else hessian_vector_product(loss, param, unit, gradient)[0]

    return diagonal(times_hessian, params, idx)


def diagonal(
    times_block: Callable[[Tensor, Tensor], Tensor], params: Sequence[Tensor], idx: Sequence[int] | Tensor | None
) -> Tensor:
    """Entries of the diagonal of a matrix whose blocks `times_block(param, vector)` multiplies with, unit by unit."""
    ends = list(accumulate(p.numel() for p in params))
    found = []
    for index in range(ends[-1]) if idx is None else map(int, idx):
        if not 0 <= index < ends[-1]:
            raise IndexError(
                explain(
                    f"Entry {index} is asked of a diagonal with {ends[-1]} entries.",
                    "idx counts the entries of all trainable parameters, flattened and concatenated.",
                    f"pass indices from 0 to {ends[-1] - 1}.",
                )
            )
        where = bisect_right(ends, index)
        unit = torch.zeros_like(params[where]).flatten()
        unit[index - ends[where]] = 1  # counted from the end
        found.append(times_block(params[where], unit.reshape(params[where].shape)).flatten()[index - ends[where]])
    return torch.stack(found) if found else params[0].new_zeros(0)
