"""Functions that multiply with a parameter: quantities and Kronecker factors are those of a linear layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core import room
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.utils.kroneckers import inv_kfac_mat_prod, kfac_mat_prod, kfacs_to_mat

pytestmark = pytest.mark.filterwarnings("ignore:.*generic way")

FIELDS = ("grad_batch", "diag_ggn_exact", "diag_h", "variance", "sum_grad_squared", "sqrt_ggn_exact")


class Conv1D(nn.Module):
    """GPT-2's linear layer, with its weight `[in, out]`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Straight(Conv1D):
    """The same with a weight `[out, in]`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(self.weight.detach().T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Transposed(Straight):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class TimeFirst(Conv1D):
    """The batch axis goes behind time before the product, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(0, 1) @ self.weight).transpose(0, 1) + self.bias


class ReadTwice(Conv1D):
    """The product, flat, is used beside its reshaped self."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1) + 0.5 * rows.sigmoid().view(*x.shape[:-1], -1)


class ReadTwiceAfterALayer(nn.Module):
    """The same behind `nn.Linear`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x)
        return rows + 0.5 * rows.sigmoid()


def network(kind: Callable[[int, int], nn.Module]) -> nn.Module:
    """Tokens to words."""
    layers = (nn.Embedding(7, 4), kind(4, 6), nn.Tanh(), nn.LayerNorm(6), kind(6, 3), nn.Flatten(0, 1))
    return nn.Sequential(*layers)


def filled(model: nn.Module, stored: bool) -> nn.Module:
    """Parameters that depend on names only; `stored` says that matrices of products are `[in, out]`."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        value = torch.randn(*(p.shape[::-1] if stored and is_product(name, p) else p.shape))
        p.data = (value.T.contiguous() if stored and is_product(name, p) else value).double()
    return model


def is_product(name: str, p: Tensor) -> bool:
    return p.dim() == 2 and not name.startswith("0")


def passed(model: nn.Module, *extensions: E.BackpropExtension) -> nn.Module:
    torch.manual_seed(2)
    tokens, words = torch.randint(7, (3, 5)), torch.randint(3, (15,))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(*extensions):
        loss_fn(bpk.extend(model)(tokens), words).backward()
    return model


@pytest.mark.parametrize(
    ("kind", "like"),
    [
        (Conv1D, nn.Linear),
        (Straight, nn.Linear),
        (Transposed, nn.Linear),
        (TimeFirst, nn.Linear),
        (ReadTwice, ReadTwiceAfterALayer),
    ],
)
def test_the_same_as_a_linear_layer(kind: type, like: type) -> None:
    stored = issubclass(kind, Conv1D) and not issubclass(kind, Straight)
    exact = (E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.Variance(), E.SumGradSquared(), E.SqrtGGNExact())
    others = (E.BatchL2Grad(), E.KFLR(), E.HMP())
    with warnings.catch_warnings():
        if kind in (Conv1D, Straight):
            warnings.simplefilter("error")  # nothing of a layer that only multiplies goes the generic way
        model = passed(filled(network(kind), stored), *exact, *others)
    layers = passed(filled(network(like), False), *exact, *others)
    for (name, p), q in zip(model.named_parameters(), layers.parameters(), strict=True):
        turned = stored and is_product(name, p)
        for field in FIELDS:
            expected = getattr(q, field)
            torch.testing.assert_close(getattr(p, field), expected.mT if turned else expected, msg=f"{field} of {name}")
        torch.testing.assert_close(p.batch_l2, q.batch_l2)
        torch.testing.assert_close(p.kflr, q.kflr[::-1] if turned else q.kflr, msg=f"factors of {name}")
        vector = torch.randn_like(p)[None]
        expected = q.hmp(vector.mT if turned else vector)
        torch.testing.assert_close(p.hmp(vector), expected.mT if turned else expected)


def test_factors_stand_for_the_flattened_weight() -> None:
    """With one sample and one position the Kronecker product is the block, in the order of `weight.flatten()`."""
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(3, 4), Conv1D(4, 2)).double())
    loss_fn = bpk.extend(nn.MSELoss())
    with bpk.backpack(E.KFLR(), E.KFRA(), E.SqrtGGNExact()):
        loss_fn(model(torch.randn(1, 3).double()), torch.randn(1, 2).double()).backward()
    weight = model[1].weight
    rows = weight.sqrt_ggn_exact.reshape(-1, 8)
    assert [len(factor) for factor in weight.kflr] == [4, 2]
    torch.testing.assert_close(kfacs_to_mat(weight.kflr), rows.T @ rows)
    torch.testing.assert_close(kfacs_to_mat(weight.kfra), rows.T @ rows)


@pytest.mark.parametrize("how", ["expand", "reduce"])
def test_positions_are_those_of_a_linear_layer(how: str) -> None:
    model = passed(filled(network(Conv1D), True), E.KFLR(approximation=how))
    layers = passed(filled(network(nn.Linear), False), E.KFLR(approximation=how))
    torch.testing.assert_close(model[1].weight.kflr, layers[1].weight.kflr[::-1])


class Table(nn.Module):
    """A product with a table that no sample has, beside one with data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w, self.v = nn.Linear(2, 4), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(5, 3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.tanh(self.first(x)) @ self.v)[:, None] + self.table @ self.w).sigmoid().sum(1)


def test_a_product_with_a_table_has_no_samples() -> None:
    torch.manual_seed(0)
    model, x, y = bpk.extend(Table().double()), torch.randn(4, 2).double(), torch.randn(4, 2).double()
    loss_fn = bpk.extend(nn.MSELoss())
    with bpk.backpack(E.BatchGrad(), E.KFLR(), E.SqrtGGNExact()):
        loss_fn(model(x), y).backward()
    assert [len(f) for f in model.w.kflr] == [12]
    assert [len(f) for f in model.v.kflr] == [4, 4]
    for n in range(4):
        expected = torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]) / 4, [model.w, model.v])
        torch.testing.assert_close([model.w.grad_batch[n], model.v.grad_batch[n]], list(expected))


class Frozen(nn.Module):
    """Adds a product with frozen positions, which are as many as there are samples, and weights of two factors."""

    def __init__(self, product: Callable[[Frozen], Tensor]) -> None:
        super().__init__()
        self.product, self.w, self.layer = product, nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.product(self)).tanh().mean(1))


PRODUCTS: dict[str, Callable[[Frozen], Tensor]] = {
    "matmul": lambda m: m.frozen @ m.w,
    "linear": lambda m: F.linear(m.frozen, m.w.T),
    "a view": lambda m: m.frozen.T[:, :4].T @ m.w,
    "a layer": lambda m: m.layer(m.frozen),
}


def require_rows(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Individual gradients are those of the samples, one by one."""
    loss_fn, params = bpk.extend(nn.MSELoss()), [p for p in model.parameters() if p.requires_grad]
    with warnings.catch_warnings(), bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        warnings.filterwarnings("error", ".*mixes samples|.*are not samples")
        loss_fn(bpk.extend(model)(x), y).backward()
    for n in range(len(x)):
        loss = loss_fn(model(x[n : n + 1]), y[n : n + 1]) / len(x)
        expected = torch.autograd.grad(loss, params, allow_unused=True)
        for p, gradient in zip(params, expected, strict=True):
            if gradient is not None:
                torch.testing.assert_close(p.grad_batch[n], gradient)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_frozen_parameter_has_no_samples(name: str) -> None:
    torch.manual_seed(0)
    require_rows(Frozen(PRODUCTS[name]).double(), torch.randn(4, 4, 4).double(), torch.randn(4, 2).double())


@pytest.mark.parametrize("frozen", ["down", "up"])
def test_an_adapter_of_which_a_half_is_frozen(frozen: str) -> None:
    """As many samples as features: rows of the weight that functions put together are none."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.down, self.up = (
                nn.Linear(4, 4),
                nn.Parameter(torch.randn(2, 4)),
                nn.Parameter(torch.ones(4, 2)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.layer.weight + self.up @ self.down, self.layer.bias).tanh()

    torch.manual_seed(0)
    model = Adapted().double()
    getattr(model, frozen).requires_grad_(False)
    require_rows(model, torch.randn(4, 4).double(), torch.randn(4, 4).double())


class TableOfALayer(Table):
    """The same with a layer on the table, which is left to autograd, and a second call of it on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x) @ self.v)[:, None] + self.layer(self.table[None])).sigmoid().sum(1)


def test_a_layer_without_samples_is_left_alone_in_every_pass() -> None:
    """Its product is no call of its own: what is remembered of the graph knows the layer only."""
    torch.manual_seed(0)
    model, x, y = bpk.extend(TableOfALayer().double()), torch.randn(4, 2).double(), torch.randn(4, 2).double()
    loss_fn = bpk.extend(nn.MSELoss())
    for _ in range(3):
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x), y).backward()
        for n in range(4):
            loss = loss_fn(model(x[n : n + 1]), y[n : n + 1]) / 4
            torch.testing.assert_close(
                model.layer.weight.grad_batch[n], torch.autograd.grad(loss, model.layer.weight)[0]
            )


class Placed(nn.Module):
    """Positions, added by a function."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 4), nn.Linear(4, 2)
        self.positions = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        where = self.positions.reshape(-1, 4)
        where = where if len(where) < 100 else where.mean(0, keepdim=True)  # KFRA has matrices of what layers are given
        return self.head(torch.tanh(self.first(x)[:, None] + where)).mean(1)


def placed(shape: tuple[int, ...], *extensions: E.BackpropExtension) -> nn.Parameter:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Placed(*shape)), bpk.extend(nn.MSELoss())
    with bpk.backpack(*extensions):
        loss_fn(model(torch.randn(3, 2)), torch.randn(3, 2)).backward()
    return model.positions


def test_large_parameters_have_a_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WHOLE", 24)
    (whole,) = placed((6, 4), E.KFLR()).kflr
    assert whole.layout is torch.strided and whole.shape == (24, 24)
    large = placed((7, 4), E.KFLR(), E.DiagGGNExact())
    (diagonal,) = large.kflr
    assert diagonal.layout is torch.sparse_coo and diagonal.shape == (28, 28)
    torch.testing.assert_close(diagonal.to_dense(), large.diag_ggn_exact.flatten().diag())
    vector = torch.randn(28)
    torch.testing.assert_close(kfac_mat_prod([diagonal])(vector), large.diag_ggn_exact.flatten() * vector)
    torch.testing.assert_close(
        inv_kfac_mat_prod([diagonal], 0.1)(vector), vector / (large.diag_ggn_exact.flatten() + 0.1)
    )
    assert placed((28,), E.KFLR()).kflr[0].layout is torch.strided, "a vector has its whole block"
    assert placed((7, 4), E.KFRA()).kfra[0].layout is torch.strided, "KFRA has nothing else"


@pytest.mark.parametrize("extension", [E.KFLR(), E.KFAC(), E.KFRA()], ids=str)
def test_too_large_a_factor_is_refused_before_it_is_allocated(extension: E.HBP) -> None:
    with pytest.raises(NotImplementedError, match=r"\[400000, 400000\] of a parameter \[400000\] .* 640,000,000,000 "):
        placed((400_000,), extension)


def test_too_large_an_input_factor_is_refused() -> None:
    layer, loss_fn = bpk.extend(nn.Linear(300_000, 1)), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.KFAC()), pytest.raises(NotImplementedError, match=r"\[300000, 300000\] of a parameter \[1, 3"):
        loss_fn(layer(torch.randn(1, 300_000)), torch.zeros(1, 1)).backward()


def test_an_error_of_torch_at_a_parameter_of_functions_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **named: object) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr("bpk.plan.stretch.StretchCall.of_parameters", fail)
    with pytest.raises(RuntimeError, match="not enough memory"):
        placed((2, 4), E.KFLR())


class Heads(nn.Module):
    """Several networks that multiply with the same matrix, also twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.w = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        h = torch.sigmoid(torch.tanh(self.second(x) if second else self.first(x)) @ self.w)
        return h @ self.w if second else h


@pytest.mark.parametrize("one_after_the_other", [False, True])
def test_products_behind_several_losses(one_after_the_other: bool) -> None:
    """The second network runs after the first loss or before it: backward reaches the first loss later or sooner."""
    torch.manual_seed(0)
    model, x, y = bpk.extend(Heads().double()), torch.randn(3, 2).double(), torch.randn(3, 2).double()
    one, other = bpk.extend(nn.MSELoss()), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.BatchGrad(), E.DiagHessian(), E.DiagGGNExact(), E.SqrtGGNExact()):
        if one_after_the_other:
            total = one(model(x), y)
            total = total + other(model(x, True), y)
        else:
            left, right = model(x), model(x, True)
            total = one(left, y) + other(right, y)
        total.backward()

    def objective(w: Tensor, rows: slice = slice(None)) -> Tensor:
        outputs = [torch.func.functional_call(model, {"w": w}, (x[rows], second)) for second in (False, True)]
        return sum((F.mse_loss(out, y[rows]) for out in outputs), torch.zeros(()))

    w = model.w.detach()
    rows = [torch.func.grad(objective)(w, slice(n, n + 1)) / 3 for n in range(3)]
    torch.testing.assert_close(model.w.grad_batch, torch.stack(rows))
    hessian = torch.autograd.functional.hessian(objective, w).reshape(4, 4)
    torch.testing.assert_close(model.w.diag_h.flatten(), hessian.diagonal())
    torch.testing.assert_close(model.w.sqrt_ggn_exact.square().sum((0, 1)), model.w.diag_ggn_exact)


class LayerAndFunction(nn.Module):
    """A weight that a layer uses, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, by_layer: bool) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.shared(h) if by_layer else h @ self.shared.weight.T


def test_a_share_behind_a_loss_that_comes_later() -> None:
    """A layer behind one loss has the parameter, and a function behind another one, which is looked at in time."""
    model, x, y = bpk.extend(LayerAndFunction()), torch.randn(3, 2), torch.randn(3, 2)
    one, other = bpk.extend(nn.MSELoss()), bpk.extend(nn.MSELoss())
    total = one(model(x, False), y)
    total = total + other(model(x, True), y)
    with bpk.backpack(E.BatchGrad()):
        total.backward()
    with bpk.disable():
        for n in range(3):
            part = (one(model(x[n : n + 1], False), y[n : n + 1]) + other(model(x[n : n + 1], True), y[n : n + 1])) / 3
            params = list(model.parameters())
            for p, g in zip(params, torch.autograd.grad(part, params), strict=True):
                torch.testing.assert_close(p.grad_batch[n], g)


class Branches(nn.Module):
    """A weight that is used straight, in a branch that the graph's search leaves early, and transposed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(torch.randn(3, 3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.tanh(x @ self.w) @ self.w)
        for _ in range(3):
            h = torch.sin(h)
        return self.last(h + x @ self.w.T)


def test_factors_are_in_the_order_of_the_last_use() -> None:
    """Steps of a plan come in the order of autograd: latest first, however long the way to them is."""
    torch.manual_seed(0)
    args = Branches().double(), nn.CrossEntropyLoss(), torch.randn(5, 3).double(), torch.randint(2, (5,))
    assert bpk.verify(*args, E.KFLR(), E.KFAC()).ok


class TwoLengths(nn.Module):
    """A layer at all positions, and once more at one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1) + self.layer(x[:, :1].sin())[:, 0])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extension", [E.KFAC, E.KFLR])
def test_positions_of_uses_with_different_lengths_do_not_add_up(extension: type, n: int) -> None:
    """One row of one sample would be added to all others."""
    model, loss_fn = bpk.extend(TwoLengths()), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(n, 4, 3)), torch.zeros(n, dtype=torch.long))
    with bpk.backpack(extension()):
        loss.backward(retain_graph=True)
    assert torch.isfinite(kfacs_to_mat(getattr(model.layer.weight, extension().savefield))).all()
    expand = bpk.backpack(extension(approximation="expand"))
    with pytest.raises(UnsupportedLayer, match="different numbers of positions"), expand:
        loss_fn(model(torch.randn(n, 4, 3)), torch.zeros(n, dtype=torch.long)).backward()
