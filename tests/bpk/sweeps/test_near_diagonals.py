"""Layers that subtract few averages: behind them a diagonal is one again, and a few columns for each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bpk.extensions import BatchDiagHessian, DiagHessian
from tests.bpk.sweeps.test_diagonals import compare, compare_draws, compare_two_losses, data, ending_with, same_sums
from tests.helpers import backward, columns_begun, extended
from tests.references.hessian_diagonals import of_loss, of_samples

PICTURES: dict[str, Callable[[], nn.Sequential]] = {
    "group norm": lambda: ending_with(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 4, 2, padding=1), nn.GroupNorm(1, 4), nn.Tanh(),
    ),
    "nothing curved above": lambda: ending_with(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.GroupNorm(2, 2)
    ),
    "instance norm": lambda: ending_with(
        nn.Conv2d(2, 3, 3, padding=1), nn.InstanceNorm2d(3, affine=True), nn.GELU(), nn.AvgPool2d(2, 1, 1),
        nn.Conv2d(3, 2, 2), nn.InstanceNorm2d(2, eps=0.5), nn.Sigmoid(),
    ),
    "layer norm over several axes": lambda: ending_with(
        nn.Conv2d(2, 2, 3, padding=1), nn.LayerNorm((2, 4, 4)), nn.ELU()
    ),
    "one after the other": lambda: ending_with(
        nn.Conv2d(2, 4, 1), nn.GroupNorm(1, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(2), nn.RMSNorm(16), nn.SiLU()
    ),
    "nothing in front": lambda: ending_with(nn.GroupNorm(1, 2), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.SiLU()),
    "softmax": lambda: ending_with(
        nn.Flatten(2), nn.Linear(16, 9), nn.Softmax(-1), nn.Tanh(), nn.Linear(9, 8), nn.LogSoftmax(-1), nn.Sigmoid()
    ),
    "few entries along an axis": lambda: ending_with(nn.Conv2d(2, 2, 1), nn.Softmax(2), nn.SiLU(), nn.LogSoftmax(2)),
    "softmin": lambda: ending_with(nn.Conv2d(2, 8, 1), nn.Softmin(1), nn.SiLU()),
}  # fmt: skip


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
@pytest.mark.parametrize("network", PICTURES)
def test_curvature_is_that_of_autograd(network: str, loss: type[nn.Module]) -> None:
    x, y = data()
    compare(PICTURES[network](), loss(), x, y if loss is nn.CrossEntropyLoss else torch.randn(3, 3).double())


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many columns begin at layers, by the name of the layer."""
    return columns_begun(monkeypatch)


def test_four_columns_for_each_group(begun: Counter[str]) -> None:
    """Whether what comes is curved or not; the layer in front gets the diagonal."""
    compare(ending_with(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()), nn.CrossEntropyLoss(), *data())
    assert dict(begun) == {"CrossEntropyLoss": 3, "GroupNorm": 4 * 2}


def test_two_columns_for_each_softmax(begun: Counter[str]) -> None:
    layers = (nn.Flatten(2), nn.Linear(16, 8), nn.Softmax(-1), nn.Tanh())
    compare(ending_with(*layers), nn.CrossEntropyLoss(), *data())
    assert dict(begun) == {"CrossEntropyLoss": 3, "Softmax": 2 * 2}


def test_small_groups_keep_their_columns(begun: Counter[str]) -> None:
    layers = (nn.Conv2d(2, 2, 1), nn.LayerNorm(4), nn.ReLU())
    compare(ending_with(*layers), nn.CrossEntropyLoss(), *data())
    assert begun["LayerNorm"] == 2 * 4 * (4 + 2)


def sums_agree(model: nn.Sequential, x: Tensor, y: Tensor, **options: object) -> None:
    loss_fn = nn.CrossEntropyLoss()
    expected = of_loss(model, loss_fn(model(x), y))
    extended(model, loss_fn)
    backward(model, loss_fn, x, y, DiagHessian(), **options)
    same_sums(model, expected)


@pytest.mark.parametrize(
    "options", [{"chunk_size": 1}, {"chunk_size": 3}, {"chunk_size": 10}, {"memory": 1 << 16}], ids=str
)
@pytest.mark.parametrize("network", ["group norm", "instance norm", "softmax"])
def test_few_columns_at_a_time(network: str, options: dict[str, int]) -> None:
    sums_agree(PICTURES[network](), *data(), **options)


def test_some_samples() -> None:
    (x, y), model, loss_fn = data(), PICTURES["group norm"](), nn.CrossEntropyLoss()
    expected = of_samples(model, x, y)
    extended(model, loss_fn)
    backward(model, loss_fn, x, y, BatchDiagHessian(subsampling=[2, 0]))
    for p, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h_batch, rows[[2, 0]], rtol=1e-8, atol=1e-11)


def test_weights_of_zero_and_pictures_of_one_colour() -> None:
    """Neither `x̂` nor its pairs have a length then."""
    (x, y), model = data(), PICTURES["group norm"]()
    x[1] = 2.0
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight[:2] = 0.0
        model[5].weight.zero_()
    sums_agree(model, x, y)


def test_a_layer_that_is_used_twice(begun: Counter[str]) -> None:
    """Its weight is curved together with its input: no diagonal."""
    (x, y), norm = data(), nn.GroupNorm(1, 2)
    model = ending_with(nn.Conv2d(2, 2, 1), norm, nn.Tanh(), nn.Conv2d(2, 2, 1), norm, nn.SiLU())
    sums_agree(model, x, y)
    assert begun["GroupNorm"] > 2 * 4


def test_dropout_in_front() -> None:
    model = ending_with(nn.Conv2d(2, 4, 1), nn.Dropout(0.5), nn.GroupNorm(2, 4), nn.SiLU())
    compare_draws(model, model[1])


def test_two_losses() -> None:
    body = PICTURES["group norm"]()[:-1]
    torch.manual_seed(2)
    compare_two_losses(body, 64)


def test_single_precision() -> None:
    """Sums in which both signs occur lose no more than any."""
    (x, y), model = data(), PICTURES["group norm"]()
    loss_fn = nn.CrossEntropyLoss()
    expected = of_loss(model, loss_fn(model(x), y))
    model.float()
    extended(model, loss_fn)
    backward(model, loss_fn, x.float(), y, DiagHessian())
    size = max(diagonal.abs().max().item() for diagonal in expected)
    for p, diagonal in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h.double(), diagonal, rtol=1e-4, atol=1e-5 * size)
