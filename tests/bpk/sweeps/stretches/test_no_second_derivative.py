"""Functions that torch differentiates once only, or wrongly twice: refused where a second derivative is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import backward, data, extended, told

pytestmark = pytest.mark.filterwarnings("ignore:These go")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("extension", [E.DiagHessian, E.BatchDiagHessian, E.HMP, E.GGNMP, E.PCHMP])
def test_a_gradient_that_torch_takes_for_constant(extension: type[Any]) -> None:
    """The second derivative of what is put into a sparse tensor is missing in torch, which does not say so."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values, self.last = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            places = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
            weight = torch.eye(4).to(x) + torch.sparse_coo_tensor(places, self.values * 1.0, (4, 4))
            return self.last(F.linear(x, weight).tanh())

    model, loss_fn = extended(Sparse().double())
    x, y = data()
    with told(UnsupportedLayer, "sparse_coo_tensor", "index_put"), bpk.backpack(extension()):
        loss_fn(model(x), y).backward()
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(x), y).backward()


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has no such function")
@pytest.mark.parametrize("extension", [E.DiagHessian, E.HMP])
def test_cross_entropy_in_chunks(extension: type[Any]) -> None:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            options, h = nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=2), self.first(x)
            found = F.linear_cross_entropy(h, self.first.weight.sin(), torch.zeros(len(x), dtype=int), options=options)
            return self.last(found + h[:, :1])

    model, loss_fn = extended(Chunked().double())
    x, y = data()
    with told(UnsupportedLayer, "linear_cross_entropy in chunks"), bpk.backpack(extension()):
        loss_fn(model(x), y).backward()
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(x), y).backward()


@pytest.mark.parametrize("extension", [E.DiagHessian, E.BatchDiagHessian, E.HMP])
def test_rows_of_a_sample_behind_a_function_without_second_derivative(extension: type[Any]) -> None:
    """It is looked at whether it couples rows, before its second derivative is asked for."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner, self.last = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.last(F.hardsigmoid(self.inner(self.words(tokens).flatten(0, 1))))

    model, loss_fn = extended(Tagger().double())
    x, y = torch.randint(7, (3, 5)), torch.arange(15) % 3
    with told(UnsupportedLayer, "cannot be differentiated twice"), bpk.backpack(extension()):
        loss_fn(model(x), y).backward()


def test_products_behind_logcumsumexp() -> None:
    """Torch's derivatives of its gradient are NaN where that is zero, and further ones everywhere."""

    class Running(nn.Module):
        def __init__(self, written_out: bool) -> None:
            super().__init__()
            self.first, self.last, self.written_out = nn.Linear(4, 4), nn.Linear(4, 3), written_out

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            m = x.amax(1, keepdim=True)
            return self.last(m + (x - m).exp().cumsum(1).log() if self.written_out else x.logcumsumexp(1))

    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for quantity in (E.HMP(), E.GGNMP(), E.PCHMP()):
        with pytest.raises(NotImplementedError, match=r"(?s)before 'last'.*logcumsumexp are NaN"):
            backward(bpk.extend(Running(False)), loss_fn, x, y, quantity)
    assert bpk.verify(Running(False), loss_fn, x, y, E.DiagHessian(), E.DiagGGNExact(), E.EKFLR())
    assert bpk.verify(Running(True), loss_fn, x, y, E.HMP(), E.GGNMP())


def test_functions_that_autograd_differentiates_once() -> None:
    class Segments(nn.Module):
        """The mean of every two features, by a function without a second derivative in any version of torch so far."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((2 * len(x),), 2)
            return self.last(torch.segment_reduce(self.first(x).flatten(), "mean", lengths=lengths).view(-1, 2))

    model, loss_fn = bpk.extend(Segments()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(NotImplementedError, match=r"(?s)before 'last'.*cannot be differentiated twice"):
        backward(model, loss_fn, x, y, E.DiagHessian())
    assert bpk.verify(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact())


class Between(nn.Module):
    """Two linear layers, and a function of a user's between them."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.first(x)))


def test_functions_marked_as_differentiable_once() -> None:
    """Autograd gives their gradient without a graph, as that of a linear function: not to be mistaken for one."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * grad

    model, loss_fn = bpk.extend(Between(Square)), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(NotImplementedError, match=r"(?s)before 'last'.*marked with once_differentiable"):
        backward(model, loss_fn, x, y, E.DiagHessian())
    assert bpk.verify(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact())


def test_functions_whose_gradients_are_overwritten() -> None:
    """A gradient that works in place is right, and cannot be differentiated; torch says so while it is."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            twice = 2 * grad
            found = twice * ctx.saved_tensors[0]
            twice.zero_()
            return found

    model, loss_fn = bpk.extend(Between(Square)), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(NotImplementedError, match=r"(?s)before 'last'.*modified by an inplace operation"):
        backward(model, loss_fn, x, y, E.DiagHessian())
    with pytest.raises(NotImplementedError, match="modified by an inplace operation"):
        backward(model, loss_fn, x, y, E.HMP())
        model.first.weight.hmp(model.first.weight)
    assert bpk.verify(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact())


def test_a_product_that_torch_cannot_differentiate_once_more() -> None:
    """The Hessian is there, but not as a function that outlives the pass."""

    class Upsampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.kernel = nn.Linear(4, 3), nn.Parameter(torch.randn(2, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            made = F.conv_transpose1d(self.kernel, self.kernel.sin(), stride=2, output_padding=1)
            return self.first(x) * made.flatten()[:3]

    model, loss_fn = extended(Upsampled().double())
    x, y = data()
    with bpk.backpack(E.DiagHessian(), E.HMP()):
        loss_fn(model(x), y).backward()
    with pytest.raises(UnsupportedLayer, match="output_padding"):
        model.kernel.hmp(torch.ones_like(model.kernel))
