"""Diagonal residuals on their way through layers in which no entry of the output depends on two of the input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchDiagHessian, DiagHessian
from tests.helpers import backward, columns_begun, extended
from tests.references.compare import Assembled
from tests.references.hessian_diagonals import of_loss, of_samples

CHANNELS, SIZE, CLASSES = 2, 4, 3


def ending_with(*layers: nn.Module) -> nn.Sequential:
    """The layers and a linear one, after a step of training that moves statistics, all of them in evaluation mode."""
    body = nn.Sequential(*layers, nn.Flatten())
    torch.manual_seed(1)
    features = body(torch.randn(8, CHANNELS, SIZE, SIZE)).shape[1]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return model


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": lambda: ending_with(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.SiLU(), nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2), nn.Tanh()
    ),
    "pooling in front": lambda: ending_with(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.SiLU(), nn.Conv2d(3, 2, 2), nn.Tanh()
    ),
    "windows that overlap": lambda: ending_with(
        nn.Conv2d(2, 2, 1), nn.MaxPool2d(3, 1), nn.GELU(), nn.Conv2d(2, 3, 1), nn.AvgPool2d(2, 1), nn.Tanh()
    ),
    "elementwise layers in a row": lambda: ending_with(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Sigmoid(), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.ELU()
    ),
    "no layer in front": lambda: ending_with(nn.Tanh(), nn.Sigmoid(), nn.Conv2d(2, 2, 2)),
    "copies": lambda: ending_with(
        nn.Conv2d(2, 2, 3), nn.Upsample(scale_factor=2), nn.Tanh(), nn.ReflectionPad2d(1), nn.Sigmoid(),
        nn.Conv2d(2, 4, 3, stride=2), nn.PixelShuffle(2), nn.GELU(),
    ),
    "channels apart": lambda: ending_with(
        nn.Conv2d(2, 4, (1, 3)), nn.BatchNorm2d(4), nn.Conv2d(4, 4, (2, 1), groups=4), nn.BatchNorm2d(4), nn.ELU()
    ),
    "statistics of the input": lambda: ending_with(
        nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(),
        nn.Conv2d(4, 2, 2), nn.InstanceNorm2d(2, affine=True), nn.Tanh(),
    ),
    "features of two axes": lambda: ending_with(nn.Conv2d(2, 5, 1), nn.LayerNorm((4, 4)), nn.Tanh()),
    "features": lambda: ending_with(
        nn.Flatten(2), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4), nn.RMSNorm(4), nn.Sigmoid()
    ),
}  # fmt: skip
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "cross entropy": (nn.CrossEntropyLoss, lambda n: torch.arange(n) % CLASSES),
    "squares": (nn.MSELoss, lambda n: torch.linspace(-1, 1, n * CLASSES).view(n, CLASSES).double()),
}


def same_sums(model: nn.Module, expected: list[Tensor]) -> None:
    for p, diagonal in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h, diagonal, rtol=1e-8, atol=1e-11)


def compare_draws(model: nn.Sequential, dropout: nn.Module) -> None:
    """The sum in a model of which one layer draws, with the same draws."""
    (x, y), loss_fn = data(), nn.CrossEntropyLoss()
    dropout.train()
    torch.manual_seed(5)
    expected = of_loss(model, loss_fn(model(x), y))
    extended(model, loss_fn)
    torch.manual_seed(5)
    backward(model, loss_fn, x, y, DiagHessian())
    same_sums(model, expected)


def compare_two_losses(body: nn.Module, features: int) -> None:
    """The sum behind two losses, each with a head of its own."""
    x, y = data()
    heads = [nn.Linear(features, 3).double(), nn.Linear(features, 2).double()]
    losses = [nn.CrossEntropyLoss(), nn.MSELoss()]
    target = torch.randn(3, 2).double()

    def total() -> Tensor:
        found = body(x)
        return losses[0](heads[0](found), y) + losses[1](heads[1](found), target)

    model = nn.ModuleList([body, *heads])
    expected = of_loss(model, total())
    for module in (body, *heads, *losses):
        bpk.extend(module)
    with bpk.backpack(DiagHessian()):
        total().backward()
    same_sums(model, expected)


def compare(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> None:
    """Individual Hessian diagonals and their sum against plain autograd."""
    expected = of_samples(model, x, y, loss_fn)
    extended(model, loss_fn)
    backward(model, loss_fn, x, y, DiagHessian(), BatchDiagHessian())
    for p, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h_batch, rows, rtol=1e-8, atol=1e-11)
    same_sums(model, [rows.sum(0) for rows in expected])


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, CHANNELS, SIZE, SIZE).double(), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_diagonals_are_those_of_autograd(network: str, loss: str) -> None:
    make, targets = LOSSES[loss]
    compare(NETWORKS[network](), make(), data()[0], targets(3))


def test_steps_in_front_of_samples() -> None:
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.MaxPool1d(2), nn.Sigmoid(), nn.Linear(2, 3), nn.SiLU())
    model = Assembled(
        lambda self, x: self.head(self.inside(x.transpose(0, 1)).transpose(0, 1).flatten(1)),
        inside=inside,
        head=nn.Linear(15, CLASSES),
    ).double()
    compare(model, nn.CrossEntropyLoss(), torch.randn(3, 5, 2).double(), torch.tensor([0, 2, 1]))


def test_dropout_that_draws() -> None:
    """The diagonal is scaled by the square of what was drawn."""
    model = NETWORKS["elementwise layers in a row"]()
    compare_draws(model, model[4])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many columns begin at layers, by the name of the layer."""
    return columns_begun(monkeypatch)


def test_the_first_layer_needs_no_columns(begun: Counter[str]) -> None:
    """Nothing is behind the first convolution: the diagonal of the curvature is enough there."""
    compare(ending_with(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.SiLU()), nn.CrossEntropyLoss(), *data())
    assert set(begun) == {"CrossEntropyLoss"}


def test_no_more_columns_than_entries_where_a_diagonal_began(begun: Counter[str]) -> None:
    """Behind max pooling the diagonal has more entries, most of which are zero."""
    layers = (
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.MaxPool2d(2),
        nn.SiLU(),
    )
    compare(ending_with(*layers), nn.CrossEntropyLoss(), *data())
    assert begun["Conv2d"] == 3 * (SIZE // 2) ** 2
