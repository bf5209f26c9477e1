"""Parameters, buffers and masks that change between forward and backward pass: a rule never reads the new values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.helpers import registered

Change = Callable[[nn.Parameter], None]


class Between(nn.Module):
    """A layer between two linear ones, whose last position is the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 4), layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.layer(h, h, h) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(h)
        return self.last((h[0] if isinstance(h, tuple) else h)[:, -1])


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.b)


def in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(torch.randn_like(p))


def by_data(p: nn.Parameter) -> None:
    p.data = torch.randn_like(p)


def transposed(p: nn.Parameter) -> None:
    p.data = p.data.mT  # in the same memory


def fields(layer: Callable[[], nn.Module], change: Change | None, *names: str) -> dict[str, list[Tensor]]:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Between(layer()).double()), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(5, 6, 3).double()), torch.tensor([0, 1, 1, 0, 1]))
    for name in names if change is not None else ():
        change(model.get_parameter(name))
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
        loss.backward()
    return {n: [p.grad_batch, p.diag_ggn_exact, p.diag_h] for n, p in model.named_parameters()}


ATTENTION = lambda: nn.MultiheadAttention(4, 2, batch_first=True)  # noqa: E731
READ = {
    "RNN": (lambda: nn.RNN(4, 4, batch_first=True), "layer.bias_hh_l0"),
    "LSTM": (lambda: nn.LSTM(4, 4, batch_first=True), "layer.bias_ih_l0"),
    "GRU": (lambda: nn.GRU(4, 4, batch_first=True), "layer.weight_hh_l0"),
    "attention": (ATTENTION, "layer.in_proj_bias"),
    "layer norm": (lambda: nn.LayerNorm(4), "layer.weight"),
    "Autodiff": (Gate, "layer.b"),
    "last": (nn.Tanh, "last.weight"),
}


def test_a_matrix_that_was_transposed_in_its_memory() -> None:
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), bpk.extend(nn.MSELoss())
    loss = loss_fn(model(torch.randn(5, 4)), torch.randn(5, 4))
    transposed(model[1].weight)
    with pytest.raises(RuntimeError, match="'weight' of '1'"), bpk.backpack(E.DiagGGNExact()):
        loss.backward()


@pytest.mark.parametrize("change", [in_place, by_data])
@pytest.mark.parametrize("case", READ)
def test_values_that_a_rule_reads(case: str, change: Change) -> None:
    layer, name = READ[case]
    with registered(bpk.Autodiff(Gate, params=("b",))):
        fields(layer, None)
        with pytest.raises(RuntimeError, match=rf"'{name.split('.')[1]}' of '{name.split('.')[0]}' .* was changed"):
            fields(layer, change, name)


@pytest.mark.parametrize("change", [in_place, by_data])
@pytest.mark.parametrize("layer", [nn.Tanh, ATTENTION])
def test_values_that_nobody_reads(layer: Callable[[], nn.Module], change: Change) -> None:
    unread = ["first.weight", "first.bias", "last.bias", *(["layer.out_proj.bias"] if layer is ATTENTION else [])]
    expected, got = fields(layer, None), fields(layer, change, *unread)
    for name, values in expected.items():
        torch.testing.assert_close(got[name], values)


def test_another_place_in_the_same_memory() -> None:
    """Parameters may be views of one tensor."""
    memory, last = torch.randn(16), nn.Linear(4, 2, bias=False)
    last.weight.data = memory[:8].view(2, 4)
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), last)), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(3, 3)), torch.tensor([0, 1, 0]))
    last.weight.data = memory[8:].view(2, 4)
    with pytest.raises(RuntimeError, match=r"'weight' of '2' .* was changed"), bpk.backpack(E.DiagGGNExact()):
        loss.backward()


def test_a_table_that_every_call_renormalises() -> None:
    table = bpk.extend(nn.Embedding(5, 3, max_norm=0.5))
    loss_fn = bpk.extend(nn.MSELoss(reduction="sum"))
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        h = table(torch.tensor([0, 1])) * table(torch.tensor([2, 3])).detach()
        loss_fn(h, torch.zeros(2, 3)).backward()
    torch.testing.assert_close(table.weight.grad_batch.sum(0), table.weight.grad)


def test_a_product_after_its_parameter_got_other_memory() -> None:
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.HMP()):
        loss_fn(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
    product = model[0].weight.hmp
    expected = product(torch.ones(4, 3))
    model[2].weight.data = torch.randn(2, 4)
    torch.testing.assert_close(product(torch.ones(4, 3)), expected)  # it has kept the old one


# ---- buffers and arguments ------------------------------------------------------------------------------
def diagonals(model: nn.Module, loss_fn: nn.Module, change: Callable[[], object] | None, x: Tensor) -> list[Tensor]:
    loss = loss_fn(model(x), torch.tensor([0, 1, 1, 0]))
    if change is not None:
        change()
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
        loss.backward()
    return [v for p in model.parameters() for v in (p.grad_batch, p.diag_ggn_exact, p.diag_h)]


def test_buffers_that_are_replaced_stay_those_of_the_call() -> None:
    norm, weighted = nn.BatchNorm1d(4), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    model = bpk.extend(nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2)).eval())
    loss_fn, x = bpk.extend(weighted), torch.randn(4, 3)
    expected = diagonals(model, loss_fn, None, x)

    def replace() -> None:
        norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4)
        weighted.weight = torch.ones(2)

    got = diagonals(model, loss_fn, replace, x)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert norm.running_var.max() < 1 and weighted.weight.max() == 1, "the modules have the new ones"


def test_buffers_that_are_changed_in_place_are_read_by_nobody() -> None:
    norm = nn.BatchNorm1d(4)
    model, loss_fn, x = (
        bpk.extend(nn.Sequential(nn.Linear(3, 4), norm).eval()),
        nn.CrossEntropyLoss(),
        torch.randn(4, 3),
    )
    with pytest.raises(RuntimeError, match=r"'running_mean' of '1' .* was changed"):
        diagonals(model, bpk.extend(loss_fn), lambda: norm.running_mean.add_(1), x)
    norm.train()
    loss = loss_fn(model(x), torch.tensor([0, 1, 1, 0]))
    model(torch.randn(5, 3))  # counts batches in place, which nobody reads
    with bpk.backpack(E.DiagGGNExact()):
        loss.backward()


def test_a_mask_that_is_changed_in_place() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention, self.last = nn.Linear(3, 4), ATTENTION(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(self.attention(h, h, h, attn_mask=mask)[0][:, -1])

    mask = torch.randn(5, 5)
    model, loss_fn, x = bpk.extend(Masked()), bpk.extend(nn.CrossEntropyLoss()), torch.randn(4, 5, 3)
    diagonals(model, loss_fn, None, x)
    with pytest.raises(RuntimeError, match=r"'attn_mask' of 'attention' .* was changed"):
        diagonals(model, loss_fn, mask.zero_, x)


# ---- frozen parameters ----------------------------------------------------------------------------------
def test_parameters_that_were_frozen_in_the_forward_pass_only() -> None:
    """Autograd gives them no gradient, and so there is no field."""
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), bpk.extend(nn.MSELoss())
    model[2].weight.requires_grad_(False)
    loss = loss_fn(model(torch.randn(5, 3)), torch.randn(5, 2))
    model[2].weight.requires_grad_(True)
    extensions = E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.HMP(), E.KFLR(), E.KFRA()
    with bpk.backpack(*extensions):
        loss.backward()
    assert model[2].weight.grad is None
    assert not any(hasattr(model[2].weight, extension.savefield) for extension in extensions)
    assert all(hasattr(p, e.savefield) for e in extensions for p in (model[0].weight, model[2].bias))


# ---- products, which are called later ----------------------------------------------------------------
class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.5)
        self.act, self.scale, self.last = nn.LeakyReLU(0.1), nn.Parameter(torch.rand(4) + 0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.act(self.norm(self.first(x))) * self.scale))


def other_mode(model: Scaling) -> None:
    model.eval()
    model.act.negative_slope, model.norm.eps = 0.7, 0.5


def other_scale(model: Scaling) -> None:
    model.scale.data = model.scale.data + 1


def other_statistics(model: Scaling) -> None:
    with torch.no_grad():
        model.norm.running_mean.add_(1)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("change", [other_mode, other_scale, other_statistics])
@pytest.mark.parametrize("extension", [E.HMP, E.GGNMP, E.PCHMP])
def test_products_belong_to_the_point_of_the_gradient(
    extension: type[E.BackpropExtension], change: Callable[[Scaling], None]
) -> None:
    """Hyperparameters and modes are as they were; values that are gone are refused."""
    torch.manual_seed(0)
    model, loss_fn, asked = bpk.extend(Scaling().double()), bpk.extend(nn.CrossEntropyLoss()), extension()
    with bpk.backpack(asked):
        loss_fn(model(torch.randn(5, 3).double()), torch.arange(5) % 3).backward()
    for name in ("first.weight", "norm.weight"):
        p = model.get_parameter(name)
        product, v = getattr(p, asked.savefield), torch.ones_like(p)
        before = product(v).clone() if change is other_mode else None
        if before is not None:
            change(model)
            torch.testing.assert_close(product(v), before)
            model.train().norm.eval()
            model.act.negative_slope, model.norm.eps = 0.1, 1e-5
    if change is not other_mode:
        change(model)
        with pytest.raises(RuntimeError, match="changed"):
            product(v)


@pytest.mark.parametrize("extension", [E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.KFLR()])
def test_statistics_that_a_later_forward_pass_has_moved(extension: Any) -> None:
    """BatchNorm in training mode changes them without a new version: autograd itself gives wrong gradients."""
    model = bpk.extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval())
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(5, 3), torch.randint(2, (5,))
    loss = loss_fn(model(x), y)
    model.train()(torch.randn(5, 3))
    with pytest.raises(RuntimeError, match=r"'running_(mean|var)' of '1' .* was changed"), bpk.backpack(extension):
        loss.backward()
    model.eval()
    with bpk.backpack(extension):
        loss_fn(model(x), y).backward()
