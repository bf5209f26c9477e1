"""Complex numbers between real layers: parameters as parts of complex ones, spectral layers, complex predictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bpk
from bpk import extensions as E
from tests.helpers import SECOND_ORDER, backward
from tests.models.networks import OfParts
from tests.references.compare import ON_ANY_GRAPH, agrees, rand
from tests.references.reference import Reference


class Complex(nn.Module):
    """Real parameters as real and imaginary part of complex ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.re, self.im = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.layer, self.head, self.how = nn.Linear(4, 4), nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.how == "product":
            z = x * torch.complex(self.re, self.im)
            return self.head(z.real + z.imag.tanh())
        if self.how == "filter":
            return self.head(torch.fft.ifft(torch.fft.fft(x) * torch.complex(self.re, self.im)).real)
        if self.how == "modulus":
            return self.head(torch.complex(x * self.re, x + self.im).abs())
        if self.how == "spectrum":
            return self.head((self.re * torch.fft.fft(x)).abs() + self.im)
        if self.how == "modulus of a sum":
            return self.head((torch.fft.fft(x) + torch.fft.fft(x.tanh() * self.re)).abs() + self.im)
        if self.how == "modulus of a product":
            return self.head((torch.complex(self.re, self.im) * x).abs())
        if self.how == "at the end":
            z = self.head(x) * torch.polar(self.re[:3], self.im[:3])
            return z.real
        matrix = torch.complex(torch.outer(self.re, self.im), torch.outer(self.im, self.re))
        return self.head((x.to(matrix.dtype) @ matrix).imag)


@pytest.mark.parametrize("converter", [False, True], ids=["as it is", "converted"])
@pytest.mark.parametrize(
    "how",
    ["product", "filter", "modulus", "modulus of a sum", "spectrum", "modulus of a product", "at the end", "matrix"],
)
def test_agrees_with_autograd(how: str, converter: bool) -> None:
    model, x, y = Complex(how).double(), rand(3, 4), torch.randint(3, (3,))
    ref = Reference(model, (x,), lambda pred: nn.functional.cross_entropy(pred, y))
    net = bpk.extend(model, use_converter=converter)
    assert not converter or isinstance(net, torch.fx.GraphModule)
    backward(net, bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(net, ref, factors=False)


class ComplexLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, dtype=torch.complex128)
        self.last = nn.Linear(3, 3, dtype=torch.complex128)
        for layer in (self.first, self.last):
            for name in ("weight", "bias"):
                parametrize.register_parametrization(layer, name, OfParts())

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(torch.complex(x, x.sin()))
        return self.last(torch.complex(z.real.tanh(), z.imag.relu())).abs()


def test_layers_whose_complex_weights_are_made_of_real_parameters() -> None:
    model, x, y = ComplexLayers(), rand(3, 4), torch.randint(3, (3,))
    ref = Reference(model, (x,), lambda pred: nn.functional.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, factors=False)


@pytest.mark.parametrize("extension", SECOND_ORDER)
def test_complex_predictions_are_refused_at_second_order(extension: Any) -> None:
    layer, loss_fn = bpk.extend(nn.Linear(4, 3).double()), bpk.extend(nn.L1Loss())
    pred = layer(rand(3, 4))
    loss = loss_fn(torch.complex(pred, pred.sin()), torch.complex(rand(3, 3), rand(3, 3)))
    with bpk.backpack(E.BatchGrad()):
        loss.backward(retain_graph=True)
    torch.testing.assert_close(layer.weight.grad_batch.sum(0), layer.weight.grad)
    with pytest.raises(NotImplementedError, match="complex numbers"), bpk.backpack(extension()):
        loss.backward()


def test_moduli_of_zero_have_products() -> None:
    """Torch's second derivative there is right, and its derivative was NaN, and so were products with the Hessian."""
    model, x, y = Complex("modulus of a product").double(), rand(3, 4), torch.randint(3, (3,))
    assert isinstance(model.layer, nn.Linear)
    model.layer.weight.data[1], model.layer.bias.data[1] = 0.0, 0.0
    ref = Reference(model, (x,), lambda pred: nn.functional.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, E.HMP(), E.DiagHessian())
    for name in ("re", "im"):
        p = model.get_parameter(name)
        torch.testing.assert_close(p.hmp(torch.eye(4, dtype=p.dtype)), ref.hessian(name))
        torch.testing.assert_close(p.diag_h, ref.diag_h(name))


class Pairs(nn.Module):
    """Complex numbers as pairs of real ones, as state space models have them, beside an odd number of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.pairs = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 2))
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).mul(self.steps.exp()).sigmoid()
        return self.head((x * torch.view_as_complex(self.pairs).exp()).abs())


def test_pairs_of_numbers_begin_at_even_places() -> None:
    """Torch refuses to look at others as complex ones: also in columns of the second derivative of several tensors."""
    model, x, y = Pairs().double(), rand(3, 4), torch.randint(3, (3,))
    bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.PCHMP(), E.DiagHessian(), raise_on_error=True)
