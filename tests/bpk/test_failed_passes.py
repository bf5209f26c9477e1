"""Passes that fail half-way, and objectives that nobody sees."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.recording.context.state import CTX
from bpk.recording.record import LIVE, Record
from tests.bpk.test_errors import ids, refuses, works_afterwards
from tests.helpers import FIELDS, backward, data, extended, saved


# ---- exceptions in the middle of backward ------------------------------------------------------------
@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_exception_in_the_hook_leaves_nothing(extension: type) -> None:
    model, loss_fn = extended()
    x, y = data()

    def fail(module: nn.Module) -> None:
        if module is model[1]:
            raise KeyError("from the hook")

    with refuses(model, KeyError, "from the hook"):
        backward(model, loss_fn, x, y, extension(), extension_hook=fail)
    works_afterwards(model, loss_fn)


def test_exception_in_the_hook_keeps_the_fields_of_earlier_passes() -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, E.DiagGGNExact())
    before = model[2].weight.diag_ggn_exact.clone()

    def fail(module: nn.Module) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        backward(model, loss_fn, x, y, E.BatchGrad(), extension_hook=fail)
    assert torch.equal(model[2].weight.diag_ggn_exact, before)
    assert not hasattr(model[2].weight, "grad_batch")


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact, E.HMP])
def test_a_pass_that_fails_at_once_leaves_no_field_of_an_earlier_one(extension: Callable[[], Any]) -> None:
    """They had stayed, as if they were its own, where it had come to no parameter."""
    model, loss_fn = extended()
    x, y = data()

    def fail(module: nn.Module) -> None:
        raise KeyError

    backward(model, loss_fn, x, y, extension())
    with pytest.raises(KeyError):
        backward(model, loss_fn, x, y, extension(), extension_hook=fail)
    assert not saved(model)


def test_a_pass_that_is_refused_leaves_no_field_of_an_earlier_one() -> None:
    """They had stayed where the loss was the reason, which is known before the calls behind it are looked at."""

    class NotConvex(nn.Module):
        def forward(self, pred: Tensor, y: Tensor) -> Tensor:
            return (pred * y).sin().sum(1).mean()

    model, loss_fn = extended(loss=NotConvex())
    x = data()[0]
    y = torch.randn(5, 3)
    backward(model, loss_fn, x, y, E.DiagHessian(), E.BatchGrad())
    with pytest.raises(UnsupportedLayer, match="not convex"):
        backward(model, loss_fn, x, y, E.DiagHessian(), E.DiagGGNExact())
    assert saved(model) == {"grad_batch"}
    backward(model, loss_fn, x, y, E.DiagHessian())
    assert saved(model) == {"grad_batch", "diag_h"}


class Steps(nn.Module):
    """The graph alone leaves it open whether steps are samples: as many are as the model was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.interrupted = nn.Linear(2, 3), True

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupted:
            raise KeyboardInterrupt
        return torch.stack([self.layer(step) for step in x.unbind(1)], 1).flatten(0, 1)


def test_an_interrupted_forward_pass_leaves_nothing() -> None:
    model, loss_fn = bpk.extend(Steps()), bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(KeyboardInterrupt), bpk.backpack(E.BatchGrad()):
        model(torch.randn(3, 4, 2))
    assert CTX.called is CTX.given.data is None
    model.interrupted = False
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(torch.randn(5, 4, 2)), torch.randint(3, (20,))).backward()
    assert model.layer.weight.grad_batch.shape == (5, 3, 2)


def test_messages_are_laid_out() -> None:
    """What, why, what to do: each on its own line."""
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    x, y = data()
    with pytest.raises(UnsupportedLayer) as caught:
        backward(model, loss_fn, x, y, E.BatchDiagGGNExact())
    first, *rest = str(caught.value).splitlines()
    assert first.endswith(".") and "BatchDiagGGNExact" in first
    assert any(line.startswith("  Why: ") for line in rest)
    assert any(line.startswith("  Do:  ") for line in rest)


def test_quantised_and_lazy_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantisation moves to another package
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with pytest.raises(ValueError, match="quantised"):
        bpk.extend(quantised)
    with pytest.raises(ValueError, match="not initialised yet"):
        bpk.extend(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    layer = bpk.extend(nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
        out = layer(x)
        flat = out.values() if layout is torch.jagged else torch.nested.to_padded_tensor(out, 0.0)
    with pytest.raises(UnsupportedLayer, match="nested tensor"), bpk.backpack(E.BatchGrad()):
        flat.sum().backward()


def test_two_extensions_with_one_field_are_refused() -> None:
    with pytest.raises(ValueError, match="both save 'grad_batch'"):
        bpk.backpack(E.BatchGrad(), E.BatchGrad(subsampling=[0]))


@pytest.mark.parametrize("extension", [E.HMP, E.GGNMP, E.PCHMP], ids=ids)
def test_products_take_one_vector_or_several(extension: type) -> None:
    torch.manual_seed(0)
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)).double())
    model[0].scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    loss_fn = bpk.extend(nn.MSELoss())
    x, _ = data()
    with bpk.backpack(extension()):
        loss_fn(model(x) * model[0].scale, torch.randn(5, 3, dtype=torch.float64)).backward()
    name = extension().savefield
    for p in model.parameters():  # among them [4] and [4, 4], whose first axis might be taken for that of vectors
        product, vectors = getattr(p, name), torch.randn(4, *p.shape, dtype=torch.float64)
        found = product(vectors)
        assert found.shape == vectors.shape and bool(found.any())
        for v, expected in zip(vectors, found, strict=True):
            assert product(v).shape == p.shape
            torch.testing.assert_close(product(v), expected)
        for bad in ((2, 2, *p.shape), (*p.shape, 2, 2), (1, *p.shape, 1)):
            with pytest.raises(ValueError, match=r"(?s)expects shape.*\[V, .*Why:.*Do:"):
                product(torch.zeros(bad, dtype=torch.float64))


def test_product_with_vectors_of_another_precision_is_refused() -> None:
    model, loss_fn = extended(nn.Linear(2, 3), nn.CrossEntropyLoss())
    with bpk.backpack(E.HMP()):
        loss_fn(model(torch.randn(4, 2)), torch.tensor([0, 1, 2, 0])).backward()
    with pytest.raises(ValueError, match="float64"):
        model.weight.hmp(torch.zeros(1, 3, 2, dtype=torch.float64))


@pytest.mark.parametrize("extension", [E.BatchDiagGGNExact, E.BatchDiagHessian, E.KFAC, E.KFRA], ids=ids)
def test_a_refused_pass_is_freed(extension: type) -> None:
    """The graph owns what was recorded: with the graph, everything goes."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h - h.mean(0))  # samples mix

    def refused() -> None:
        model, loss_fn = bpk.extend(Centred()), bpk.extend(nn.MSELoss())
        with pytest.raises(UnsupportedLayer), bpk.backpack(extension()):
            loss_fn(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()

    def alive() -> int:
        gc.collect()
        return sum(isinstance(o, Record) for o in gc.get_objects())

    before, uses = alive(), len(LIVE)
    refused()
    assert (alive(), len(LIVE)) == (before, uses)


# ---- objectives that nobody sees ---------------------------------------------------------------------
def test_gradients_in_the_objective() -> None:
    """A penalty on input gradients: with an extended loss it is right, without one it is refused."""
    torch.manual_seed(0)
    x = torch.randn(4, 3).double().requires_grad_()

    def slopes(model: nn.Module) -> Tensor:
        return torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)[0]

    model, loss_fn = bpk.extend(nn.Linear(3, 1).double()), bpk.extend(nn.MSELoss())
    g = slopes(model)
    with warnings.catch_warnings(), bpk.backpack(E.BatchGrad()):
        warnings.filterwarnings("error", "(?s)A gradient through")
        loss_fn(g, torch.zeros_like(g)).backward()
    torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)
    model = bpk.extend(nn.Linear(3, 1).double())
    g = slopes(model)
    with refuses(model, UnsupportedLayer, "penalty", "input gradient", "Do:"), bpk.backpack(E.BatchGrad()):
        g.square().sum().backward()


OF_SAMPLES = [E.BatchGrad, E.BatchL2Grad, E.Variance, E.SumGradSquared, E.SqrtGGNExact]
OF_SAMPLES += [E.BatchDiagGGNExact, E.BatchDiagGGNMC, E.BatchDiagHessian, E.TokenGrad]


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("extension", [*OF_SAMPLES, E.KFAC], ids=ids)
def test_batches_of_two_sizes(extension: type, shift: bool, sizes: tuple[int, int]) -> None:
    """Also where one has a single sample, which torch would repeat for the other's."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(3, 1), nn.Parameter(torch.randn(3), requires_grad=shift)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.shift)

    model, loss_fn = bpk.extend(Shifted()), bpk.extend(nn.MSELoss())
    met = f"batches of {min(sizes)} and {max(sizes)} samples"
    with refuses(model, UnsupportedLayer, met, "Why:", "Do:"), bpk.backpack(extension()):
        sum(loss_fn(model(torch.randn(n, 3)), torch.ones(n, 1)) for n in sizes).backward()
