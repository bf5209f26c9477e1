"""Linear operators of a data set against matrices by plain autograd, in all forms of vectors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import bpk
from bpk import operators
from bpk.jacobians.core.random_state import RandomState
from bpk.utils.kroneckers import kfacs_to_mat

DOUBLE = torch.float64


class Attention(nn.Module):
    """A Transformer that predicts a class at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x))).flatten(0, 1)


class Tied(nn.Module):
    """A weight that is used twice, by a function too, and a parameter that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.ones(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.tanh(x @ self.weight) @ self.weight))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(18, 3)
    )


def lstm() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.reshape(-1, 2, 2))[0][:, -1])

    return Last()


def classes(n: int = 7) -> Tensor:
    return torch.arange(n) % 3


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mean": (nn.CrossEntropyLoss, classes),
    "ignored": (lambda: nn.CrossEntropyLoss(ignore_index=1), classes),
    "weighted": (lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=DOUBLE)), classes),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), classes),
    "mse": (nn.MSELoss, lambda: torch.randn(7, 3, dtype=DOUBLE)),
    "mse sum": (lambda: nn.MSELoss(reduction="sum"), lambda: torch.randn(7, 3, dtype=DOUBLE)),
}


def matrices(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The matrices themselves, by torch's own Jacobians and Hessians."""
    names, params = zip(*model.named_parameters(), strict=True)
    sizes = [p.numel() for p in params]

    def output(flat: Tensor) -> Tensor:
        parts = [v.view_as(p) for v, p in zip(flat.split(sizes), params, strict=True)]
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(model, dict(zip(names, parts, strict=True)), (x,))

    at = torch.cat([p.detach().flatten() for p in params])
    z = output(at)
    jacobian = torch.autograd.functional.jacobian(output, at)
    of_loss = torch.autograd.functional.hessian(lambda out: loss_fn(out, y), z)
    flat = jacobian.flatten(0, -2)
    return {
        "Jacobian": flat,
        "GGN": flat.T @ of_loss.reshape(z.numel(), z.numel()) @ flat,
        "Hessian": torch.autograd.functional.hessian(lambda flat: loss_fn(output(flat), y), at),
    }


def batches(x: Tensor, y: Tensor, per_row: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Unequal ones."""
    return [(x[a:b], y[a * per_row : b * per_row]) for a, b in ((0, 1), (1, 3), (3, len(x)))]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", [mlp, conv, Tied, lstm])
def test_matrices_of_batches_are_those_of_one_large_batch(network: Callable[[], nn.Module], loss: str) -> None:
    torch.manual_seed(0)
    model, x = network().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE)
    loss_fn, y = LOSSES[loss][0](), LOSSES[loss][1]()
    for name, want in matrices(model, loss_fn, x, y).items():
        for data in (batches(x, y), (x, y)):
            operator = getattr(operators, name)(model, loss_fn, data)
            torch.testing.assert_close(operator.to_dense(), want)
            v = torch.randn(want.shape[1], dtype=DOUBLE)
            torch.testing.assert_close(operator @ v, want @ v)
            torch.testing.assert_close(operator.T.to_dense(), want.T)
            assert operator.shape == want.shape


@pytest.mark.parametrize("name", ["GGN", "Hessian", "Jacobian"])
def test_attention(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = Attention().to(DOUBLE), torch.randint(5, (4, 3)), torch.arange(12) % 3
    want = matrices(model, nn.CrossEntropyLoss(), x, y)[name]
    for training in (True, False):  # torch has a fused path in eval mode
        operator = getattr(operators, name)(model.train(training), nn.CrossEntropyLoss(), batches(x, y, 3))
        torch.testing.assert_close(operator.to_dense(), want)
        torch.testing.assert_close(operator @ want[0], want @ want[0])


@pytest.mark.parametrize("blocks", ["layer", "parameter"])
@pytest.mark.parametrize("name", ["GGN", "Hessian"])
def test_blocks(name: str, blocks: str) -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    want = matrices(model, nn.CrossEntropyLoss(), x, y)[name]
    sizes = {"layer": [15, 12], "parameter": [12, 3, 9, 3]}[blocks]
    mask = torch.block_diag(*[torch.ones(s, s, dtype=DOUBLE) for s in sizes])
    found = getattr(operators, name)(model, nn.CrossEntropyLoss(), batches(x, y), blocks=blocks).to_dense()
    torch.testing.assert_close(found, want * mask)


@pytest.mark.parametrize("loss", LOSSES)
def test_empirical_fisher(loss: str) -> None:
    torch.manual_seed(0)
    model, x = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE)
    loss_fn, y = LOSSES[loss][0](), LOSSES[loss][1]()
    summed = LOSSES[loss][0]()
    summed.reduction = "sum"
    z = model(x).detach()
    divisor = float(summed(z, y) / loss_fn(z, y))
    rows = []
    for n in range(7):
        grads = torch.autograd.grad(summed(model(x[n : n + 1]), y[n : n + 1]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    want = torch.stack(rows).T @ torch.stack(rows) / divisor
    for data in (batches(x, y), (x, y)):
        torch.testing.assert_close(operators.EmpiricalFisher(model, loss_fn, data).to_dense(), want)


def test_fisher_is_the_ggn_in_the_mean_and_the_same_in_every_product() -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    want = matrices(model, nn.CrossEntropyLoss(), x, y)["GGN"]
    fisher = operators.Fisher(model, nn.CrossEntropyLoss(), batches(x, y), mc_samples=20000)
    state = RandomState.now()
    found = fisher.to_dense()
    assert not state.moved(), "the user's random numbers are as they were"
    assert (found - want).norm() < 0.02 * want.norm()
    few = operators.Fisher(model, nn.CrossEntropyLoss(), batches(x, y), chunk_size=4)
    matrix = few.to_dense()
    torch.testing.assert_close(few.to_dense(), matrix)
    torch.testing.assert_close(matrix, matrix.T)
    assert torch.linalg.matrix_rank(matrix) <= 7
    other = operators.Fisher(model, nn.CrossEntropyLoss(), batches(x, y), seed=1)
    assert not torch.allclose(other.to_dense(), matrix)


def test_forms_of_vectors() -> None:
    torch.manual_seed(0)
    model, x, y = mlp(), torch.randn(7, 4), classes()
    operator = operators.GGN(model, nn.CrossEntropyLoss(), (x, y))
    several = torch.randn(operator.shape[1], 3)
    want = operator @ several
    sizes = [p.numel() for p in model.parameters()]
    parts = [v.reshape(*p.shape, 3) for v, p in zip(several.split(sizes), model.parameters(), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    as_list = operator @ parts
    torch.testing.assert_close(torch.cat([v.flatten(0, -2) for v in as_list]), want)
    as_dict = operator @ dict(reversed(list(zip(names, parts, strict=True))))
    assert list(as_dict) == names
    torch.testing.assert_close(list(as_dict.values()), as_list)
    torch.testing.assert_close(torch.cat([v.flatten() for v in operator @ [v[..., 0] for v in parts]]), want[:, 0])
    torch.testing.assert_close(operator @ several[:, :1], want[:, :1])


@pytest.mark.parametrize(
    "vectors",
    [
        torch.ones(26),
        torch.ones(2, 27),
        [torch.ones(27)],
        [torch.ones(27, 2)] * 4,
        {"0.weight": torch.ones(3, 4)},
        torch.ones(27, dtype=DOUBLE),
        [None] * 4,
        3.0,
        nn.Linear(2, 2),
    ],
)
def test_vectors_that_do_not_fit_are_refused(vectors: Any) -> None:
    operator = operators.GGN(mlp(), nn.CrossEntropyLoss(), (torch.randn(7, 4), classes()))
    with pytest.raises(ValueError, match="Do: "):
        operator @ vectors


def test_parameters_that_the_loss_does_not_depend_on_no_vectors_and_empty_batches() -> None:
    """Errors of Python before."""
    torch.manual_seed(0)
    model, batch = Tied().double(), (torch.randn(7, 4, dtype=DOUBLE), classes())
    whole = operators.Hessian(model, nn.CrossEntropyLoss(), batch)
    none = torch.zeros(whole.shape[0], 0, dtype=DOUBLE)
    blocks = operators.Hessian(model, nn.CrossEntropyLoss(), batch, blocks="parameter").to_dense()
    torch.testing.assert_close(blocks[:16, :16], whole.to_dense()[:16, :16])
    factors = operators.KFAC(model, nn.CrossEntropyLoss(), batch)
    assert not blocks[16:18].any() and not factors.to_dense()[16:18].any()
    for split in (False, True):
        torch.testing.assert_close(factors.inverse(0.5, split).to_dense()[16:18, 16:18], 2 * torch.eye(2, dtype=DOUBLE))
    for operator in (whole, operators.GGN(model, nn.CrossEntropyLoss(), batch), factors, factors.inverse(0.5)):
        assert (operator @ none).shape == none.shape
    assert (operators.Jacobian(model, None, [batch]) @ none).shape == (21, 0)
    empty = operators.GGN(model, nn.CrossEntropyLoss(), [(batch[0][:0], batch[1][:0]), batch])
    whole = operators.GGN(model, nn.CrossEntropyLoss(), batch)
    torch.testing.assert_close(empty.to_dense(), whole.to_dense())


def test_products_are_those_at_the_parameters_of_their_time() -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    operator = operators.GGN(model, nn.CrossEntropyLoss(), (x, y))
    operator.to_dense()
    for p in model.parameters():
        p.data.mul_(2)
    torch.testing.assert_close(operator.to_dense(), matrices(model, nn.CrossEntropyLoss(), x, y)["GGN"])


def test_parameters_that_were_replaced_since_are_refused() -> None:
    """Products were those of the old ones in one half, and of the new ones in the other."""
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    matrix, jacobian = operators.GGN(model, nn.CrossEntropyLoss(), (x, y)), operators.Jacobian(model, None, (x, y))
    v, u = (torch.randn(n, dtype=DOUBLE) for n in reversed(jacobian.shape))
    for change in (
        lambda: model[0].requires_grad_(False),
        lambda: model.float(),
        lambda: model.double().load_state_dict({k: p.clone() for k, p in model.state_dict().items()}, assign=True),
    ):
        model.requires_grad_(True)
        matrix @ v
        change()
        for work in (lambda: matrix @ v, lambda: jacobian @ v, lambda: jacobian.T @ u):
            with pytest.raises(ValueError, match=r"'0.weight' was replaced, converted or frozen.*\n.*\n.*anew"):
                work()
        model.double()


def test_a_model_that_was_put_into_training_mode_since_is_checked_again() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).to(DOUBLE).eval()
    matrix = operators.GGN(model, nn.CrossEntropyLoss(), (torch.randn(7, 4, dtype=DOUBLE), classes()))
    v = torch.randn(15, dtype=DOUBLE)
    before = matrix @ v
    with pytest.raises(ValueError, match=r"two results for one input.*\n.*\n.*eval"):
        _ = model.train() and matrix @ v
    model.eval()
    assert torch.equal(matrix @ v, before)


def test_extended_models_and_contexts_around_a_product() -> None:
    torch.manual_seed(0)
    model, x, y = bpk.extend(mlp().to(DOUBLE)), torch.randn(7, 4, dtype=DOUBLE), classes()
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    want = matrices(model, loss_fn, x, y)
    with bpk.backpack(bpk.extensions.BatchGrad()):
        torch.testing.assert_close(operators.GGN(model, loss_fn, (x, y)).to_dense(), want["GGN"])
        torch.testing.assert_close(
            operators.Hessian(model, loss_fn, (x, y)) @ want["GGN"][0], want["Hessian"] @ want["GGN"][0]
        )
        loss_fn(model(x), y).backward()
    assert all(p.grad_batch.shape == (7, *p.shape) for p in model.parameters())


def test_nothing_is_left_on_the_model() -> None:
    model, x, y = mlp(), torch.randn(7, 4), classes()
    for name in ("GGN", "Hessian", "EmpiricalFisher", "KFAC", "Jacobian"):
        operator = getattr(operators, name)(model, nn.CrossEntropyLoss(), (x, y))
        operator @ torch.ones(operator.shape[1])
    assert all(p.grad is None and not vars(p) for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- Kronecker factors --------------------------------------------------------------------------


@pytest.mark.parametrize("mc_samples", [None, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_kfac_is_that_of_one_large_batch(loss: str, mc_samples: int | None) -> None:
    torch.manual_seed(0)
    model, x = conv().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE)
    loss_fn, y = LOSSES[loss][0](), LOSSES[loss][1]()
    operator = operators.KFAC(model, loss_fn, batches(x, y), mc_samples=mc_samples)
    blocks = [kfacs_to_mat(factors) for factors in operator.factors.values()]
    torch.testing.assert_close(operator.to_dense(), torch.block_diag(*blocks))
    if mc_samples is None:
        model, loss_fn = bpk.extend(model), bpk.extend(loss_fn)
        with bpk.backpack(bpk.extensions.KFLR()):
            loss_fn(model(x), y).backward()
        torch.testing.assert_close(blocks, [kfacs_to_mat(p.kflr) for p in model.parameters()])


@pytest.mark.parametrize("split", [False, True])
def test_inverse_of_kfac(split: bool) -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    operator = operators.KFAC(model, nn.CrossEntropyLoss(), (x, y))
    found = operator.inverse(0.1, split=split).to_dense()
    if not split:
        torch.testing.assert_close(found, torch.linalg.inv(operator.to_dense() + 0.1 * torch.eye(27, dtype=DOUBLE)))
        return
    wanted = []
    for factors in operator.factors.values():
        if len(factors) == 1:
            wanted.append(factors[0] + 0.1 * torch.eye(len(factors[0]), dtype=DOUBLE))
            continue
        ratio = (factors[0].diagonal().mean() / factors[1].diagonal().mean()).sqrt()
        shifts = [0.1**0.5 * ratio, 0.1**0.5 / ratio]
        wanted.append(
            kfacs_to_mat([f + s * torch.eye(len(f), dtype=DOUBLE) for f, s in zip(factors, shifts, strict=True)])
        )
    torch.testing.assert_close(found, torch.linalg.inv(torch.block_diag(*wanted)))


class Shifted(nn.Module):
    """A parameter of its own, whose block is kept as a sparse diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.head = nn.Parameter(torch.randn(70, 64)), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x[:, None, None] * self.shift).tanh().sum(1))


def test_kfac_of_a_model_in_half_precision() -> None:
    """Factors are added up in float32, and multiply vectors in the precision of the model."""
    torch.manual_seed(0)
    model, x, y = mlp().bfloat16(), torch.randn(7, 4).bfloat16(), classes()
    v = torch.randn(27).bfloat16()
    found = []
    for dtype in (torch.bfloat16, DOUBLE):
        operator = operators.KFAC(model.to(dtype), nn.CrossEntropyLoss(), batches(x.to(dtype), y))
        each = operator, operator.inverse(0.5), operator.inverse(torch.tensor(0.5), split=True)
        found.append([matrix @ v.to(dtype) for matrix in each])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours - theirs).abs().max()) < 0.03 * float(theirs.abs().max())


def test_kfac_with_a_sparse_factor_has_an_inverse() -> None:
    torch.manual_seed(0)
    operator = operators.KFAC(Shifted(), nn.CrossEntropyLoss(), (torch.randn(7), classes()))
    assert operator.factors["shift"][0].is_sparse
    v = torch.randn(operator.shape[1], 2)
    solved = operator.inverse(0.1) @ v
    torch.testing.assert_close(operator @ solved + 0.1 * solved, v, rtol=1e-3, atol=1e-3)


# ---- refusals -----------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return self.linear(x)


class Changing(list):
    """Other data in every pass."""

    def __iter__(self) -> Any:
        yield torch.randn(7, 4), classes()


def test_refusals() -> None:
    x, y = torch.randn(7, 4), classes()
    counting, loss_fn = Noisy(), nn.CrossEntropyLoss()
    counting.counts = True
    tail = nn.Linear(4, 3)
    cases = [
        (nn.Sequential(nn.Dropout(0.5), tail), (x, y), "dropout"),
        (nn.Sequential(nn.BatchNorm1d(4), tail), (x, y), "statistics of the batch"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), tail).eval(), (x, y), "statistics of the batch"),
        (counting, (x, y), "changes the buffer"),
        (tail, Changing(), "second pass"),
        (tail, iter([(x, y)]), "used once"),
        (tail, [], "without batches"),
        (tail, [x], "as batch 0"),
        (nn.Linear(4, 3).requires_grad_(False), (x, y), "without trainable"),
        (nn.LSTM(4, 3), (x, y), "returns tuple"),
        (nn.Sequential(tail, nn.Linear(3, 3).double()), (x, y), "several dtypes"),
    ]
    for model, data, message in cases:
        with pytest.raises(ValueError, match=message):
            operators.GGN(model, loss_fn, data)
    assert counting.calls == 0, "the buffer is as it was"
    with pytest.raises(ValueError, match="a loss that is no module"):
        operators.GGN(tail, nn.functional.cross_entropy, (x, y))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="blocks="):
        operators.GGN(tail, loss_fn, (x, y), blocks="block")
    with pytest.raises(ValueError, match="no loss"):
        operators.GGN(tail, nn.CrossEntropyLoss(reduction="none"), (x, y))
    with pytest.raises(ValueError, match="damping must be positive"):
        operators.KFAC(tail, loss_fn, (x, y)).inverse(0.0)
    operators.GGN(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4), tail).eval(), loss_fn, (x, y)) @ torch.ones(23)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Embedding(5, 3), torch.tensor([2])),
        (nn.Embedding(3, 3), torch.tensor([1])),
        (nn.ConvTranspose2d(3, 4, 1), torch.arange(3.0).view(1, 3, 1, 1)),
    ],
    ids=["embedding", "square embedding", "transposed convolution"],
)
def test_factors_of_parameters_whose_first_axis_is_that_of_the_input(layer: nn.Module, x: Tensor) -> None:
    """Of one sample with one position the factors are exact, and so are entries in the order of the parameter."""
    model, loss_fn = copy.deepcopy(layer).double(), nn.MSELoss()
    x = x.double() if x.is_floating_point() else x
    batch = x, torch.zeros_like(model(x))
    factors = bpk.operators.KFAC(model, loss_fn, batch)
    expected = bpk.operators.GGN(model, loss_fn, batch, blocks="parameter").to_dense()
    inverse = torch.linalg.inv(expected + 0.3 * torch.eye(len(expected), dtype=torch.float64))
    torch.testing.assert_close(factors.to_dense(), expected)
    torch.testing.assert_close(factors.inverse(0.3).to_dense(), inverse)
    for kind in (bpk.preconditioners.KFAC, bpk.preconditioners.EKFAC):
        trained, loss_of = copy.deepcopy(model), bpk.extend(nn.MSELoss())
        first, second = (kind(trained, damping=0.3, mc_samples=None, intervals=(2, 2)) for _ in range(2))
        for preconditioner in (first, second):
            trained.zero_grad()
            with preconditioner:
                loss_of(trained(x), batch[1]).backward()
            grad = torch.cat([p.grad.flatten() for p in trained.parameters()])
            preconditioner.step()
            solved = torch.cat([p.grad.flatten() for p in trained.parameters()])
            torch.testing.assert_close(solved, inverse @ grad)
            second.load_state_dict(copy.deepcopy(first.state_dict()))  # it does not look at curvature itself


class Quartic(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).pow(4).mean()


def test_a_loss_that_does_not_tell_its_divisor_works_with_one_batch() -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1).double(), [(torch.randn(n, 3).double(), torch.randn(n, 1).double()) for n in (4, 2)]
    for operator in (operators.GGN, operators.Hessian, operators.KFAC):
        with pytest.raises(NotImplementedError, match=r"(?s)by what Quartic divides.*pass one batch, as a tuple"):
            operator(model, Quartic(), data).to_dense()
    exact = operators.GGN(model, Quartic(), data[0], blocks="parameter").to_dense()
    found = operators.KFAC(model, Quartic(), data[0]).to_dense()
    torch.testing.assert_close(found[3:, 3:], exact[3:, 3:])
