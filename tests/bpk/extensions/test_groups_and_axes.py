"""Kronecker factors of groups of samples, moments along the axes of a parameter, and the diagonal of `J^T J`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy import memmap
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.custom_module.permute import Permute
from bpk.fields import rows, squares
from bpk.fields.rows import Rows
from bpk.jacobians.core import outer
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.rules import REGISTRY
from tests.bpk.extensions.test_tokens import Sequence
from tests.bpk.sweeps.test_positions import Words
from tests.helpers import backward, data, extended
from tests.models.networks import is_loss, rule_networks

NETWORKS = {
    net.name: net
    for rule in REGISTRY
    for net in [net for net in rule_networks(rule) if not is_loss(rule.examples[0])][:1]
}
GROUPS = [[2, 0], [1]]


# ---- factors of groups ---------------------------------------------------------------------------------
def factors_agree(model: nn.Module, loss: Any, groups: list[list[int]], n: int) -> None:
    """Those of each group are those of its samples alone, with `A` divided by their number."""
    torch.manual_seed(0)
    with bpk.backpack(E.BatchKFLR(groups)):
        loss().backward()
    found = {p: p.kflr_batch for p in model.parameters() if p.requires_grad}
    for k, group in enumerate(groups):
        torch.manual_seed(0)
        with bpk.backpack(E.KFLR(subsampling=group)):
            loss().backward()
        for p, stacks in found.items():
            expected = [factor.to_dense() for factor in p.kflr]
            assert [len(stack) for stack in stacks] == [len(groups)] * len(expected)
            each = [stack.to_dense()[k] for stack in stacks]
            scale = n / len(group) if len(expected) > 1 else 1
            product = torch.kron(*expected) * scale if len(expected) > 1 else expected[0]
            torch.testing.assert_close(torch.kron(*each) if len(each) > 1 else each[0], product)
    each, at_once = E.BatchKFLR([[k] for k in range(n)]), E.BatchKFLR()
    at_once.savefield = "at_once"
    with bpk.backpack(each, at_once):
        loss().backward()
    for p in found:
        for one, other in zip(p.kflr_batch, p.at_once, strict=True):
            torch.testing.assert_close(other.to_dense(), one.to_dense())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_groups_of_every_layer(name: str) -> None:
    model, loss_fn, x, targets = NETWORKS[name].build()
    bpk.extend(model), bpk.extend(loss_fn)
    try:
        factors_agree(model, lambda: loss_fn(model(x), *targets), GROUPS, len(x))
    except UnsupportedLayer as error:
        assert "mix" in str(error), "nothing else is refused"


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("make", [Sequence, partial(Words, mixed=True)], ids=["attention", "recurrent"])
def test_groups_of_sequences(make: Callable[[str], nn.Module]) -> None:
    """Tied and reused parameters, parameters that functions use; also where rows are not the samples."""
    found = []
    for form in ("extra axis", "rows", "time first"):
        torch.manual_seed(0)
        model = bpk.extend(make(form).double())
        tokens, y = torch.randint(5, (3, 4)), torch.randint(5, (3, 4))
        if form != "extra axis":
            y = (y.T if form == "time first" else y).flatten()
        loss_fn = bpk.extend(nn.CrossEntropyLoss())
        if form == "extra axis":
            factors_agree(model, partial(value, model, loss_fn, tokens, y), GROUPS, 3)
        if form != "time first" or isinstance(model, Words):
            backward(model, loss_fn, tokens, y, E.BatchKFLR(GROUPS))
            found.append([p.kflr_batch for p in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def value(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_fn(model(x), y)


def test_each_sample_is_a_group() -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.BatchKFLR(), E.BatchKFAC(2), E.KFLR())
    for p in model.parameters():
        assert [len(f) for f in p.kflr_batch] == [len(f) for f in p.kfac_batch] == [5] * len(p.kflr)
        torch.testing.assert_close(p.kflr_batch[0].sum(0), p.kflr[0])
        if len(p.kflr) > 1:
            torch.testing.assert_close(p.kflr_batch[1].mean(0), p.kflr[1])


class LastStep(nn.Module):
    """A layer on rows of all steps, `[N T, D]` or `[T N, D]`, only the last of which the loss sees."""

    def __init__(self, time_first: bool) -> None:
        super().__init__()
        self.layer, self.head, self.time_first = nn.Linear(4, 3), nn.Linear(3, 3), time_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        x = self.layer(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2])
        out: Tensor = self.head(x[-1] if self.time_first else x[:, -1])
        return out


@pytest.mark.parametrize("time_first", [False, True])
def test_rows_that_feed_no_loss_are_part_of_their_own_sample(time_first: bool) -> None:
    """They had all been counted as the first sample's."""
    torch.manual_seed(0)
    model, loss_fn = extended(LastStep(time_first).double())
    x, y = torch.randn(4, 3, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 1])
    backward(model, loss_fn, x, y, E.BatchKFLR())
    torch.testing.assert_close(model.layer.weight.kflr_batch[1], x.mT @ x)
    backward(model, loss_fn, x, y, E.BatchKFLR([[2]]))
    torch.testing.assert_close(model.layer.weight.kflr_batch[1][0], x[2].T @ x[2])


class Both(nn.Module):
    """A layer, and a matrix whose factors are in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.w = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ self.w


def test_factors_of_each_sample_of_a_data_set(tmp_path: Path) -> None:
    """In memory, on disk and handed over: those of one large batch, of which only `G` carries the loss scaling."""
    torch.manual_seed(0)
    (model, loss_fn), (x, y) = extended(Both().double()), data()
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    backward(model, loss_fn, x, y, E.BatchKFLR())
    expected = {name: p.kflr_batch for name, p in model.named_parameters()}
    handed: list[Any] = []
    found = [
        bpk.accumulate(model, loss_fn, batches, E.BatchKFLR(), E.BatchGrad(), per_sample=place)
        for place in (True, tmp_path / "rows")
    ]
    found[1].save(tmp_path / "found.safetensors")
    found.append(bpk.Accumulated.load(tmp_path / "found.safetensors"))
    bpk.accumulate(model, loss_fn, batches, E.BatchKFLR(), callback=lambda number, fields: handed.append(fields))
    for name, factors in expected.items():
        for result in found:
            torch.testing.assert_close(
                [torch.as_tensor(f.copy() if isinstance(f, memmap) else f) for f in result[name]["kflr_batch"]], factors
            )
        scales = {"layer.weight": (5, 1), "layer.bias": (5,), "w": (1, 5)}[name]
        summed = [torch.cat(parts) for parts in zip(*(fields[name]["kflr_batch"] for fields in handed), strict=True)]
        torch.testing.assert_close(summed, [f * scale for f, scale in zip(factors, scales, strict=True)])
    assert "array [5, 5, 5] and array [5, 4, 4] on disk" in str(found[1])
    with pytest.raises(ValueError, match="its groups are those of one batch"):
        bpk.accumulate(model, loss_fn, batches, E.BatchKFLR([[0, 1]]), per_sample=True)
    large = nn.Sequential(nn.Linear(4, 3), Scale(5000)).double()
    with pytest.raises(ValueError, match=r"'1.weight' .* is sparse"):
        bpk.accumulate(large, loss_fn, batches, E.BatchKFLR(), per_sample=True)


class Scale(nn.Module):
    """A parameter of several axes without an input factor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, size))

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., None] * self.weight).sum(-1)


def test_groups_count_the_samples_that_are_considered() -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, E.BatchKFLR([[1], [0, 2]], subsampling=[3, 1, 4]))
    found = [p.kflr_batch for p in model.parameters()]
    backward(model, loss_fn, x, y, E.BatchKFLR([[1], [3, 4]]))
    torch.testing.assert_close([p.kflr_batch for p in model.parameters()], found)
    assert bpk.verify(model, loss_fn, x, y, E.BatchKFAC(1, [[1], [0, 2]], [3, 1, 4]), E.BatchKFLR([[1]], [3, 1]))


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([[0, 0]], "once"),
        ([[]], "at least one"),
        ([[0], [-1]], r"groups\[1\]=\[-1\] is not"),
        ([], "at least one group"),
        ([[0], [5]], "index 5 is out of range"),
    ],
)
def test_groups_are_checked(groups: list[list[int]], says: str) -> None:
    model, loss_fn = extended()
    with pytest.raises(ValueError, match=says):
        backward(model, loss_fn, *data(), E.BatchKFAC(groups=groups))


# ---- axes ----------------------------------------------------------------------------------------------
def moments(gradients: Tensor) -> list[Tensor]:
    """By a loop over samples: `G G^T` of each unfolding."""
    found = []
    for axis in range(1, gradients.dim()):
        unfolded = [g.movedim(axis - 1, 0).flatten(1) if g.dim() > 1 else g[:, None] for g in gradients]
        found.append(torch.stack([g @ g.T for g in unfolded]).sum(0))
    return found


AXES = {
    "few positions": lambda: (nn.Linear(9, 8), torch.randn(4, 2, 9)),
    "many positions": lambda: (nn.Linear(3, 2), torch.randn(4, 9, 3)),
    "convolution": lambda: (nn.Conv2d(2, 3, 2), torch.randn(4, 2, 3, 3)),
    "groups": lambda: (nn.Conv1d(4, 4, 2, groups=2), torch.randn(4, 4, 3)),
    "embedding": lambda: (nn.Embedding(7, 5), torch.randint(7, (4, 2))),
}


@pytest.mark.parametrize("room", [None, 1])
@pytest.mark.parametrize("name", AXES)
def test_axes(name: str, room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a few samples at a time."""
    if room is not None:
        monkeypatch.setattr(outer, "ROOM", room)
    torch.manual_seed(0)
    layer, x = AXES[name]()
    x = x.double() if x.is_floating_point() else x
    model = bpk.extend(nn.Sequential(layer.double(), nn.Tanh(), nn.Flatten()))
    y, loss_fn = torch.randn_like(model(x)), bpk.extend(nn.MSELoss())
    backward(model, loss_fn, x, y, E.AxisGram())
    found = {p: p.axis_gram for p in model.parameters()}
    backward(model, loss_fn, x, y, E.AxisGram(max_size=3), E.BatchGrad())
    for p, whole in found.items():
        expected = moments(p.grad_batch)
        torch.testing.assert_close(whole, expected)
        small = [e if len(e) <= 3 else e.diagonal() for e in expected]
        torch.testing.assert_close(p.axis_gram, small)


def test_axes_without_individual_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[torch.Size] = []
    all_rows = Rows.all_rows
    monkeypatch.setattr(Rows, "all_rows", lambda self: formed.append(self.param.shape) or all_rows(self))
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)).double())
    backward(model, loss_fn, *data(), E.AxisGram())
    assert all(len(shape) == 1 for shape in formed), "of biases only"


def test_axes_of_a_data_set() -> None:
    """Batches of different sizes, and a running mean on the way."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double(), data()
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    total = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.AxisGram(), E.DiagJTJExact())
    net, loss_fn = extended(model)
    backward(net, loss_fn, x, y, E.AxisGram(), E.DiagJTJExact())
    for name, p in model.named_parameters():
        torch.testing.assert_close([m.double() for m in total[name]["axis_gram"]], p.axis_gram)
        torch.testing.assert_close(total[name]["diag_jtj_exact"].double(), p.diag_jtj_exact)


# ---- outputs -------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:L1Loss is")
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.MSELoss(reduction="sum")])
@pytest.mark.parametrize("factor", [1.0, -2.0])
def test_only_outputs_count(loss: nn.Module, factor: float) -> None:
    """The Hessian of the loss, its divisor and its factor do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)).double()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 2).double()
    expected = [
        torch.stack([torch.autograd.grad(out, p, retain_graph=True)[0].square() for out in model(x).flatten()]).sum(0)
        for p in model.parameters()
    ]
    net, loss_fn = extended(model, loss)
    for chunk in (None, 1):
        with bpk.backpack(E.DiagJTJExact(), E.DiagJTJMC(3000), chunk_size=chunk):
            (factor * loss_fn(net(x), y)).backward()
        for p, right in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.diag_jtj_exact, right)
            assert (p.diag_jtj_mc - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize(("flat", "subsampling"), [(True, None), (False, None), (False, [2, 0])])
def test_outputs_one_by_one(flat: bool, subsampling: list[int] | None) -> None:
    """In the order of `[N, C, T]`, whatever the layout and however many columns travel at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(3, 5, 4).double(), torch.randint(2, (3, 5))
    some = range(3) if subsampling is None else subsampling
    outputs = net(x)[list(some)].permute(2, 1, 0).flatten(0, 1)  # [C T, n]
    squares = [
        [torch.autograd.grad(o, p, retain_graph=True)[0] ** 2 for o in outputs.flatten()] for p in net.parameters()
    ]
    expected = [torch.stack(each).unflatten(0, (10, len(some))).sum(1) for each in squares]
    layers = [*net, nn.Flatten(0, 1)] if flat else [*net, Permute(0, 2, 1)]
    model, loss_fn = extended(nn.Sequential(*layers))
    for chunk in (None, 3):
        with bpk.backpack(E.OutputDiagJTJExact(subsampling), chunk_size=chunk):
            loss_fn(model(x), y.flatten() if flat else y).backward()
        for p, right in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.diag_jtj_exact_output, right)


# ---- some samples of what functions use ------------------------------------------------------------------
class Scaled(nn.Module):
    """A parameter that functions use in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.last = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x * self.scale).tanh() * self.scale.exp())


@pytest.mark.filterwarnings("ignore:These go")
def test_samples_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of the considered samples at a time."""
    torch.manual_seed(0)
    model, loss_fn = extended(Scaled().double())
    x, y = data()
    backward(model, loss_fn, x, y, E.TokenL2Grad())
    expected = model.scale.token_l2[[3, 1, 4]]
    monkeypatch.setattr(squares, "PIECE", 1)
    monkeypatch.setattr(rows, "PIECE", 1)
    backward(model, loss_fn, x, y, E.TokenL2Grad(subsampling=[3, 1, 4]))
    torch.testing.assert_close(model.scale.token_l2, expected)
