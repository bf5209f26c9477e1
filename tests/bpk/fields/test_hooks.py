"""The user's extension hook, and fields of an earlier pass, where no layer of a model is seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bpk
from bpk import extensions as E
from tests.helpers import backward
from tests.models.networks import OfParts


class Complex(nn.Module):
    """Layers that are left to autograd, whose parameters are those of parametrisations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(3, 3, dtype=torch.complex64) for _ in range(2))
        for layer in (self.first, self.last):
            for name in ("weight", "bias"):
                parametrize.register_parametrization(layer, name, OfParts())

    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        z = self.first(torch.complex(x, x.sin()))
        return (self.last(z) if deep else z).abs()


def test_all_fields_are_shown_to_the_hook() -> None:
    model, loss_fn = bpk.extend(Complex()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    backward(model, loss_fn, x, y, E.BatchL2Grad())
    expected = torch.stack([p.batch_l2 for p in model.parameters()]).sum(0)
    total = bpk.Summed("batch_l2")
    backward(model, loss_fn, x, y, E.BatchL2Grad(), extension_hook=total)
    torch.testing.assert_close(total["batch_l2"], expected)
    assert not any(hasattr(p, "batch_l2") for p in model.parameters())


def test_fields_of_an_earlier_pass_go() -> None:
    model, loss_fn = bpk.extend(Complex()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    backward(model, loss_fn, x, y, E.BatchGrad())
    assert all(hasattr(p, "grad_batch") for p in model.parameters())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x, deep=False), y).backward()
    assert all(hasattr(p, "grad_batch") for p in model.first.parameters())
    assert not any(hasattr(p, "grad_batch") for p in model.last.parameters())
