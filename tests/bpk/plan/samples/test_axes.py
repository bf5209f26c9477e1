"""Which axis is that of samples, where shapes do not tell: another one is as long.

`python -m tests.random_networks.axes --count 400 --seed 0` looks at more models, `...named_axes` at more programs, and
`...passes` at more passes over one graph, and `...calls` at more models that are called several times.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchGrad
from tests.random_networks import axes, calls, named_axes, passes

SEQUENCES = (6, 9, 10, 11, 27, 37, 61, 64, 75, 78, 84, 92, *range(100, 116))
"""The first dozen were wrong, or refused, before a call's layout in the data was looked at."""

PROGRAMS = (*range(40), 151000629, 9149)
"""The last but one was wrong: an axis behind is as long as the first two together. Of the last one, samples in front
agree but for a table, and samples last agree."""


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("seed", SEQUENCES)
def test_sequences_as_long_as_the_batch(seed: int) -> None:
    assert not axes.wrong(seed), axes.draw(seed)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("seed", PROGRAMS)
def test_programs_over_named_axes(seed: int) -> None:
    assert not named_axes.wrong(seed), named_axes.draw(seed)


@pytest.mark.parametrize("seed", [1, 9, 31, 47, 64, 74, 77, 145])
def test_several_passes_and_losses(seed: int) -> None:
    assert not passes.wrong(seed), passes.draw(seed)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("seed", [43, 151, 165, 195])
def test_several_calls_behind_a_loss_that_is_not_extended(seed: int) -> None:
    """All were wrong while what functions do with parameters was looked at in front of the first call only."""
    assert not calls.wrong(seed), calls.draw(seed)


class Flow(nn.Module):
    """Is given the time before its data `[N, T, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.time, self.last = nn.Linear(3, 4), nn.Linear(1, 4), nn.Linear(4, 2)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(self.features(x.transpose(0, 1)) + self.time(t.reshape(1, 1)))
        y: Tensor = self.last(h)
        return y.reshape(-1, 2)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("shape", [(), (1,)], ids=["without axes", "one axis"])
def test_a_number_before_the_data_has_no_samples(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    n, steps = 3, 6
    model, loss_fn = bpk.extend(Flow().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y, t = torch.randn(n, steps, 3).double(), torch.randint(2, (n * steps,)), torch.rand(shape).double()
    losses = nn.functional.cross_entropy(model(t, x), y, reduction="none").reshape(steps, n).sum(0) / len(y)
    params = list(model.parameters())
    expected = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    with bpk.backpack(BatchGrad()):
        loss_fn(model(t, x), y).backward()
    for k, p in enumerate(params):
        torch.testing.assert_close(p.grad_batch, torch.stack([each[k] for each in expected]))
