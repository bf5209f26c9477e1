"""Layers without features: fields of the others are right, and theirs are empty."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.nested import tensors_in
from tests.helpers import backward, extended
from tests.references.compare import Assembled, check, rand


def direct() -> nn.Module:
    """Parameters without entries that a function uses."""

    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.last((x @ m.first.weight.T).tanh() + m.first.bias)

    return Assembled(forward, first=nn.Linear(3, 0), last=nn.Linear(0, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "no inputs": (lambda: nn.Sequential(nn.Linear(0, 3), nn.Tanh(), nn.Linear(3, 3)), rand(4, 0)),
    "nothing hidden": (lambda: nn.Sequential(nn.Linear(3, 0), nn.Tanh(), nn.Linear(0, 3)), rand(4, 3)),
    "normalised": (
        lambda: nn.Sequential(nn.Linear(3, 0), nn.LayerNorm(0), nn.Tanh(), nn.Linear(0, 3)),
        rand(4, 3),
    ),
    "no positions": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(0, 3)),
        rand(4, 0, 3),
    ),
    "looked up": (
        lambda: nn.Sequential(nn.Embedding(5, 0), nn.Tanh(), nn.Linear(0, 3)),
        torch.tensor([0, 4, 2, 2]),
    ),
    "functions": (direct, rand(4, 3)),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*generic way", "ignore:Initializing zero-element")


@pytest.mark.parametrize("name", NETWORKS)
def test_every_quantity(name: str) -> None:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    check(make(), x, factors=False)
    model, loss_fn = extended(make().double())
    for extension in every_extension():
        backward(model, loss_fn, x, torch.tensor([0, 1, 2, 0]), extension)
        found = [x for p in model.parameters() for x in tensors_in(vars(p)[extension.savefield])]
        assert all(x.to_dense().isfinite().all() for x in found)


def test_a_convolution_without_channels_is_refused() -> None:
    """Torch's own output of it has no channels either, whatever the weight says."""
    model, loss_fn = extended(nn.Sequential(nn.Conv2d(0, 2, 3), nn.Flatten(), nn.Linear(0, 3)))
    with (
        pytest.raises(NotImplementedError, match=r"(?s)Conv2d.*no channels.*leave the layer out"),
        bpk.backpack(bpk.extensions.BatchGrad()),
    ):
        loss_fn(model(torch.zeros(4, 0, 4, 4)), torch.tensor([0, 1, 2, 0])).backward()
