"""Where the last layer alone is trained, diagonals come from that of the loss's Hessian, without columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.losses.curvature import Curvature
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.losses.softmax import SoftmaxCrossEntropy

N, T, C = 4, 3, 5
EXTENSIONS = (E.DiagGGNExact, E.BatchDiagGGNExact, E.DiagHessian, E.BatchDiagHessian)
ENTROPY = nn.CrossEntropyLoss(weight=torch.rand(C).double() + 0.5, ignore_index=1, label_smoothing=0.1)


class Head(nn.Module):
    """A linear layer on `[N, T, 6]`, whose predictions the loss gets in one of several forms."""

    def __init__(self, form: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layer, self.form, self.before = nn.Linear(6, C), form, before

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.layer(self.before(x)))


class LogCosh(nn.Module):
    """A loss that bpk knows nothing of."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).cosh().log().sum()


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, C))
    model[0].requires_grad_(False)
    return model


def classes(*shape: int) -> Tensor:
    return torch.randint(C, shape)


CASES: dict[str, Callable[[], tuple[nn.Module, nn.Module, Tensor, Tensor]]] = {
    "classes": lambda: (nn.Linear(6, C), ENTROPY, torch.randn(N, 6), classes(N)),
    "frozen": lambda: (frozen(), nn.CrossEntropyLoss(reduction="sum"), torch.randn(N, 6), classes(N)),
    "pixels": lambda: (
        nn.Conv2d(2, C, 2, groups=1),
        nn.BCEWithLogitsLoss(),
        torch.randn(N, 2, 3, 3),
        torch.rand(N, C, 2, 2),
    ),
    "one pixel": lambda: (nn.Conv2d(2, C, 2, bias=False), ENTROPY, torch.randn(N, 2, 2, 2), classes(N, 1, 1)),
    "words": lambda: (Head(lambda x: x.flatten(0, 1)), ENTROPY, torch.randn(N, T, 6), classes(N * T)),
    "time first": lambda: (
        Head(lambda x: x.transpose(0, 1).flatten(0, 1)),
        ENTROPY,
        torch.randn(N, T, 6),
        classes(T * N),
    ),
    "extra axis": lambda: (Head(lambda x: x.transpose(1, 2)), ENTROPY, torch.randn(N, T, 6), classes(N, T)),
    "regression": lambda: (Head(lambda x: x.mT), nn.MSELoss(), torch.randn(N, T, 6), torch.randn(N, C, T)),
}

COLUMNS: dict[str, Callable[[], tuple[nn.Module, nn.Module, Tensor, Tensor]]] = {
    "classes from several positions": lambda: (
        Head(lambda x: x.flatten(1)),
        nn.CrossEntropyLoss(),
        torch.randn(N, T, 6),
        torch.randint(T * C, (N,)),
    ),
    "the same, as rows": lambda: (
        Head(lambda x: x.reshape(N, T * C), lambda x: x.flatten(0, 1)),
        nn.CrossEntropyLoss(),
        torch.randn(N, T, 6),
        torch.randint(T * C, (N,)),
    ),
    "positions along classes": lambda: (
        Head(lambda x: x),
        nn.CrossEntropyLoss(),
        torch.randn(N, T, 6),
        torch.randint(T, (N, C)),
    ),
    "a sum": lambda: (Head(lambda x: x + x.flip(2)), nn.MSELoss(), torch.randn(N, T, 6), torch.randn(N, T, C)),
    "repeated": lambda: (
        Head(lambda x: x.repeat(1, 2, 1)),
        nn.MSELoss(),
        torch.randn(N, T, 6),
        torch.randn(N, 2 * T, C),
    ),
    "two layers": lambda: (
        nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, C)),
        nn.MSELoss(),
        torch.randn(N, 6),
        torch.randn(N, C),
    ),
    "image": lambda: (nn.Conv2d(2, C, 2), nn.CrossEntropyLoss(), torch.randn(N, 2, 3, 3), classes(N, 2, 2)),
    "generic loss": lambda: (nn.Linear(6, C), LogCosh(), torch.randn(N, 6), torch.randn(N, C)),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which columns losses have made."""
    found: list[str] = []
    for cls in (Curvature, PointwiseLoss, SoftmaxCrossEntropy):
        for name in ("sqrt_hessian", "sqrt_hessian_parts", "sqrt_hessian_by_position", "hessian_columns"):
            original = vars(cls).get(name)
            if original is None or getattr(original, "__isabstractmethod__", False):
                continue

            def spy(self: Curvature, *args: object, original: Callable[..., object] = original) -> object:
                found.append(original.__name__)
                return original(self, *args)

            monkeypatch.setattr(cls, name, spy)
    return found


def expected(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, of_hessian: bool) -> list[Tensor]:
    """`[N, *p]` by parameter: of every sample's GGN or Hessian, the diagonal, by plain autograd."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    out = model(x).detach()
    own = torch.autograd.functional.jacobian(lambda x: model(x).flatten(), x)  # which entries belong to which sample
    sample_of = own.flatten(2).abs().sum(2).argmax(1) if own.dim() > 2 else None
    assert sample_of is not None
    hessian = torch.autograd.functional.hessian(lambda z: loss_fn(z.reshape(out.shape), y), out.flatten())
    found: list[list[Tensor]] = [[] for _ in trained]
    for n in range(N):
        mine = sample_of == n
        block = hessian[mine][:, mine]
        for k, (name, p) in enumerate(trained.items()):

            def predict(q: Tensor, name: str = name, mine: Tensor = mine) -> Tensor:
                return torch.func.functional_call(model, {name: q}, (x,)).flatten()[mine]

            if of_hessian:

                def objective(q: Tensor, mine: Tensor = mine, predict: Callable[[Tensor], Tensor] = predict) -> Tensor:
                    return loss_fn(out.flatten().masked_scatter(mine, predict(q)).reshape(out.shape), y)

                matrix = torch.autograd.functional.hessian(objective, p).reshape(p.numel(), p.numel())
            else:
                jac = torch.autograd.functional.jacobian(predict, p).flatten(1)
                matrix = jac.T @ block @ jac
            found[k].append(matrix.diagonal().reshape(p.shape))
    return [torch.stack(rows) for rows in found]


def compare(case: tuple[nn.Module, nn.Module, Tensor, Tensor], extension: type, factor: float = 1.0) -> None:
    model, loss_fn, x, y = case
    model, x = model.double(), x.double()
    y = y.double() if y.is_floating_point() else y
    summed = extension in (E.DiagGGNExact, E.DiagHessian)
    with bpk.disable():
        rows = expected(model, loss_fn, x, y, extension in (E.DiagHessian, E.BatchDiagHessian))
    bpk.extend(model), bpk.extend(loss_fn)
    quantity = extension()
    with bpk.backpack(quantity):
        (factor * loss_fn(model(x), y)).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p, value in zip(trained, rows, strict=True):
        torch.testing.assert_close(getattr(p, quantity.savefield), factor * (value.sum(0) if summed else value))


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("name", CASES)
def test_no_columns(name: str, extension: type, made: list[str]) -> None:
    compare(CASES[name](), extension, 2.5)
    assert made == []


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_where_a_diagonal_is_not_enough(name: str, extension: type) -> None:
    compare(COLUMNS[name](), extension)


def test_others_need_columns(made: list[str]) -> None:
    """An extension that takes more than squares and factors gets columns, and so do those that share them."""
    model, loss_fn, x, y = CASES["classes"]()
    model, loss_fn = bpk.extend(model.double()), bpk.extend(loss_fn)
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(x.double()), y).backward()
    alone = model.weight.diag_ggn_exact
    assert not made
    with bpk.backpack(E.DiagGGNExact(), E.SqrtGGNExact()):
        loss_fn(model(x.double()), y).backward()
    assert made
    torch.testing.assert_close(model.weight.diag_ggn_exact, alone)


@pytest.mark.parametrize("approximation", ["default", "expand", "reduce"])
@pytest.mark.parametrize("name", ["classes", "frozen", "one pixel"])
def test_factors(name: str, approximation: str, made: list[str]) -> None:
    """`G` is the sum of the blocks of the loss's Hessian, and the squares beside it are what they are alone."""
    model, loss_fn, x, y = CASES[name]()
    model, x = model.double(), x.double()
    layer = model[-1] if isinstance(model, nn.Sequential) else model
    inputs = (model[:-1](x) if isinstance(model, nn.Sequential) else x).flatten(1).detach()
    out = model(x).detach()
    hessian = torch.autograd.functional.hessian(lambda z: loss_fn(z.reshape(out.shape), y), out.flatten())
    expected = 2.5 * torch.stack([hessian[n * C : (n + 1) * C, n * C : (n + 1) * C] for n in range(N)]).sum(0)
    bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(E.KFLR(approximation), E.DiagGGNExact()):
        (2.5 * loss_fn(model(x), y)).backward()
    for p in layer.parameters():
        torch.testing.assert_close(p.kflr[0], expected)
    torch.testing.assert_close(layer.weight.kflr[1], inputs.T @ inputs / N)
    assert made == []
    together = layer.weight.diag_ggn_exact
    with bpk.backpack(E.DiagGGNExact()):
        (2.5 * loss_fn(model(x), y)).backward()
    torch.testing.assert_close(layer.weight.diag_ggn_exact, together)


@pytest.mark.parametrize("name", ["pixels", "words", "time first", "extra axis", "regression", *COLUMNS])
def test_factors_from_columns(name: str, made: list[str]) -> None:
    """Where the loss's Hessian alone does not give the factors, they are what they are beside columns."""
    model, loss_fn, x, y = (COLUMNS | CASES)[name]()
    model, x = bpk.extend(model.double()), x.double()
    loss_fn, y = bpk.extend(loss_fn), y.double() if y.is_floating_point() else y
    found = []
    for extensions in ([E.KFLR()], [E.KFLR(), E.SqrtGGNExact()]):
        made.clear()
        with bpk.backpack(*extensions):
            loss_fn(model(x), y).backward()
        assert made or name == "generic loss"
        found.append([factor for p in model.parameters() for factor in p.kflr])
    torch.testing.assert_close(*found)


def test_factors_of_some_samples(made: list[str]) -> None:
    model, loss_fn, x, y = CASES["frozen"]()
    model, loss_fn = bpk.extend(model.double()), bpk.extend(loss_fn)  # the loss is a sum
    with bpk.backpack(E.KFLR(subsampling=[1, 3])):
        loss_fn(model(x.double()), y).backward()
    some = model[-1].weight.kflr
    assert made
    with bpk.backpack(E.KFLR()):
        loss_fn(model(x[[1, 3]].double()), y[[1, 3]]).backward()
    torch.testing.assert_close(some[0], model[-1].weight.kflr[0])


def test_negative_factor_is_refused() -> None:
    for extension in (E.DiagGGNExact(), E.KFLR()):
        model, loss_fn, x, y = CASES["classes"]()
        model, loss_fn = bpk.extend(model.double()), bpk.extend(loss_fn)
        with pytest.raises(ValueError, match="negative factor"), bpk.backpack(extension):
            (-loss_fn(model(x.double()), y)).backward()


def test_several_losses() -> None:
    """Squares of one loss and columns of another add up."""
    model = bpk.extend(nn.Linear(6, C).double())
    losses = [bpk.extend(loss) for loss in (nn.CrossEntropyLoss(), LogCosh(), nn.MSELoss())]
    x, y, z = torch.randn(N, 6).double(), classes(N), torch.randn(N, C).double()

    def objective(chosen: list[int]) -> Tensor:
        out = model(x)
        return torch.stack([(k + 1) * losses[k](out, y if k == 0 else z) for k in chosen]).sum()

    parts, factors = [], []
    for k in range(3):
        with bpk.backpack(E.DiagGGNExact(), E.BatchDiagHessian()):
            objective([k]).backward()
        parts.append((model.weight.diag_ggn_exact, model.weight.diag_h_batch))
        with bpk.backpack(E.KFLR()):
            objective([k]).backward()
        factors.append(model.weight.kflr[0])
    for extensions in ([E.DiagGGNExact(), E.BatchDiagHessian()], [E.DiagGGNExact(), E.BatchDiagHessian(), E.KFLR()]):
        with bpk.backpack(*extensions):
            objective([0, 1, 2]).backward()
        torch.testing.assert_close(model.weight.diag_ggn_exact, torch.stack([ggn for ggn, _ in parts]).sum(0))
        torch.testing.assert_close(model.weight.diag_h_batch, torch.stack([h for _, h in parts]).sum(0))
    torch.testing.assert_close(model.weight.kflr[0], torch.stack(factors).sum(0))


def test_many_classes() -> None:
    """Columns would take 40 GB."""
    model, loss_fn = bpk.extend(nn.Linear(4, 50_000)), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.DiagGGNExact(), E.DiagHessian()):
        loss_fn(model(torch.randn(4, 4)), torch.arange(4)).backward()
    torch.testing.assert_close(model.weight.diag_ggn_exact, model.weight.diag_h)
    assert (model.bias.diag_ggn_exact > 0).all()
