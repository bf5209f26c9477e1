"""The first layers by tangents, where they have fewer weights than a curved layer above them has entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.extensions import BatchDiagHessian, DiagHessian
from bpk.sweeps.columns.tangents import Tangents
from tests.bpk.sweeps.test_diagonals import compare, compare_two_losses, data, ending_with, same_sums
from tests.helpers import backward, extended
from tests.models.networks import TakeFirst
from tests.references.compare import Assembled
from tests.references.hessian_diagonals import of_loss, of_samples

pytestmark = pytest.mark.filterwarnings("ignore:These go the generic way")


def itself() -> nn.Module:
    """Attention of a sequence to itself."""
    layer = nn.MultiheadAttention(2, 1, batch_first=True)
    return Assembled(lambda self, x: self.layer(x, x, x, need_weights=False)[0], layer=layer)


def around(*layers: nn.Module) -> nn.Module:
    """`x + f(x)`."""
    return Assembled(lambda self, x: x + self.layers(x), layers=nn.Sequential(*layers))


def side_by_side(first: nn.Module, second: nn.Module) -> nn.Module:
    """Two curved branches."""
    return Assembled(lambda self, x: torch.cat([self.a(x), self.b(x)], 1), a=first, b=second)


def function(of: Callable[[Tensor], Tensor]) -> nn.Module:
    """A function, which has no rule."""
    return Assembled(lambda self, x: of(x))


def twice() -> nn.Module:
    """A layer that is called in front of others and behind them."""
    return Assembled(
        lambda self, x: self.own(F.pad(self.wide(self.own(x).tanh()).tanh(), (0, 0))[..., :4]),
        own=nn.Linear(4, 4),
        wide=nn.Linear(4, 24),
    )


def sequences() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 8, 2).double()


def spread(*layers: nn.Module, size: int = 16) -> list[nn.Module]:
    """Layers with few parameters, and one with many outputs and a curved one above them."""
    return [*layers, nn.Flatten(), nn.Linear(size, 32), nn.Tanh()]


CONVOLUTIONS: dict[str, Callable[[], nn.Sequential]] = {
    "linear in between": lambda: ending_with(
        nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 8, 2), nn.BatchNorm2d(8), nn.ELU()
    ),
    "curved in between": lambda: ending_with(nn.Conv2d(2, 1, 2), nn.Tanh(), nn.Conv2d(1, 12, 2), nn.SiLU()),
    "normalised in between": lambda: ending_with(nn.Conv2d(2, 2, 1), nn.GroupNorm(1, 2), nn.Conv2d(2, 8, 2), nn.Tanh()),
    "groups": lambda: ending_with(nn.Conv2d(2, 2, (1, 2), groups=2), nn.Sigmoid(), nn.Conv2d(2, 10, 2), nn.SiLU()),
    "transposed": lambda: ending_with(nn.ConvTranspose2d(2, 2, 2, groups=2), nn.Tanh(), nn.Conv2d(2, 6, 2), nn.SiLU()),
    "around": lambda: ending_with(
        nn.Conv2d(2, 2, 1), around(nn.Conv2d(2, 2, 1), nn.Tanh()), nn.Conv2d(2, 8, 2), nn.Tanh()
    ),
    "columns that pass by": lambda: ending_with(
        nn.Conv2d(2, 2, 1),
        around(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 12, 1), nn.SiLU(), nn.Conv2d(12, 2, 1)),
        nn.Conv2d(2, 2, 2),
    ),
    "a diagonal that passes by": lambda: ending_with(
        nn.Conv2d(2, 2, 1),
        side_by_side(
            nn.Sequential(nn.Conv2d(2, 12, 2), nn.SiLU()), nn.Sequential(nn.Conv2d(2, 2, 2, groups=2), nn.Tanh())
        ),
    ),
    "curved where columns would begin": lambda: ending_with(nn.Conv2d(2, 4, 1), nn.LayerNorm(4), nn.SiLU()),
    "statistics of the input": lambda: ending_with(nn.GroupNorm(1, 2), nn.Conv2d(2, 8, 2), nn.Tanh()),
}
SEQUENCES: dict[str, Callable[[], list[nn.Module]]] = {
    "recurrent": lambda: spread(TakeFirst(nn.GRU(2, 1, batch_first=True)), size=8),
    "attention": lambda: spread(itself()),
    "layer norm": lambda: spread(nn.LayerNorm(2)),
    "several": lambda: spread(nn.Linear(2, 2), nn.Softplus(), nn.PReLU()),
}


class Scaled(nn.Module):
    """A function of parameters, curved in them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) + self.scale.square()


def ending_with_many(*layers: nn.Module) -> nn.Sequential:
    """Above these layers, a convolution with many outputs and a curved layer."""
    return ending_with(*layers, nn.Conv2d(2, 10, 2), nn.SiLU())


FUNCTIONS: dict[str, Callable[[], nn.Sequential]] = {
    "elementwise": lambda: ending_with_many(nn.Conv2d(2, 2, 1), function(F.silu)),
    "pooling": lambda: ending_with_many(nn.Conv2d(2, 2, 1), function(lambda x: F.max_pool2d(F.gelu(x), 2, 1))),
    "all entries": lambda: ending_with_many(nn.Conv2d(2, 2, 1), function(lambda x: x / (1 + x.square().mean()))),
    "several": lambda: ending_with_many(nn.Conv2d(2, 2, 1), function(torch.tanh), nn.PReLU(), function(torch.sin)),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters whose diagonal is made of tangents."""
    found: list[str] = []
    squares = Tangents.squares

    def noted(self: Tangents, step: object, name: str) -> object:
        found.append(name)
        return squares(self, step, name)

    monkeypatch.setattr(Tangents, "squares", noted)
    return found


@pytest.mark.parametrize("network", CONVOLUTIONS)
def test_first_convolutions(network: str, asked: list[str]) -> None:
    compare(CONVOLUTIONS[network](), nn.CrossEntropyLoss(), *data())
    assert asked


@pytest.mark.parametrize("network", SEQUENCES)
def test_layers_of_sequences(network: str, asked: list[str]) -> None:
    """Also of layers that are curved in their own parameters."""
    layers = SEQUENCES[network]()
    torch.manual_seed(1)
    model = nn.Sequential(*layers, nn.Linear(32, 3)).double()
    compare(model, nn.CrossEntropyLoss(), sequences(), torch.tensor([0, 2, 1]))
    assert asked


def test_rows_that_are_no_samples_go_by_columns(asked: list[str]) -> None:
    """The first layer sees each step of a sample as a row."""
    first = Assembled(lambda self, x: self.own(x.flatten(0, 1)).unflatten(0, x.shape[:2]), own=nn.Linear(2, 2))
    torch.manual_seed(1)
    model = nn.Sequential(*spread(first, nn.Tanh()), nn.Linear(32, 3)).double()
    compare(model, nn.CrossEntropyLoss(), sequences(), torch.tensor([0, 2, 1]))
    assert not asked


@pytest.mark.parametrize("network", [name for name in FUNCTIONS if name != "all entries"])
def test_functions_in_between(network: str, asked: list[str]) -> None:
    compare(FUNCTIONS[network](), nn.CrossEntropyLoss(), *data())
    assert asked


def sums_agree(model: nn.Sequential, **options: int) -> None:
    """The sum over samples alone."""
    (x, y), loss_fn = data(), nn.CrossEntropyLoss()
    expected = of_loss(model, loss_fn(model(x), y))
    extended(model, loss_fn)
    backward(model, loss_fn, x, y, DiagHessian(), **options)
    same_sums(model, expected)


def test_sums_of_parameters_that_functions_use(asked: list[str]) -> None:
    sums_agree(ending_with_many(nn.Conv2d(2, 2, 1), Scaled()))
    assert set(asked) == {"0", "weight", "bias"}


def test_samples_of_parameters_that_functions_use_go_by_columns(asked: list[str]) -> None:
    compare(ending_with_many(nn.Conv2d(2, 2, 1), Scaled()), nn.CrossEntropyLoss(), *data())
    assert not asked


def test_samples_that_mix(asked: list[str]) -> None:
    """All rows are those of one sample then."""
    sums_agree(FUNCTIONS["all entries"]())
    assert not asked


def test_a_function_that_is_not_differentiated_as_often_goes_by_columns(asked: list[str]) -> None:
    """Torch's derivatives of the gradient of `logcumsumexp` are NaN as functions of the vector."""
    sums_agree(ending_with_many(nn.Conv2d(2, 2, 1), function(lambda x: x.logcumsumexp(2))))
    assert not asked


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
def test_a_few_at_a_time(chunk_size: int, asked: list[str]) -> None:
    sums_agree(CONVOLUTIONS["linear in between"](), chunk_size=chunk_size)
    assert asked


def test_some_samples(asked: list[str]) -> None:
    x, y = data()
    model, loss_fn = CONVOLUTIONS["curved in between"](), nn.CrossEntropyLoss()
    expected = of_samples(model, x, y)
    extended(model, loss_fn)
    backward(model, loss_fn, x, y, BatchDiagHessian(subsampling=[2, 0]))
    for p, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h_batch, rows[[2, 0]], rtol=1e-8, atol=1e-11)
    assert asked


def test_a_layer_in_front_and_behind_goes_by_columns(asked: list[str]) -> None:
    torch.manual_seed(0)
    model, x = twice().double(), torch.randn(3, 4).double()
    compare(model, nn.MSELoss(), x, torch.randn(3, 4).double())
    assert not asked


def test_two_losses(asked: list[str]) -> None:
    """Columns of one are under way elsewhere, where those of the other might end."""
    compare_two_losses(CONVOLUTIONS["curved in between"]()[:-1], 48)
