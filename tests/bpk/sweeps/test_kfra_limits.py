"""The averaged recursion where it is exact, of several losses, in other types, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.module_extension import ModuleExtension
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.bpk.sweeps.test_kfra_branches import CASES, Case, agree, gate, lin, residual_block, run, square
from tests.references.averaged import Layer, averaged, layer
from tests.references.compare import Assembled, rand


# ---- where it is exact ------------------------------------------------------------------------------------
def skip(m: Any, x: Tensor) -> Tensor:
    return m.c(x + m.a(x) - m.b(m.a(x)))


def many_joins(m: Any, x: Tensor) -> Tensor:
    u = m.a(x)
    v = torch.cat([m.b(u) + u, m.c(u)], 1)
    return m.d(v.reshape(-1, 2, 3).sum(1)) + v[:, ::2] - m.b(m.b(u))


def every_layer_twice(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(m.a(x) + m.b(x))) + m.a(x)


def convolutions(m: Any, x: Tensor) -> Tensor:
    z = m.conv(x[:, None])
    z = z + m.conv(z)
    return m.a(z[:, 0]) + m.pool(m.conv(z)).squeeze(1).expand(-1, 3)


@pytest.mark.parametrize("function", [skip, many_joins, every_layer_twice, convolutions])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_networks_are_exact(function: Any, reduction: str) -> None:
    """Jacobians that are the same for all samples: `G` is that of KFLR, cross terms and shared layers included."""
    conv = nn.Conv1d(1, 1, 3, padding=1).double()
    model = Assembled(function, a=lin(), b=lin(), c=lin(), d=lin(), conv=conv, pool=nn.AvgPool1d(3))
    model = run(model, rand(5, 3), nn.MSELoss(reduction=reduction), rand(5, 3), E.KFRA(), E.KFLR())
    used = [p for p in model.parameters() if p.grad is not None]
    assert used
    for p in used:
        for found, expected in zip(p.kfra, p.kflr, strict=True):
            torch.testing.assert_close(found, expected)


# ---- several losses, other dtypes, refusals ---------------------------------------------------------------
def test_two_losses_behind_different_layers() -> None:
    """An early exit: the first loss reads what the second branch goes on from."""
    model, graph = residual_block()
    x, y, z = rand(4, 3), torch.randint(3, (4,)), rand(4, 3)
    ce, mse = nn.CrossEntropyLoss(), nn.MSELoss()
    expected = averaged(graph, x, [("d", lambda pred: ce(pred, y)), ("c", lambda pred: 0.3 * mse(pred, z))])
    bpk.extend(model), bpk.extend(ce), bpk.extend(mse)
    exits: list[Tensor] = []
    model.c.register_forward_hook(lambda m, i, out: exits.append(out))
    pred = model(x)
    with bpk.backpack(E.KFRA(), E.KFLR()):
        (ce(pred, y) + 0.3 * mse(exits[0], z)).backward()
    agree(model, expected)


@pytest.mark.parametrize(("case", "dtype"), [*[(c, torch.float32) for c in CASES], (square, torch.bfloat16)])
def test_other_precisions(case: Callable[[], Case], dtype: torch.dtype) -> None:
    model, x, y = case()[0], rand(4, 3), torch.randint(3, (4,))
    exact = [p.kfra[0] for p in run(model, x, nn.CrossEntropyLoss(), y, E.KFRA()).parameters() if p.requires_grad]
    model = run(model.to(dtype), x.to(dtype), nn.CrossEntropyLoss(), y, E.KFRA())
    for p, wanted in zip([p for p in model.parameters() if p.requires_grad], exact, strict=True):
        assert p.kfra[0].dtype is dtype
        tolerance = 1e-4 if dtype is torch.float32 else 0.2
        assert (p.kfra[0].double() - wanted).norm() <= tolerance * wanted.norm() + 1e-6


def test_sampled_start() -> None:
    """`HBP` may start this recursion with a sampled loss Hessian; with many draws it is that of KFRA."""
    from bpk.extensions.secondorder.strategies import BackpropStrategy

    hbp = E.HBP(backprop_strategy=BackpropStrategy.BATCH_AVERAGE, mc_samples=5000)
    model = run(gate()[0], rand(4, 3), nn.CrossEntropyLoss(), torch.randint(3, (4,)), hbp, E.KFRA())
    for p in model.parameters():
        assert (p.hbp[0] - p.kfra[0]).norm() < 0.1 * p.kfra[0].norm()


def test_differentiable() -> None:
    """With `create_graph`, factors are functions of the parameters."""

    def factor(weight: Tensor, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss_fn = bpk.extend(nn.CrossEntropyLoss())
        with torch.no_grad():
            model.d.weight.copy_(weight)
        loss = loss_fn(model(x), y)
        with bpk.backpack(E.KFRA()):
            loss.backward(create_graph=True)
        return model.a.weight.kfra[0].sum()

    model, x, y = bpk.extend(gate()[0]), rand(4, 3), torch.randint(3, (4,))
    weight, step = model.d.weight.detach().clone(), torch.zeros(3, 3, dtype=torch.float64)
    step[1, 2] = 1e-6
    slope = torch.autograd.grad(factor(weight, model, x, y), model.d.weight)[0][1, 2]
    values = [factor(weight + sign * step, model, x, y).detach() for sign in (1, -1)]
    torch.testing.assert_close(slope, (values[0] - values[1]) / 2e-6, rtol=1e-5, atol=1e-8)


def test_a_loss_with_several_rows_per_sample() -> None:
    """Positions folded into the batch axis at the loss are those of `[N, C, T]`."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x))
        return z + m.b(z)

    model, loss_fn = Assembled(forward, a=lin(), b=lin(), act=nn.Tanh()), nn.CrossEntropyLoss()
    x, y = rand(4, 2, 3), torch.randint(3, (4, 2))
    graph = [
        layer("a", model.a, "x"),
        layer("z", model.act, "a"),
        layer("b", model.b, "z"),
        Layer("sum", torch.add, ("z", "b")),
    ]
    expected = averaged(graph, x, [("sum", lambda pred: loss_fn(pred.transpose(1, 2), y))])
    bpk.extend(model), bpk.extend(loss_fn)
    for pred, labels in ((model(x).transpose(1, 2), y), (model(x).reshape(-1, 3), y.flatten())):
        with bpk.backpack(E.KFRA(), E.KFLR()):
            loss_fn(pred, labels).backward()
        agree(model, expected)


def test_autocast() -> None:
    model, x, y = gate()[0].float(), rand(4, 3).float(), torch.randint(3, (4,))
    loss_fn = nn.CrossEntropyLoss()
    exact = [p.kfra[0] for p in run(model, x, loss_fn, y, E.KFRA()).parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(model(x), y)
    with bpk.backpack(E.KFRA()):
        loss.backward()
    for p, wanted in zip(model.parameters(), exact, strict=True):
        assert (p.kfra[0] - wanted).norm() <= 0.1 * wanted.norm()


class SigmoidByHand(ModuleExtension):
    """How users wrote the recursion for a layer: it gets `G` at the output and returns that at the input."""

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantity: Tensor) -> Tensor:
        slope = module.output * (1 - module.output)
        return slope.T @ slope / len(slope) * quantity


def test_module_extension() -> None:
    """A user's module extension takes part on a chain; across branches, it does not know the cross terms."""
    chain = nn.Sequential(lin(), nn.Sigmoid(), lin())
    x, y = rand(4, 3), torch.randint(3, (4,))
    by_hand = E.KFRA()
    by_hand.set_module_extension(nn.Sigmoid, SigmoidByHand())
    expected = [p.kfra for p in run(chain, x, nn.CrossEntropyLoss(), y, E.KFRA()).parameters()]
    torch.testing.assert_close(
        [p.kfra for p in run(chain, x, nn.CrossEntropyLoss(), y, by_hand).parameters()], expected
    )
    with pytest.raises(UnsupportedLayer, match="module extension"):
        run(residual_block()[0], x, nn.CrossEntropyLoss(), y, by_hand)


def test_a_merged_batch_axis_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x.reshape(-1, 3)).reshape(-1, 6))

    model = Assembled(forward, a=lin(), b=lin(6, 3))
    with pytest.raises(UnsupportedLayer, match="KFRA cannot pass") as refused:
        run(model, rand(4, 2, 3), nn.CrossEntropyLoss(), torch.randint(3, (4,)), E.KFRA())
    assert "Why:" in str(refused.value) and "KFLR" in str(refused.value)
    assert all(not hasattr(p, "kfra") for p in model.parameters())


def test_a_merged_batch_axis_behind_a_parameter_of_two_functions_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x.flatten(0, 1)).unflatten(0, (-1, 2)).mean(1) + m.p
        return m.c(m.b(h).tanh() + h)

    model = Assembled(forward, a=lin(), b=lin(), c=lin())
    model.p = nn.Parameter(torch.rand(3))
    with pytest.raises(UnsupportedLayer, match="KFRA cannot pass 'a'"):
        run(model, rand(4, 2, 3), nn.CrossEntropyLoss(), torch.randint(3, (4,)), E.KFRA())
