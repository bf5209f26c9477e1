"""What an earlier step has shown of a graph is used for graphs of the same form only, or tested again."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians import LinearMap
from bpk.plan.samples import forms, placement
from tests.helpers import registered

N = T = 4
"""As many steps as samples: shapes do not tell them apart."""


def individual(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Individual gradients by a loop over samples."""
    rows = []
    for n in range(len(x)):
        loss = loss_fn(model(x[n : n + 1]), y[n : n + 1]) / len(x)
        rows.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    return [
        torch.stack([torch.zeros_like(p) if r[k] is None else r[k] for r in rows])
        for k, p in enumerate(model.parameters())
    ]


def check_rows(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> None:
    """`grad_batch` of one pass, against the loop."""
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    found = [
        p.grad_batch.clone() if hasattr(p, "grad_batch") else torch.zeros(len(x), *p.shape) for p in model.parameters()
    ]
    for p, rows, expected in zip(model.parameters(), found, individual(model, loss_fn, x, y), strict=True):
        torch.testing.assert_close(rows.to(p.dtype), expected)


def refused_or_right(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, refused: bool) -> None:
    """A quantity by sample is refused where samples mix; elsewhere it is computed, and rows are right."""
    loss = loss_fn(model(x), y)
    if refused:
        with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.BatchDiagGGNExact()):
            loss.backward()
    else:
        with bpk.backpack(E.BatchDiagGGNExact()):
            loss.backward()
        check_rows(model, loss_fn, x, y)


class Rearranged(nn.Module):
    """A layer in between that rearranges axes; which, is up to its options."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 4), layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(self.first(x)))).mean(0)


class Order(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dims = (1, 0, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


def as_fresh(model: nn.Module, loss_fn: nn.Module, x: tuple[Tensor, ...], y: Tensor) -> None:
    """Individual gradients of a model that has seen other passes are those of a copy that has not."""
    found = []
    for m, f in ((model, loss_fn), (bpk.extend(copy.deepcopy(model)), bpk.extend(copy.deepcopy(loss_fn)))):
        with bpk.backpack(E.BatchGrad()):
            f(m(*x), y).backward()
        found.append([p.grad_batch.clone() for p in m.parameters()])
    torch.testing.assert_close(*found)


def test_a_layer_that_is_left_to_autograd_has_other_options() -> None:
    """It rearranges the batch axis, so that functions are seen in its place: those of this pass, not of the first."""
    with registered(LinearMap(Order, axes=3)):
        model, loss_fn = bpk.extend(Rearranged(Order()).double()), bpk.extend(nn.CrossEntropyLoss())
        x, y = torch.randn(4, 4, 3).double(), torch.arange(4) % 3
        for dims in ((1, 0, 2), (2, 1, 0), (1, 0, 2)):
            model.layer.dims = dims
            as_fresh(model, loss_fn, (x,), y)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_looks_at_another_axis() -> None:
    """Samples are along the second axis: a softmax along the third keeps them apart, and one along the second not."""
    model, loss_fn = bpk.extend(Rearranged(nn.Softmax(2)).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 4, 3).double(), torch.arange(4) % 3
    for dim in (2, 1, 0, 2):
        model.layer.dim = dim
        as_fresh(model, loss_fn, (x,), y)


class Padded(nn.Module):
    """Rows that are constants before and behind those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.before = nn.Linear(3, 3), nn.Linear(3, 2), 2

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(5, 3, dtype=x.dtype)
        return self.last(torch.cat([ones[: self.before], self.first(x), ones[self.before :]]))


def test_constants_of_other_sizes_are_joined_with_what_a_layer_returns() -> None:
    """Their sizes are in none of the attributes of a node."""
    model, loss_fn = bpk.extend(Padded().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3).double(), torch.arange(9) % 2
    for before in (2, 3, 0, 5):
        model.before = before
        as_fresh(model, loss_fn, (x,), y)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, routes: Tensor) -> Tensor:
        return self.last(torch.tanh(routes @ self.first(x)))


@pytest.mark.filterwarnings("ignore")
def test_samples_that_were_mixed_are_apart() -> None:
    """By a matrix of the data, which is a permutation later: rows are not taken for samples in order any more."""
    model, loss_fn = bpk.extend(Routed().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y, order = torch.randn(5, 3).double(), torch.arange(5) % 2, torch.tensor([2, 0, 1, 4, 3])
    for routes in (torch.rand(5, 5).double(), torch.eye(5).double()[order], torch.rand(5, 5).double()):
        as_fresh(model, loss_fn, (x, routes), y)
    expected = individual(nn.Sequential(model.first, nn.Tanh(), model.last), loss_fn, x[order], y)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x, torch.eye(5).double()[order]), y).backward()
    for p, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, rows)


class Weighted(nn.Module):
    """Steps as rows, which a softmax weighs; its axis may be that of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.softmax, self.last = nn.Linear(2, 3), nn.Softmax(-1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.softmax(self.first(x.flatten(0, 1))).unflatten(0, x.shape[:2]).mean(1))


def test_a_layer_that_begins_to_mix_samples() -> None:
    """Its options are no part of a form, but whether it mixes is."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Weighted().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 2, 2).double(), torch.arange(3)
    for dim in (-1, 0, -1):
        model.softmax.dim = dim
        if dim == 0:
            with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.BatchGrad()):
                loss_fn(model(x), y).backward()
        else:
            check_rows(model, loss_fn, x, y)


class Flipping(nn.Module):
    """`[N, T, D]`, in which the first layer may be called time first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)
        self.flip = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.transpose(0, 1)).transpose(0, 1) if self.flip else self.a(x)
        return self.b(h.tanh()).sum(1)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_the_batch_axis_moves_from_step_to_step(order: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Flipping().double()), bpk.extend(nn.CrossEntropyLoss())
    for flip in (*order, *order):
        model.flip = flip
        check_rows(model, loss_fn, torch.randn(N, T, 3).double(), torch.randint(2, (N,)))


class Centred(nn.Module):
    """Subtracts the mean over samples in training, a constant in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - h.mean(0) if self.training else h - 0.1)


@pytest.mark.parametrize("training", [(True, False), (False, True)])
def test_samples_that_mix_in_one_mode_only(training: tuple[bool, ...]) -> None:
    """Per sample, one mode is refused and the other is right, whatever comes first."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Centred().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 3).double(), torch.randint(2, (N,))
    for mode in (*training, *training):
        model.train(mode)
        refused_or_right(model, loss_fn, x, y, refused=mode)


class Gated(nn.Module):
    """A gate hides that samples mix, as in layers that begin as the identity."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(3, 5), nn.Linear(5, 2), mix
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + self.gate * self.mix(h))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(0, keepdim=True),
    "softmax over samples": lambda h: h.softmax(0) * 3,
    "matrix": lambda h: torch.full((len(h), len(h)), 0.5, dtype=h.dtype) @ h,
    "cumsum": lambda h: h.cumsum(0),
    "flip": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 0),
    "permuted by index": lambda h: h[torch.arange(len(h)).roll(1)],
    "largest": lambda h: h.amax(0),
    "norm": lambda h: h / h.norm(),
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_a_gate_that_opens(mix: Callable[[Tensor], Tensor]) -> None:
    """While it is shut, numbers are right; once it is open, the same graph is refused."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Gated(mix).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 3).double(), torch.randint(2, (N,))
    for gate in (0.0, 0.0, 1.0, 1.0, 0.0):
        model.gate.fill_(gate)
        refused_or_right(model, loss_fn, x, y, refused=bool(gate))


def test_an_order_of_samples_that_changes() -> None:
    """Indices are data: the same graph sends rows to other samples."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.order = nn.Linear(3, 5), nn.Linear(5, 2), torch.arange(N)

        def forward(self, x: Tensor) -> Tensor:
            back = self.order.argsort()[: len(x)] if len(x) == N else slice(None)
            h = self.a(x[self.order] if len(x) == N else x)
            return self.b(h.tanh()[back])

    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Shuffled().double()), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(6):
        model.order = torch.randperm(N)
        check_rows(model, loss_fn, torch.randn(N, 3).double(), torch.randint(2, (N,)))


class LastSteps(nn.Module):
    """Classifies each sample by its last step, which data tell, and by a sum of steps that is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.lengths = torch.zeros(N, dtype=torch.long)
        self.crossed = False

    def forward(self, x: Tensor) -> Tensor:
        h, n = torch.tanh(self.layer(x)), len(x)
        lengths = self.lengths if n == N else self.lengths[self.alone : self.alone + 1]
        last = h[torch.arange(n), lengths]
        picked = h.gather(1, lengths[:, None, None].expand(n, 1, 4))[:, 0]
        out = self.inner(last) * picked.topk(4, -1).values
        if self.crossed:
            out = out[torch.arange(n).flip(0)]
        return self.head(out)


@pytest.mark.parametrize("crossed", [False, True])
def test_what_data_pick_is_followed(crossed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradients are sent to find out where samples are."""
    torch.manual_seed(0)
    model, loss_fn, asked = bpk.extend(LastSteps().double()), bpk.extend(nn.CrossEntropyLoss()), []
    sent = placement.confirms
    monkeypatch.setattr(placement, "confirms", lambda *args: asked.append(args) or sent(*args))
    for number in range(5):
        model.lengths, model.crossed = torch.randint(T, (N,)), crossed and number > 2
        x, y = torch.randn(N, T, 3).double(), torch.randint(2, (N,))
        with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
            loss_fn(model(x), y).backward()
        order = torch.arange(N).flip(0) if model.crossed else torch.arange(N)  # rows follow the loss
        for n in range(N):
            model.alone, model.crossed = int(order[n]), False
            loss = loss_fn(model(x[order[n]][None]), y[n][None]) / N
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for p, grad in zip(model.parameters(), grads, strict=True):
                torch.testing.assert_close(p.grad_batch[n], grad)
            model.crossed = crossed and number > 2
    assert not asked


class Experts(nn.Module):
    """Each step is sent to one of two experts, which data tell; how many come to each varies from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.head = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 4)] * 2), nn.Linear(4, 2)
        self.experts[1] = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.tanh(self.first(x)).flatten(0, 1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = (((flat[:, 0] > 0).long() == number).nonzero())[:, 0]
            out = out.index_add(0, at, torch.sigmoid(expert(flat[at])))
        return self.head(out.unflatten(0, x.shape[:2]).mean(1))


def test_steps_that_data_send_to_experts() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Experts().double()), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(5):
        check_rows(model, loss_fn, torch.randn(N, T, 3).double(), torch.randint(2, (N,)))
        x = torch.randn(N, T, 3).double()
        for _ in range(2):  # the same rows again
            check_rows(model, loss_fn, x, torch.randint(2, (N,)))


def test_short_lived_models() -> None:
    """A new model may live where an old one was."""
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, T, 3).double(), torch.randint(2, (N,))
    for k in range(200):
        model = bpk.extend(Flipping().double())
        model.flip = bool(k % 3)
        check_rows(model, loss_fn, x, y)
        del model


def test_forms_are_bounded_and_dropped() -> None:
    loss_fn, model = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(Flipping())
    model.flip = True
    for steps in range(1, 40):
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(torch.randn(3, steps, 3)), torch.randint(2, (3,))).backward()
    assert 0 < len(forms.FORMS[loss_fn]) <= forms.MOST
    del model
    gc.collect()
    other = bpk.extend(Flipping())
    other.flip = True
    with bpk.backpack(E.BatchGrad()):
        loss_fn(other(torch.randn(3, 2, 3)), torch.randint(2, (3,))).backward()
    assert len(forms.FORMS[loss_fn]) == 1
    gone = weakref.ref(loss_fn)
    del loss_fn, other
    gc.collect()
    assert gone() is None  # its forms were known by a weak reference to it


# ---- proofs --------------------------------------------------------------------------------------------
def windows(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x).view(-1, 2, 2, 5).permute(0, 2, 1, 3).reshape(-1, 5)
    return m.b(torch.relu(h).view(len(x), 4, 5).sum(1))


def heads(m: nn.Module, x: Tensor) -> Tensor:
    q = m.a(x).transpose(0, 1)
    weights = torch.softmax(torch.bmm(q.transpose(0, 1), q.permute(1, 2, 0)), -1)
    return m.b((weights @ q.transpose(0, 1)).mean(1))


def pooled(m: nn.Module, x: Tensor) -> Tensor:
    h = nn.functional.max_pool1d(m.a(x).transpose(1, 2), 2)
    return m.b(nn.functional.pad(h, (1, 1)).transpose(1, 2).logsumexp(1))


def gathered(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h.gather(1, h.argmax(1, keepdim=True)).squeeze(1).sin())


@pytest.mark.parametrize("forward, proven", [(windows, True), (heads, True), (pooled, True), (gathered, False)])
def test_what_can_be_proven(forward: Callable[[nn.Module, Tensor], Tensor], proven: bool) -> None:
    """Where data decide what goes where, there is no proof; the numbers are right in any case."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Net().double()), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(3):
        check_rows(model, loss_fn, torch.randn(N, T, 3).double(), torch.randint(2, (N,)))
    assert {form.proven for form in forms.FORMS[loss_fn].values()} == {proven}


def test_a_function_of_the_user_proves_nothing() -> None:
    """Nor does one that is called like one of torch's."""

    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, h: Tensor, amount: Tensor) -> Tensor:
            ctx.save_for_backward(amount)
            return h + amount * h.mean(0)

        @staticmethod
        def backward(ctx: object, g: Tensor) -> tuple[Tensor, None]:
            (amount,) = ctx.saved_tensors
            return g + amount * g.mean(0).expand_as(g), None

    model = bpk.extend(Gated(lambda h: h).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 3).double(), torch.randint(2, (N,))
    for amount in (0.0, 1.0):
        loss = loss_fn(model.b(Mul.apply(model.a(x), torch.tensor(amount).double())), y)
        if amount:
            with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.BatchDiagGGNExact()):
                loss.backward()
        else:
            with bpk.backpack(E.BatchDiagGGNExact()):
                loss.backward()


def test_mixed_samples_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first order they are no error, and must not cost a search in every pass."""
    from bpk.plan.samples import placement

    searches = []
    search = placement.attribute
    monkeypatch.setattr(placement, "attribute", lambda *args: searches.append(1) or search(*args))
    model, loss_fn = bpk.extend(Centred()), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(3):
        with warnings.catch_warnings(), bpk.backpack(E.BatchGrad()):
            warnings.simplefilter("ignore")
            loss_fn(model(torch.randn(N, 3)), torch.randint(2, (N,))).backward()
    assert len(searches) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("combine", [torch.add, torch.sub])
def test_a_layer_that_mixes_samples_proves_nothing(combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Not even where a weight of zero hides it, as in residual networks at the start of training."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(combine(h, self.norm(h)))

    model, loss_fn = bpk.extend(Residual()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(torch.randn(N, 3)), torch.randint(2, (N,))).backward()
    assert (loss_fn in forms.FORMS) is (combine is torch.sub), "a sum is a call, and nothing is to be proven"
    assert not any(form.proven for form in forms.FORMS.get(loss_fn, {}).values())
