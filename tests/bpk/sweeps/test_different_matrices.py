"""A parameter of which its uses make different matrices has no Kronecker factors, but its whole block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.extensions.secondorder.batch_kfac import BatchKFLR
from bpk.jacobians import UnsupportedLayer
from bpk.verification import Verdict
from tests.references.compare import rand

N = 3


class Autoencoder(nn.Module):
    """A convolution and a transposed one with the same kernel: the one's outputs are the other's inputs."""

    def __init__(self, inputs: int, outputs: int, branches: bool = False) -> None:
        super().__init__()
        self.encode = nn.Conv1d(inputs, outputs, 2, bias=False)
        self.decode = nn.ConvTranspose1d(outputs, inputs, 2, bias=False)
        self.decode.weight = self.encode.weight
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches:
            return self.encode(x).sum(-1) + self.decode(x).sum(-1)
        return self.decode(self.encode(x).tanh())


class Function(nn.Module):
    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(rand(*shape)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def reshaped(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.view(2, 12).T).sum(1, keepdim=True) + torch.tanh(x[:, :4] @ w.view(6, 4).T)


def reshaped_and_transposed(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.view(2, 12).T).sum(1, keepdim=True) + torch.tanh(x[:, :6] @ w.view(6, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "as many inputs as outputs": (lambda: Autoencoder(2, 2), (N, 2, 4)),
    "more outputs": (lambda: Autoencoder(1, 2), (N, 1, 4)),
    "in two branches": (lambda: Autoencoder(2, 2, branches=True), (N, 2, 4)),
    "by a function": (
        lambda: Function((2, 2, 1), lambda x, w: F.linear(F.conv_transpose1d(x, w).sum(-1).tanh(), w[..., 0])),
        (N, 2, 4),
    ),
    "reshaped": (lambda: Function((2, 3, 4), reshaped), (N, 12)),
    "reshaped and transposed": (lambda: Function((2, 3, 4), reshaped_and_transposed), (N, 12)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_whole_block(kind: str) -> None:
    """Factors of one use are none of the other, also where they have the same sizes."""
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model, x = make().double(), rand(*shape)
    y = torch.randn_like(model(x))
    quantities = [E.KFLR(), E.KFAC(), E.EKFLR(), BatchKFLR()]
    found = bpk.verify(model, nn.MSELoss(), x, y, *quantities, raise_on_error=True)
    assert not [row for row in found.rows if row.verdict is not Verdict.OK], found
    model, loss_fn = bpk.extend(model), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.KFLR(), E.GGNMP()):
        loss_fn(model(x), y).backward()
    (weight,) = model.parameters()
    fields, unit = bpk.fields_of(weight), torch.eye(weight.numel(), dtype=weight.dtype)
    (block,) = fields.kflr
    torch.testing.assert_close(block, fields.ggnmp(unit.view(-1, *weight.shape)).flatten(1))


@pytest.mark.parametrize("kind", MODELS)
def test_averages_are_refused(kind: str) -> None:
    make, shape = MODELS[kind]
    model, x = bpk.extend(make().double()), rand(*shape)
    loss_fn = bpk.extend(nn.MSELoss())
    with pytest.raises(UnsupportedLayer, match="KFRA cannot be computed for a parameter"), bpk.backpack(E.KFRA()):
        loss_fn(out := model(x), torch.randn_like(out)).backward()
