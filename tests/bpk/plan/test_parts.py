"""Complex parameters: every quantity is that of their real and imaginary parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bpk
from bpk import extensions as E
from bpk.jacobians.families.autodiff import Autodiff
from bpk.plan.parts import in_parts
from tests.helpers import backward, registered
from tests.models.networks import OfParts
from tests.references.compare import ON_ANY_GRAPH, exact_fields, rand
from tests.references.reference import Reference

COMPLEX = torch.complex128


class Spectral(nn.Module):
    """What Fourier neural operators do: weights of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=COMPLEX))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.einsum("nit,iot->not", torch.fft.rfft(x)[..., :3], self.weight), n=5)


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.spectral, self.skip = nn.Linear(2, 4), Spectral(), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, 5, 2]
        x = self.lift(x).mT
        x = F.gelu(self.spectral(x).mT + self.skip(x.mT))
        return self.head(x).mean(1)


class Function(nn.Module):
    """A function of a real layer's result and two complex parameters."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.function = nn.Linear(2, 4), nn.Linear(4, 3), function
        self.w, self.b = (nn.Parameter(torch.randn(*shape, dtype=COMPLEX)) for shape in ((4, 4), (4,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.layer(x[:, 0]), self.w, self.b))


class Layers(nn.Module):
    """Layers of torch's with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4, dtype=COMPLEX), nn.Linear(4, 3, dtype=COMPLEX)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(torch.complex(x[:, 0], x[:, 1]))
        return self.last(torch.complex(z.real.tanh(), z.imag)).abs()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x.to(COMPLEX), w, b).abs(),
    "conjugate": lambda x, w, b: F.linear(x.to(COMPLEX), w.conj(), b).imag.tanh(),
    "twice": lambda x, w, b: (torch.tanh(x.to(COMPLEX) @ w + b) @ w.mH).real,
    "spread": lambda x, w, b: (x * b + w[0]).abs() + (w[1:] * b[:3, None]).real.sum(),
    "modulus": lambda x, w, b: x * (b * w.sum(0)).abs(),
    "looked up": lambda x, w, b: (w[(x.detach().abs() > 0.5).long()[:, 0]] * x * b).real,
}


def models() -> dict[str, Callable[[], nn.Module]]:
    made: dict[str, Callable[[], nn.Module]] = {"operator": Operator, "layers": Layers}
    return made | {name: lambda f=f: Function(f) for name, f in FUNCTIONS.items()}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    model = models()[name]()
    for p in model.parameters():
        p.data = p.data.to(p.dtype if p.is_complex() else torch.float64)
    return model, rand(3, 5, 2), torch.randint(3, (3,))


def of_real_parameters(model: nn.Module) -> nn.Module:
    """The same model, whose complex parameters are made of two real ones each."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            if p.is_complex():
                parametrize.register_parametrization(module, name, OfParts())
    return twin


def names_of_parts(name: str) -> list[str]:
    path, _, last = name.rpartition(".")
    start = f"{path}.parametrizations.{last}.original" if path else f"parametrizations.{last}.original"
    return [start + number for number in "01"]


@pytest.mark.parametrize("name", models())
def test_every_quantity_is_that_of_the_parts(name: str) -> None:
    model, x, y = problem(name)
    ref = Reference(of_real_parameters(model), (x,), lambda pred: F.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    for key, p in model.named_parameters():
        if not p.is_complex():
            continue
        for field, of in exact_fields(ref).items():
            if field == "batch_l2":  # of both parts together
                continue
            value, expected = getattr(p, field), torch.stack([of(part) for part in names_of_parts(key)], -1)
            assert value.is_complex() == (field == "grad_batch"), "squares are those of both parts"
            torch.testing.assert_close(in_parts(value), expected, rtol=1e-7, atol=1e-9, msg=f"{field} of {key}")
        torch.testing.assert_close(p.batch_l2, sum(map(ref.batch_l2, names_of_parts(key))), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("name", models())
def test_verify_agrees(name: str) -> None:
    """Products with blocks, Kronecker factors, Gram matrices and all others, too."""
    model, x, y = problem(name)
    report = bpk.verify(model, nn.CrossEntropyLoss(), x, y)
    assert not [row for row in report.rows if row.verdict.value not in ("ok", "not checked")], report.summary()
    checked = {row.quantity for row in report.rows if row.verdict.value == "ok"}
    assert checked >= {type(e()).__name__ for e in ON_ANY_GRAPH}


def test_verify_sees_a_wrong_imaginary_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem("linear")
    right = E.SumGradSquared.value

    def wrong(self: Any, uses: Any) -> Tensor:
        value = right(self, uses)
        return value * torch.tensor([1.0, 1.01]).to(value) if uses.parameter.is_complex() else value

    monkeypatch.setattr(E.SumGradSquared, "value", wrong)
    report = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.SumGradSquared())
    assert {row.parameter for row in report.rows if row.verdict.value == "WRONG"} == {"w", "b"}


def test_a_product_multiplies_complex_vectors() -> None:
    model, x, y = problem("linear")
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.HMP())
    assert isinstance(model.w, Tensor)
    v = torch.randn(2, *model.w.shape, dtype=COMPLEX)
    assert model.w.hmp(v).shape == v.shape
    torch.testing.assert_close(model.w.hmp(v)[1], model.w.hmp(v[1]))
    with pytest.raises(ValueError, match=r"expects torch\.complex128"):
        model.w.hmp(v.real)


def test_a_rule_of_ones_own_leaves_complex_parameters_to_autograd() -> None:
    model, x, y = problem("operator")
    ref = Reference(of_real_parameters(model), (x,), lambda pred: F.cross_entropy(pred, y))
    with registered(Autodiff(Spectral, params=("weight",))):
        backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.DiagHessian())
    expected = torch.stack([ref.diag_h(part) for part in names_of_parts("spectral.weight")], -1)
    torch.testing.assert_close(model.get_parameter("spectral.weight").diag_h, expected)


def test_options_of_a_pass() -> None:
    model, x, y = problem("layers")
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    backward(bpk.extend(model), loss_fn, x, y, E.BatchGrad(), E.BatchDiagGGNExact())
    weight = model.get_parameter("first.weight")
    rows, diagonals = weight.grad_batch, weight.diag_ggn_exact_batch
    some = E.BatchGrad(subsampling=[2, 0]), E.BatchDiagGGNExact(subsampling=[2, 0])
    backward(model, loss_fn, x, y, *some, chunk_size=1)
    torch.testing.assert_close(weight.grad_batch, rows[[2, 0]])
    torch.testing.assert_close(weight.diag_ggn_exact_batch, diagonals[[2, 0]])
    clipped = 0.1 * float(rows.abs().square().sum((1, 2)).sqrt().max())
    backward(model, loss_fn, x, y, E.ClippedGrad(clipped, per="layer"), E.WeightedGrad([2.0, 0.0, 1.0]))
    torch.testing.assert_close(weight.weighted_grad, 2 * rows[0] + rows[2])
    assert weight.clipped_grad.is_complex()


def test_fields_are_differentiated() -> None:
    model, x, y = problem("layers")
    twin = of_real_parameters(model)
    found = []
    for net in (model, twin):
        params = list(net.parameters())
        net, loss_fn = bpk.extend(net), bpk.extend(nn.CrossEntropyLoss())
        with bpk.backpack(E.SumGradSquared(), E.DiagGGNExact()):
            loss_fn(net(x), y).backward(create_graph=True)
        total = sum((p.sum_grad_squared.sum() + p.diag_ggn_exact.sum() for p in params), torch.zeros(()))
        found.append(torch.autograd.grad(total, params))
    parts = [part for g in found[0] for part in in_parts(g).unbind(-1)]
    for left, right in zip(parts, found[1], strict=True):
        torch.testing.assert_close(left, right)


def test_from_batches_to_a_data_set(tmp_path: Path) -> None:
    model, x, y = problem("layers")
    quantities = E.Variance(), E.DiagHessian(), E.KFLR(), E.ClippedGrad(0.1)
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), [(x[:2], y[:2]), (x[2:], y[2:])], *quantities)
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.Variance(), E.DiagHessian())
    weight = model.get_parameter("first.weight")
    torch.testing.assert_close(found.field("variance")["first.weight"], weight.variance)
    torch.testing.assert_close(found.field("diag_h")["first.weight"], weight.diag_h)
    path = tmp_path / "found.safetensors"
    found.save(path)
    for field in ("grad", "variance", "clipped_grad"):
        assert torch.equal(type(found).load(path).field(field)["first.weight"], found.field(field)["first.weight"])


def flat(net: nn.Module) -> list[Tensor]:
    """All gradients, in the order of parameters: two of complex ones."""
    found: list[Tensor] = []
    for p in net.parameters():
        assert p.grad is not None
        found += in_parts(p.grad).unbind(-1) if p.is_complex() else [p.grad]
    return found


@pytest.mark.parametrize("kind", ["KFAC", "EKFAC", "DiagonalGGN"])
def test_preconditioners_divide_both_parts(kind: str) -> None:
    """Diagonals are those of two real parameters; blocks have the curvature between them, too."""
    model, x, y = problem("layers")
    nets = (model, of_real_parameters(model)) if kind == "DiagonalGGN" else (model, copy.deepcopy(model))
    steps = []
    for net in nets:
        net, loss_fn = bpk.extend(net), bpk.extend(nn.CrossEntropyLoss())
        torch.manual_seed(0)
        preconditioner = getattr(bpk.preconditioners, kind)(net, damping=0.1)
        for _ in range(2):
            net.zero_grad()
            with preconditioner:
                loss_fn(net(x), y).backward()
            preconditioner.step()
            preconditioner.load_state_dict(preconditioner.state_dict())
        steps.append(
            [part for p in net.parameters() for part in (in_parts(p.grad).unbind(-1) if p.is_complex() else (p.grad,))]
        )
    for left, right in zip(*steps, strict=True):
        torch.testing.assert_close(left, right)


def test_eigenpairs_have_complex_vectors() -> None:
    model, x, y = problem("layers")
    twin = of_real_parameters(model)
    found = []
    for net in (model, twin):
        net, loss_fn = bpk.extend(net), bpk.extend(nn.CrossEntropyLoss())
        found.append(bpk.eigenpairs(net, loss_fn(net(x), y), k=2))
    torch.testing.assert_close(found[0].values, found[1].values)
    vector = found[0].vectors["first.weight"]
    others = [found[1].vectors[part] for part in names_of_parts("first.weight")]
    torch.testing.assert_close(vector.abs().square(), others[0].square() + others[1].square())


def test_operators_refuse_them() -> None:
    model, x, y = problem("layers")
    with pytest.raises(ValueError, match="complex parameters"):
        bpk.operators.GGN(model, nn.CrossEntropyLoss(), [(x, y)])


class OfMatrix(nn.Module):
    """The spectrum of a layer's result, by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("fourier", torch.fft.fft(torch.eye(5, dtype=COMPLEX)))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.fourier, Tensor)
        return self.head((self.layer(x).to(COMPLEX) @ self.fourier).abs())


def test_the_modulus_of_complex_numbers_is_curved() -> None:
    """That of real ones is not: the second derivative of a spectrum had been left out, without a word."""
    model, x, y = OfMatrix(), rand(3, 4), torch.randint(3, (3,))
    for p in model.parameters():
        p.data = p.data.double()
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.DiagHessian())
    torch.testing.assert_close(model.layer.weight.diag_h, ref.diag_h("layer.weight"))
