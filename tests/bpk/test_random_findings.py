"""The smallest networks on which a search with random networks found something wrong (more: `test_random_networks`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.custom_module.elementwise import Cos
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.random_networks.modules import Attend
from tests.references.compare import Assembled, check, rand


def extended(*modules: nn.Module) -> list[nn.Module]:
    return [bpk.extend(m.double()) for m in modules]


def individual(model: nn.Module, loss_fn: nn.Module, inputs: Any, *targets: Tensor) -> None:
    """One backward pass with `BatchGrad`."""
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(*inputs), *targets).backward()


class Rows(nn.Module):
    """Rows of all positions for the loss, and a second result that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x) * self.p
        return h.flatten(0, 1), self.b(h)


def test_an_unused_result_with_other_rows() -> None:
    torch.manual_seed(0)
    model, loss_fn = extended(Rows(), nn.CrossEntropyLoss())
    x, y = rand(4, 2, 3), torch.randint(3, (8,))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x)[0], y).backward()
    for p in (model.p, model.a.weight):
        rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1])[0], y[2 * n : 2 * n + 2]), p)[0] / 4 for n in range(4)]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


@pytest.mark.parametrize("act", [nn.Tanh(), nn.SiLU(), nn.Softplus()], ids=lambda m: type(m).__name__)
def test_samples_that_are_one_number(act: nn.Module) -> None:
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.last(m.act(m.first(x).squeeze(1))[:, None])

    check(Assembled(forward, first=nn.Linear(3, 1), act=act, last=nn.Linear(1, 3)), rand(4, 3), factors=False)


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact, E.DiagHessian])
def test_layers_without_a_batch_axis_are_refused(extension: Any) -> None:
    for layer, size in ((nn.Linear(3, 2), (3,)), (nn.InstanceNorm1d(2, affine=True), (2, 3))):
        model, loss_fn = extended(nn.Sequential(layer), nn.MSELoss())
        out = model(rand(*size))
        with pytest.raises(UnsupportedLayer, match="no batch axis"), bpk.backpack(extension()):
            loss_fn(out, torch.zeros_like(out)).backward()


def test_a_layer_on_a_parameter_has_no_batch_axis_and_needs_none() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(1, 2)
    layers = {"first": nn.Linear(3, 3), "gate": nn.Linear(2, 3), "table": table, "last": nn.Linear(3, 3)}

    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.last(m.first(x) * m.gate(m.table.weight[0]).sigmoid())

    check(Assembled(forward, **layers), rand(4, 3), factors=False)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("entries", [1, 2, 3])
def test_layers_on_as_many_entries_as_there_are_samples(entries: int, samples: int) -> None:
    """A parameter, and what layers make of it, has no batch axis, even if it has as many entries as one would."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 3), "table": nn.Embedding(1, entries), "gate": nn.Linear(entries, 4)}
    model = Assembled(
        lambda m, x: m.last(m.first(x) * m.wide(m.act(m.gate(m.table.weight[0])))),
        **layers, act=nn.Tanh(), wide=nn.Linear(4, 3), last=nn.Linear(3, 3),
    )  # fmt: skip
    check(model, rand(samples, 3), factors=False)


@pytest.mark.parametrize("frozen", ["gate", "table"])
def test_a_frozen_part_of_what_has_no_batch_axis(frozen: str) -> None:
    torch.manual_seed(0)
    layers = {"table": nn.Embedding(1, 1), "gate": nn.Linear(1, 3), "last": nn.Linear(3, 3)}
    model = Assembled(lambda m, x: m.last(x * m.gate(m.table.weight[0]).sigmoid()), **layers)
    model.get_submodule(frozen).requires_grad_(False)
    model, loss_fn = extended(model, nn.CrossEntropyLoss())
    individual(model, loss_fn, (rand(1, 3),), torch.tensor([1]))
    for p in model.parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_batch, p.grad[None])


def test_a_second_pass_over_a_retained_graph_with_a_layer_called_twice() -> None:
    torch.manual_seed(0)
    layer, loss_fn = extended(nn.Linear(3, 3), nn.MSELoss())
    x, y = rand(2, 3), rand(2, 3)
    loss = loss_fn(layer(torch.tanh(layer(x))), y)
    with bpk.backpack(E.BatchGrad(), retain_graph=True):
        loss.backward(retain_graph=True)
        first = layer.weight.grad_batch.clone()
        loss.backward()
    torch.testing.assert_close(layer.weight.grad_batch, first)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(kind: str) -> None:
    torch.manual_seed(0)
    layer = getattr(nn.utils.parametrizations, kind)(nn.Linear(3, 2)).eval()
    model, loss_fn = extended(nn.Sequential(layer, nn.Tanh(), nn.Linear(2, 2)), nn.MSELoss(reduction="sum"))
    x, y = rand(3, 3), rand(3, 2)
    individual(model, loss_fn, (x,), y)
    for p in model.parameters():
        rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]), p)[0] for n in range(3)]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows))


class ScaledInput(nn.Module):
    """`layer(x * p)` with a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.layer = nn.Parameter(torch.tensor(0.7)), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.p)


def test_squares_of_a_parameter_that_is_one_number() -> None:
    torch.manual_seed(0)
    model, x, y = ScaledInput().double(), rand(4, 2), rand(4, 3)
    converted, loss_fn = bpk.extend(model, use_converter=True), bpk.extend(nn.MSELoss(reduction="sum"))
    with bpk.backpack(E.SumGradSquared()):
        loss_fn(converted(x), y).backward()
    rows = [torch.autograd.grad(F.mse_loss(model(x[n]), y[n], reduction="sum"), model.p)[0] for n in range(4)]
    torch.testing.assert_close(model.p.sum_grad_squared, torch.stack(rows).square().sum())


def test_second_derivative_of_a_function_of_a_difference() -> None:
    """A second derivative that vanishes on equal directions: probing must not use the same numbers twice."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return m.last(F.pairwise_distance(m.act(m.first(left)), m.act(m.first(right)))[:, None])

    layers = {"first": nn.Linear(3, 3), "act": nn.Sigmoid(), "last": nn.Linear(1, 3)}
    check(Assembled(forward, **layers), rand(3, 6), factors=False)


def test_a_layer_without_a_rule_one_of_whose_inputs_has_no_parameter() -> None:
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(m.attend(h, h.sin())[0])

    layers = {"first": nn.Linear(3, 2), "attend": Attend(2), "last": nn.Linear(2, 3)}
    check(Assembled(forward, **layers), rand(3, 3), factors=False)


def test_two_losses_that_read_different_results_of_one_layer() -> None:
    torch.manual_seed(0)
    layer, first, second = extended(nn.LSTM(3, 2, batch_first=True), nn.MSELoss(), nn.MSELoss())
    x, y, z = rand(4, 2, 3), rand(4, 2, 2), rand(4, 1, 2)

    def loss(bias: Tensor) -> Tensor:
        out, (h, _) = torch.func.functional_call(layer, {"bias_ih_l0": bias}, (x,))
        return F.mse_loss(out, y) + F.mse_loss(h.transpose(0, 1), z)

    with bpk.disable():
        expected = torch.autograd.functional.hessian(loss, layer.bias_ih_l0.detach())
    out, (h, _) = layer(x)
    with bpk.backpack(E.DiagHessian(), E.HMP()):
        (first(out, y) + second(h.transpose(0, 1), z)).backward()
    torch.testing.assert_close(layer.bias_ih_l0.diag_h, expected.diag())
    torch.testing.assert_close(layer.bias_ih_l0.hmp(torch.eye(8).double()), expected)


def test_samples_one_by_one_behind_layers_that_saw_them_together() -> None:
    """Two rows in front of everything are two samples, although a layer is called with one row at a time."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        h = m.first(x)
        h = torch.cat([m.alone(h[n : n + 1]).tanh() for n in range(len(h))])
        return m.last(m.norm(h.reshape(-1, 2, 3).transpose(0, 1)).transpose(0, 1).flatten(1))

    layers = {"first": nn.Linear(3, 3), "alone": nn.Linear(3, 6), "norm": nn.LayerNorm(3), "last": nn.Linear(6, 3)}
    check(Assembled(forward, **layers), rand(2, 3), factors=False)


def test_one_sample_with_a_table_of_positions() -> None:
    """As many positions as rows at the loss are no samples: the data has one row."""
    table, tokens, last = extended(nn.Embedding(4, 3), nn.Embedding(5, 3), nn.Linear(3, 3))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    out = last(tokens(torch.tensor([[0, 3, 1, 1]])) + table(torch.arange(4))).reshape(-1, 3)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(out, torch.arange(4) % 3).backward()
    for p in (table.weight, tokens.weight, last.weight):
        torch.testing.assert_close(p.grad_batch, p.grad[None])


def test_losses_of_results_with_different_rows() -> None:
    torch.manual_seed(0)
    model, first, second = extended(Rows(), nn.CrossEntropyLoss(), nn.MSELoss())
    x, y, z = rand(4, 2, 3), torch.randint(3, (8,)), rand(4, 2, 2)
    rows, others = model(x)
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        (first(rows, y) + second(others, z)).backward()
    for n in range(4):
        rows, others = model(x[n : n + 1])
        loss = (first(rows, y[2 * n : 2 * n + 2]) + second(others, z[n : n + 1])) / 4
        torch.testing.assert_close(model.p.grad_batch[n], torch.autograd.grad(loss, model.p)[0])


def test_a_row_at_a_point_of_rest_belongs_to_its_sample() -> None:
    """It has no gradient, which would tell whose it is, but a second derivative."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        rows = m.first(x.transpose(0, 1).flatten(0, 1)).square()
        return m.last(rows.unflatten(0, (3, 2)).mean(0))

    x = rand(2, 3, 2)
    x[1] = 0
    check(Assembled(forward, first=nn.Linear(2, 3, bias=False), last=nn.Linear(3, 3)), x, factors=False)
    model = Assembled(forward, first=nn.Linear(2, 3), last=nn.Linear(3, 3))
    nn.init.zeros_(model.first.bias)
    check(model, x, factors=False)


@pytest.mark.parametrize("steps", [2, 3])
def test_the_batch_axis_of_a_layer_at_a_point_of_rest(steps: int) -> None:
    """As many steps as samples, and no gradient that would tell them apart: the layer behind it knows."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        return m.last(m.cos(m.first(x.transpose(0, 1))).mean(0))

    model = Assembled(forward, first=nn.Linear(2, 3), cos=Cos(), last=nn.Linear(3, 3))
    nn.init.zeros_(model.first.weight), nn.init.zeros_(model.first.bias)
    check(model, rand(2, steps, 2), factors=False)


def test_dead_entries_behind_a_product_with_a_parameter() -> None:
    """The product is recorded from its node, which sees rows and positions as one axis."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(2, 4), "act": nn.ReLU(), "table": nn.Embedding(4, 3), "last": nn.Linear(3, 3)}
    model = Assembled(lambda m, x: m.last(m.act(m.first(x) @ m.table.weight - m.far).mean(1)), **layers)
    model.register_buffer("far", torch.tensor([[100.0], [0.0]]))
    check(model, rand(3, 2, 2), factors=False)


def test_the_cosine_of_features_that_are_all_dead() -> None:
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        h = m.act(m.first(x)).unflatten(1, (2, 3))
        return m.last(m.compare(h, h.flip(1)))

    compare = nn.CosineSimilarity(dim=2, eps=0.01)  # slopes are 1 / eps there
    model = Assembled(forward, first=nn.Linear(2, 6), act=nn.ReLU(), compare=compare, last=nn.Linear(2, 3))
    with torch.no_grad():
        model.first.bias[3:] = -100
    check(model, rand(3, 2), factors=False)


def one_sample_with_two_rows(model: nn.Module, x: Tensor) -> None:
    """The loss sees two rows of the only sample."""
    model, loss_fn = extended(model, nn.CrossEntropyLoss())
    individual(model, loss_fn, (x,), torch.tensor([0, 2]))
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch, p.grad[None])


def test_the_pieces_of_one_sample_are_no_samples() -> None:
    """A layer that knows its batch axis sees two pieces, and so does the loss, but one sample was given."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        pieces = m.cell(x.reshape(-1, 3, 2))[0][:, -1]
        return m.last(pieces.unflatten(0, (len(x), 2))).flatten(0, 1)

    for x in (rand(1, 12), rand(1, 1, 2, 3, 2)):
        layers = {"cell": nn.RNN(2, 4, batch_first=True), "last": nn.Linear(4, 3)}
        one_sample_with_two_rows(Assembled(forward, **layers), x)


def test_two_calls_of_which_one_position_is_read() -> None:
    """A layer is called as often as the loss has rows, one row at a time; but its calls are not the samples."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        h = m.first(x[:, :2]).tanh() - m.first(x[:, 2:])
        return m.last(h.repeat(1, 2).unflatten(1, (2, 3)) * torch.tensor([[1.0], [0.0]])).flatten(0, 1)

    one_sample_with_two_rows(Assembled(forward, first=nn.Linear(2, 3), last=nn.Linear(3, 3)), rand(1, 4))


def test_two_calls_that_are_both_silent() -> None:
    """No gradient comes to either of them; what has one is in two rows of the only sample."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        h = (m.first(x[:, :2]).tanh() - m.first(x[:, 2:])) * 0.0
        return m.last((h.repeat(1, 2).unflatten(1, (2, 3)) + m.shift.weight).flatten(0, 1))

    layers = {"first": nn.Linear(2, 3), "shift": nn.Linear(3, 2, bias=False), "last": nn.Linear(3, 3)}
    one_sample_with_two_rows(Assembled(forward, **layers), rand(1, 4))


def test_first_order_where_a_converted_product_mixes_samples() -> None:
    """One of its factors has rows that are none of samples; the user is told, and other layers get what is theirs."""
    torch.manual_seed(0)

    def forward(m: Assembled, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        return m.last(h @ h.mT @ h)

    for silent in (0, 1):  # with entries that have no gradient
        model = Assembled(forward, first=nn.Linear(4, 5), last=nn.Linear(5, 3)).double()
        with torch.no_grad():
            model.last.weight[:, 0] *= 1 - silent
        model, loss_fn = bpk.extend(model, use_converter=True), bpk.extend(nn.CrossEntropyLoss())
        loss = loss_fn(model(rand(3, 4)), torch.arange(3))
        with pytest.warns(UserWarning, match="Rows are not samples"), bpk.backpack(E.SumGradSquared(), E.BatchGrad()):
            loss.backward()
        for p in model.last.parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
