"""Random networks against plain autograd, and the smallest networks on which such a search once found something wrong.

`python -m tests.random_networks --count 1000 --seed 0` examines more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.rules import REGISTRY
from tests.random_networks.features import STRUCTURE, features_of
from tests.random_networks.networks import run
from tests.random_networks.problem import build, draw
from tests.random_networks.program import Unfit
from tests.references.compare import Assembled, agrees, check, rand
from tests.references.reference import Reference

# fmt: off
SEEDS = (14, 16, 27, 28, 39, 92, 108, 145, 156, 173, 185, 193, 200, 208, 226, 227, 263, 273, 303,
         322, 341, 379, 383, 391, 401, 420, 421, 434, 449, 482, 493, 505, 508,
         540, 553, 562, 587, 826, 847, 1175, 1191,
         21000042)
# fmt: on
"""Networks that together have every structural feature and most layers (`python -m tests.random_networks.features`)."""


@pytest.mark.parametrize("seed", SEEDS)
def test_random_network(seed: int) -> None:
    found = run(draw(seed))
    if found is None:
        pytest.skip("no network: nothing is trained, or the reference is not finite")
    problem, outcome = found
    assert not outcome.failures, f"{problem}\n{outcome.failures[0]}"
    for text in outcome.refused:
        assert "Why:" in text and "Do:" in text, text


def test_networks_have_every_feature() -> None:
    """If not, because moves or examples were added, `python -m tests.random_networks.features` finds other seeds."""
    features = features_of(SEEDS)
    found = frozenset().union(*features.values())
    assert not STRUCTURE - found
    names = {f"nn.{cls.__name__}" for rule in REGISTRY for cls in rule.modules if cls.__module__.startswith("torch.nn")}
    assert len(names & found) > 0.75 * len(names)


def test_networks_are_reproducible() -> None:
    def sources() -> list[str]:
        found = []
        for seed in range(10):
            try:
                found.append(str(build(draw(seed))))
            except Unfit:
                found.append("")
        return found

    assert sources() == sources()


# ---- what it has found -------------------------------------------------------------------------------
class Direct(Assembled):
    """Layers, a parameter, and a function of both."""

    def __init__(self, forward: Any, size: tuple[int, ...], **layers: nn.Module) -> None:
        super().__init__(forward, **layers)
        self.w = nn.Parameter(torch.randn(size))


def check_converted(model: nn.Module, x: Tensor) -> None:
    """Every quantity of a converted model whose parameters keep their names."""
    torch.manual_seed(0)
    model, loss_fn = model.double(), nn.MSELoss()
    target = torch.randn_like(model(x.clone()))
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, target))
    converted, loss_fn = bpk.extend(model, use_converter=True), bpk.extend(loss_fn)
    exts = (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.Variance, E.DiagGGNExact, E.BatchDiagGGNExact)
    more = (E.DiagHessian, E.BatchDiagHessian, E.SqrtGGNExact, E.HMP, E.GGNMP, E.DiagGGNMC, E.SqrtGGNMC)
    with bpk.backpack(*[e() for e in (*exts, *more)]):
        loss_fn(converted(x.clone()), target).backward()
    agrees(model, ref, factors=False)


@pytest.mark.parametrize("pick", [0, 1, -1])
def test_one_piece_of_several(pick: int) -> None:
    """A layer with several results only one of which is used."""

    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.first(x).tanh().unbind(2)[pick]

    check_converted(Assembled(forward, first=nn.Linear(3, 2)), rand(3, 2, 3))


def test_pieces_where_the_batch_axis_is_moved() -> None:
    def forward(m: Assembled, x: Tensor) -> Tensor:
        left, right = m.first(x.transpose(0, 1)).chunk(2, 2)
        return (m.second(left) * right.sin()).transpose(0, 1)

    check_converted(Assembled(forward, first=nn.Linear(3, 4), second=nn.Linear(2, 2)), rand(3, 2, 3))


@pytest.mark.parametrize("other", ["the same", "rolled"])
def test_both_inputs_from_one_parameter(other: str) -> None:
    """An input of a layer that is computed from its other input."""

    def forward(m: Direct, x: Tensor) -> Tensor:
        z = x @ m.w
        return m.layer(z, z if other == "the same" else z.roll(1, -1))

    check(Direct(forward, (2, 3), layer=nn.Bilinear(3, 3, 3)), rand(3, 2), factors=False)


def test_a_scalar_parameter_in_a_function_module() -> None:
    check_converted(Direct(lambda m, x: m.layer(torch.tanh(x * m.w)), (), layer=nn.Linear(2, 2)), rand(3, 2))


class Biased(nn.Module):
    """A container with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = nn.Linear(2, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.bias


def test_the_output_of_a_container_is_changed_in_place() -> None:
    check(Assembled(lambda m, x: m.last(m.block(x).mul_(0.7)), block=Biased(), last=nn.Linear(4, 3)), rand(3, 2))


def positions_and_flat_rows(m: Assembled, x: Tensor) -> Tensor:
    return m.last(m.token(x) + m.position(torch.arange(4))).mean(1)


@pytest.mark.parametrize("n", [2, 4])
def test_positions_that_dominate(n: int) -> None:
    """As many positions as samples, and one sample whose gradients are a hundred times those of the others."""
    torch.manual_seed(0)
    layers = {"token": nn.Embedding(5, 4), "position": nn.Embedding(4, 4), "last": nn.Linear(4, 3)}

    def forward(m: Assembled, x: Tensor) -> Tensor:
        scale = torch.full((len(x), 1), 0.01, dtype=torch.float64)
        scale[0] = 1
        return positions_and_flat_rows(m, x) * scale

    check(Assembled(forward, **layers), torch.randint(5, (n, 4)), factors=False)


def test_positions_and_a_loss_on_flat_rows() -> None:
    """As many positions as would be a number of samples: the embedding of positions has no batch axis."""
    torch.manual_seed(0)
    layers = {"token": nn.Embedding(5, 4), "position": nn.Embedding(4, 4), "last": nn.Linear(4, 3)}

    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.last(m.token(x) + m.position(torch.arange(4))).flatten(0, 1)

    model = Assembled(forward, **layers).double()
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randint(5, (2, 4)), torch.randint(3, (8,))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    for p in model.parameters():
        rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[4 * n : 4 * n + 4]), p)[0] / 2 for n in range(2)]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


def merge(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def split(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, 2))


STRETCHES: dict[str, Callable[[Assembled, Tensor], Tensor]] = {
    "mixes the rows of a sample": lambda m, x: split(m.last(merge(split(m.first(merge(x))).softmax(1)))),
    "from rows to samples": lambda m, x: m.last(split(m.first(merge(x))).softmax(1)),
    "from samples to rows": lambda m, x: split(m.last(merge(m.first(x).softmax(1)))),
    "time first": lambda m, x: split(m.last(merge(m.first(x.transpose(0, 1)).softmax(0).transpose(0, 1)))),
    "from both": lambda m, x: split(m.last(merge(m.first(x).sin()) * m.first(merge(x)))),
}


@pytest.mark.parametrize("name", STRETCHES)
def test_nonlinear_function_between_merged_rows(name: str) -> None:
    torch.manual_seed(0)
    model = Assembled(lambda m, x: STRETCHES[name](m, x).flatten(1), first=nn.Linear(3, 2), last=nn.Linear(2, 2))
    check(model, rand(3, 2, 3), nn.MSELoss(), rand(3, 4), factors=False)


def windows_attend(m: Assembled, x: Tensor) -> Tensor:
    z = m.first(merge(x))
    return m.last(split(m.layer(z, z, z)[0].flatten(1)).flatten(1))


def windows_recur(m: Assembled, x: Tensor) -> Tensor:
    return m.last(split(m.layer(m.first(merge(x)))[1].transpose(0, 1).flatten(1)).flatten(1))


@pytest.mark.parametrize("forward", [windows_attend, windows_recur])
def test_layers_that_know_their_batch_axis_on_merged_rows(forward: Callable[[Assembled, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    attends = forward is windows_attend
    layer = nn.MultiheadAttention(4, 2, batch_first=True) if attends else nn.GRU(4, 2, batch_first=True)
    last = nn.Linear(24 if attends else 4, 3)
    check(Assembled(forward, first=nn.Linear(3, 4), layer=layer, last=last), rand(2, 2, 3, 3), factors=False)


def test_merged_rows_in_modules_first_order() -> None:
    """Reshaping that the converter has made a module, and quantities of first order only."""
    model = Direct(lambda m, x: split(m.last(split(merge(x) + m.w)).reshape(-1, 3)), (4,), last=nn.Linear(4, 3))
    for p in model.last.parameters():
        p.requires_grad_(False)
    model, x = model.double(), rand(3, 2, 4)
    converted, loss_fn = bpk.extend(model, use_converter=True), bpk.extend(nn.MSELoss(reduction="sum"))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(converted(x), torch.zeros(3, 2, 3, dtype=torch.float64)).backward()
    rows = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), model.w)[0] for n in range(3)]
    torch.testing.assert_close(model.w.grad_batch, torch.stack(rows))


def test_states_in_a_nested_tuple() -> None:
    """`h, c = states` in a converted model whose batch axis has to be looked for."""

    def forward(m: Assembled, x: Tensor) -> Tensor:
        y, states = m.layer(x)
        h, c = states
        return torch.cat([y.mean(1), h.transpose(0, 1).flatten(1), c.transpose(0, 1).flatten(1)], 1)

    check_converted(Assembled(forward, layer=nn.LSTM(3, 2, batch_first=True)), rand(3, 2, 3))


def test_columns_with_odd_strides() -> None:
    """Columns whose axes with one entry have strides of their own, at a function that overwrites them."""

    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.last(m.act(m.first(x).reshape(-1, 1, 2)).permute(0, 2, 1).flatten(1))

    model = Assembled(forward, first=nn.Linear(3, 2), act=nn.Hardswish(), last=nn.Linear(2, 3))
    check(model, rand(3, 3), factors=False)


@pytest.mark.parametrize("steps", [2, 3])
def test_prelu_where_the_batch_axis_is_moved(steps: int) -> None:
    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.last(m.act(x.transpose(0, 1)).transpose(0, 1).flatten(1))

    check(Assembled(forward, act=nn.PReLU(), last=nn.Linear(2 * steps, 3)), rand(3, steps, 2), factors=False)


def test_power_pooling_of_zeros() -> None:
    """Backwards, autograd takes the derivative at the kink for zero; products with the GGN do, too."""
    torch.manual_seed(0)
    layers = nn.Embedding(5, 2, padding_idx=1), nn.LPPool1d(2, 2), nn.Flatten(), nn.Linear(3, 3)
    model, loss_fn = bpk.extend(nn.Sequential(*layers).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.tensor([[0, 1, 2], [1, 3, 4], [2, 2, 1]]), torch.arange(3)
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    with bpk.backpack(E.GGNMP()):
        loss_fn(model(x), y).backward()
    for name, p in model.named_parameters():
        v = torch.randn(2, *p.shape, dtype=torch.float64)
        torch.testing.assert_close(p.ggnmp(v).flatten(1), v.flatten(1) @ ref.ggn(name))


def test_converted_in_place_operation_behind_an_identity() -> None:
    """`nn.Identity` hands its input on, which is overwritten then."""

    def forward(m: Assembled, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.same(h).mul_(0.7) * h.sigmoid()

    model = Assembled(forward, first=nn.Linear(2, 3), same=nn.Identity()).double()
    x = rand(3, 2)
    torch.testing.assert_close(bpk.extend(model, use_converter=True)(x), model(x))


@pytest.mark.parametrize("layer", [nn.Conv1d(3, 3, 1), nn.ConvTranspose1d(3, 3, 1)], ids=lambda m: type(m).__name__)
def test_convolution_of_a_single_sample_is_refused(layer: nn.Module) -> None:
    model, loss_fn = bpk.extend(nn.Sequential(layer, nn.Linear(4, 2))), bpk.extend(nn.MSELoss())
    loss = loss_fn(model(torch.randn(3, 4)), torch.zeros(3, 2))
    with pytest.raises(UnsupportedLayer, match="its input has no batch axis"), bpk.backpack(E.BatchGrad()):
        loss.backward()


def test_time_first_inside_and_a_loss_on_flat_rows() -> None:
    """Rows of the loss are ordered by sample: of two hypotheses that fit, this is the simpler one."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(2, 3), "last": nn.Linear(3, 3)}
    model = Assembled(lambda m, x: m.last(m.first(x.transpose(0, 1)).transpose(0, 1)).flatten(0, 1), **layers).double()
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    x, y = rand(2, 4, 2), torch.randint(3, (8,))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    for p in model.parameters():
        rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[4 * n : 4 * n + 4]), p)[0] / 2 for n in range(2)]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))
