"""Operators in other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import operators
from tests.bpk.operators.test_operators import DOUBLE, LOSSES, batches, classes, conv, matrices, mlp
from tests.random_networks.modules import Cube


class Cubed(nn.Module):
    """A function of a user's own, without forward mode, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 3), nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x))


def test_without_forward_mode() -> None:
    """Tangents are derivatives of those of adjoints."""
    model, x = Cubed().to(DOUBLE), torch.randn(5, 4, dtype=DOUBLE)
    params = list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True, materialize_grads=True) for z in model(x).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    operator, v = operators.Jacobian(model, None, (x, None)), torch.randn(17, 2, dtype=DOUBLE)
    torch.testing.assert_close(operator @ v, jacobian @ v)
    assert operator.adjoint().adjoint() is operator
    ggn = operators.GGN(model, nn.MSELoss(reduction="sum"), (x, torch.zeros(5, 3, dtype=DOUBLE)))
    torch.testing.assert_close(ggn @ v[:, 0], 2 * jacobian.T @ jacobian @ v[:, 0])


class TwoNames(nn.Module):
    """A layer that has two names, one in a container, and a weight that is in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.part = nn.Sequential(self.first, nn.Tanh())
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.part(self.first(x)))
        return out


@pytest.mark.parametrize("columns", [1, 3])
def test_layers_with_two_names_keep_their_parameters(columns: int) -> None:
    """Torch's `functional_call` leaves other tensors in their place (seen in 2.13)."""
    model, x = TwoNames().to(DOUBLE), torch.randn(5, 4, dtype=DOUBLE)
    before = dict(model.named_parameters())
    rows = [torch.autograd.grad(z, [*before.values()], retain_graph=True) for z in model(x).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    ggn = operators.GGN(model, nn.MSELoss(reduction="sum"), (x, torch.zeros(5, 4, dtype=DOUBLE)))
    for _ in range(2):
        v = torch.randn(len(jacobian.T), columns, dtype=DOUBLE)
        torch.testing.assert_close(ggn @ v, 2 * jacobian.T @ jacobian @ v)
        assert all(p is before[name] for name, p in model.named_parameters())


class Multiplied(nn.Module):
    """Products of some features each, by a function that torch takes for a constant in forward mode (seen in 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([0, 1, 1, 0]).expand(len(x), 4)
        return torch.ones(len(x), 2, dtype=x.dtype).scatter_reduce(1, places, self.linear(x), "prod")


class Inverted(nn.Module):
    """A covariance of each sample, by a function that torch differentiates wrongly in forward mode (seen in 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.eye(2, dtype=x.dtype) + 0.1 * self.linear(x).unflatten(1, (2, 2)).tril()
        return torch.cholesky_inverse(factors)[:, 1]


@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("kind", [Multiplied, Inverted])
def test_without_a_forward_mode_that_torch_would_say(vectors: int, kind: type[nn.Module]) -> None:
    model, x = kind().to(DOUBLE), torch.randn(5, 3, dtype=DOUBLE)
    params = list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True) for z in model(x).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    v = torch.randn(16, vectors, dtype=DOUBLE)
    torch.testing.assert_close(operators.Jacobian(model, None, (x, None)) @ v, jacobian @ v)
    ggn = operators.GGN(model, nn.MSELoss(reduction="sum"), (x, torch.zeros(5, 2, dtype=DOUBLE)))
    torch.testing.assert_close(ggn @ v, 2 * jacobian.T @ jacobian @ v)


class Guided(nn.Module):
    """Compares with what a part of itself says, through which no gradient is to go."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).tanh()
        return self.student(x) * target


@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("blocks", ["whole", "layer"])
def test_what_a_model_computes_without_gradients_is_constant(vectors: int, blocks: Literal["whole", "layer"]) -> None:
    model, x = Guided().to(DOUBLE), torch.randn(5, 3, dtype=DOUBLE)
    params = list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True, materialize_grads=True) for z in model(x).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    v, data = torch.randn(32, vectors, dtype=DOUBLE), (x, torch.zeros(5, 4, dtype=DOUBLE))
    torch.testing.assert_close(operators.Jacobian(model, None, (x, None)) @ v, jacobian @ v)
    ggn = operators.GGN(model, nn.MSELoss(reduction="sum"), data, blocks=blocks)
    torch.testing.assert_close(ggn @ v, 2 * jacobian.T @ jacobian @ v)
    assert not (operators.Jacobian(model, None, (x.requires_grad_(), None)) @ v).requires_grad


class Bagged(nn.Module):
    """Weighted bags of tokens, given by offsets; one is empty. Torch differentiates its kernel once, and backwards."""

    def __init__(self, mode: str, written_out: bool) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(5, 4, mode=mode, padding_idx=1), nn.Linear(4, 3)
        self.scale, self.written_out = nn.Parameter(torch.linspace(0.5, 1, 6)), written_out

    def forward(self, tokens: Tensor) -> Tensor:
        weights, offsets = self.scale if self.bag.mode == "sum" else None, torch.tensor([0, 2, 2, 5])
        if not self.written_out:
            return self.last(self.bag(tokens, offsets, weights).tanh())
        table = nn.functional.embedding(tokens, self.bag.weight)
        rows = table if weights is None else weights[:, None] * table
        parts = [[k for k in bag if tokens[k] != 1] for bag in ([0, 1], [], [2, 3, 4], [5])]
        reduce = {"sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0), "max": lambda x: x.amax(0)}[self.bag.mode]
        each = [reduce(rows[part]) if part else rows.new_zeros(4) for part in parts]
        return self.last(torch.stack(each).tanh())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str) -> None:
    tokens, y = torch.tensor([0, 3, 1, 2, 4, 0]), torch.tensor([0, 2, 1, 1])
    models = Bagged(mode, False).to(DOUBLE), Bagged(mode, True).to(DOUBLE)
    models[1].load_state_dict(models[0].state_dict())
    for kind in (operators.Hessian, operators.GGN, operators.EmpiricalFisher, operators.Jacobian):
        found, expected = (kind(m, nn.CrossEntropyLoss(), (tokens, y)) for m in models)
        v = torch.randn(found.shape[1], 2, dtype=DOUBLE)
        torch.testing.assert_close(found @ v, expected @ v)
        torch.testing.assert_close(found @ v[:, 0], expected @ v[:, 0])


class Scaled(nn.Module):
    """Padded tokens, gradients by frequency, a scalar parameter, and one number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(5, 4, padding_idx=-4), nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last((self.table(tokens) * self.scale).tanh().flatten(1)).squeeze(1)


def test_padding_scalars_and_predictions_without_an_axis() -> None:
    """The row of padding is a constant, as for the gradient; torch's forward mode does not know."""
    model, tokens = Scaled().to(DOUBLE), torch.tensor([[0, 1], [1, 1], [2, 4], [3, 3]])
    model.table.weight.data[1] = torch.randn(4)
    z, params = model(tokens), list(model.parameters())
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(e, params, retain_graph=True)]) for e in z]
    jacobian, y = torch.stack(rows), torch.rand(4, dtype=DOUBLE)
    loss_fn, slope = nn.BCEWithLogitsLoss(), z.detach().sigmoid()
    expected = {
        operators.Jacobian: jacobian,
        operators.GGN: jacobian.T @ ((slope * (1 - slope))[:, None] * jacobian) / 4,
        operators.EmpiricalFisher: jacobian.T @ ((slope - y).square()[:, None] * jacobian) / 4,
    }
    for kind, matrix in expected.items():
        torch.testing.assert_close(kind(model, loss_fn, (tokens, y)).to_dense(), matrix)
    fisher = operators.Fisher(model, loss_fn, (tokens, y), mc_samples=20000).to_dense()
    assert (fisher - expected[operators.GGN]).norm() < 0.05 * fisher.norm()
    assert operators.KFAC(model, loss_fn, (tokens, y)).to_dense().shape == (30, 30)


class Checkpointed(nn.Module):
    """Two inputs; attention, and a table with padding, in a part that may run again in each backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(3, 4), nn.Linear(4, 3), False
        self.table = nn.Embedding(5, 4, padding_idx=1)
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)

    def part(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.layer(x + self.table(tokens))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, tokens = self.first(inputs[0]), inputs[1]
        part = checkpoint(self.part, x, tokens, use_reentrant=False) if self.again else self.part(x, tokens)
        return self.last(part[:, 0])


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("name", ["GGN", "Hessian", "EmpiricalFisher", "Fisher", "Jacobian"])
def test_checkpoints_run_again_what_ran(name: str, chunk_size: int) -> None:
    """With the same kernels, and without tangents."""
    torch.manual_seed(0)
    model = Checkpointed().to(DOUBLE).eval()
    data = (torch.randn(4, 2, 3, dtype=DOUBLE), torch.randint(5, (4, 2))), torch.randint(3, (4,))
    vectors = torch.randn(sum(p.numel() for p in model.parameters()), 4, dtype=DOUBLE)
    operator = getattr(operators, name)(model, nn.CrossEntropyLoss(), data, chunk_size=chunk_size)
    expected, columns = operator @ vectors, torch.randn(operator.shape[0], 4, dtype=DOUBLE)
    transposed = operator.T @ columns
    model.again = True
    torch.testing.assert_close(operator @ vectors, expected)
    torch.testing.assert_close(operator.T @ columns, transposed)


def test_one_batch_of_several_inputs() -> None:
    """Inputs in a tuple are those of one batch."""
    model, x = Checkpointed().to(DOUBLE).eval(), (torch.randn(4, 2, 3, dtype=DOUBLE), torch.randint(5, (4, 2)))
    y, loss_fn = torch.randint(3, (4,)), nn.CrossEntropyLoss()
    v = torch.randn(sum(p.numel() for p in model.parameters()), dtype=DOUBLE)
    torch.testing.assert_close(operators.GGN(model, loss_fn, (x, y)) @ v, operators.GGN(model, loss_fn, [(x, y)]) @ v)


def test_two_batches_that_are_lists_are_not_taken_for_one() -> None:
    """`tuple(loader)`: a loader makes lists of its batches."""
    model, loss_fn = nn.Linear(3, 2).to(DOUBLE), nn.MSELoss()
    loader = [[torch.randn(4, 3, dtype=DOUBLE), torch.randn(4, 2, dtype=DOUBLE)] for _ in range(2)]
    with pytest.raises(ValueError, match=r"(?s)two pairs.*a list of batches for two"):
        operators.GGN(model, loss_fn, tuple(loader))
    v, pairs = torch.randn(8, dtype=DOUBLE), (tuple(loader[0]), tuple(loader[1]))
    torch.testing.assert_close(operators.GGN(model, loss_fn, loader) @ v, operators.GGN(model, loss_fn, pairs) @ v)


def test_a_batch_whose_targets_are_all_ignored_does_not_count() -> None:
    model, loss_fn, x = nn.Linear(4, 3).to(DOUBLE), nn.CrossEntropyLoss(), torch.randn(5, 4, dtype=DOUBLE)
    y = torch.tensor([0, -100, 2, 1, -100])
    for kind in (operators.GGN, operators.Hessian, operators.Fisher, operators.EmpiricalFisher):
        found = kind(model, loss_fn, [(x[:4], y[:4]), (x[4:], y[4:])])
        whole = kind(model, loss_fn, [(x[:4], y[:4])])
        torch.testing.assert_close(found.to_dense(), whole.to_dense())


def test_functions_without_a_second_derivative_are_named() -> None:
    class Segments(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.full((2 * len(x),), 2)
            return torch.segment_reduce(super().forward(x).flatten(), "mean", lengths=rows).view(-1, 2)

    ggn = operators.GGN(Segments(4, 4), nn.MSELoss(), (torch.randn(5, 4), torch.zeros(5, 2)))
    with pytest.raises(NotImplementedError, match=r"(?s)a function of Segments.*segment_reduce.*operators.KFAC"):
        ggn @ torch.ones(20)


# ---- other libraries ----------------------------------------------------------------------------


@pytest.fixture
def curvlinops() -> Any:
    return pytest.importorskip("curvlinops")


def test_curvlinops_tools_take_operators(curvlinops: Any) -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    want = matrices(model, nn.CrossEntropyLoss(), x, y)
    ggn = operators.GGN(model, nn.CrossEntropyLoss(), batches(x, y)).to_curvlinops()
    eye = torch.eye(27, dtype=DOUBLE)
    damped = ggn + 0.1 * curvlinops.GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)])
    torch.testing.assert_close(damped @ eye, 1.1 * want["GGN"])
    assert abs(curvlinops.hutchinson_trace(ggn, 26) - want["GGN"].trace()) < want["GGN"].trace()
    torch.testing.assert_close(curvlinops.xtrace(ggn, 26), want["GGN"].trace(), rtol=0.5, atol=0)
    assert curvlinops.hutchinson_diag(ggn, 26).shape == (27,)
    jacobian = operators.Jacobian(model, None, batches(x, y)).to_curvlinops()
    torch.testing.assert_close(jacobian @ eye, want["Jacobian"])
    torch.testing.assert_close(jacobian.adjoint() @ torch.eye(21, dtype=DOUBLE), want["Jacobian"].T)
    grid, density = curvlinops.lanczos_approximate_spectrum(ggn, 5, num_points=16)
    assert len(grid) == len(density) == 16


def test_curvlinops_conjugate_gradients(curvlinops: Any) -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), torch.randn(7, 3, dtype=DOUBLE)
    ggn = operators.GGN(model, nn.MSELoss(), (x, y))
    want = matrices(model, nn.MSELoss(), x, y)["GGN"]
    v = want @ torch.randn(27, dtype=DOUBLE)
    solve = curvlinops.CGInverseLinearOperator(ggn.to_curvlinops(), max_iter=200, tolerance=1e-12)
    torch.testing.assert_close(want @ (solve @ v), v, rtol=1e-3, atol=1e-4)


def test_products_are_no_backward_pass_of_a_context() -> None:
    """A context in which nothing else ran ended in an error about a pass that reached no extended module."""
    torch.manual_seed(0)
    model, loss_fn, x, y = bpk.extend(mlp()), bpk.extend(nn.CrossEntropyLoss()), torch.randn(7, 4), classes()
    v = torch.ones(sum(p.numel() for p in model.parameters()))
    with bpk.backpack(bpk.extensions.Variance()):
        for operator in (operators.GGN, operators.Hessian, operators.EmpiricalFisher):
            operator(model, loss_fn, (x, y)) @ v
    for product in (True, False):
        other = nn.Linear(4, 3)
        with pytest.raises(RuntimeError, match="reached no extended module"), bpk.backpack(bpk.extensions.Variance()):
            nn.functional.cross_entropy(other(x), y).backward()
            if product:
                operators.GGN(model, loss_fn, (x, y)) @ v


@pytest.mark.processor("arrays of numpy")
def test_scipy() -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    want = matrices(model, nn.CrossEntropyLoss(), x, y)
    top = linalg.eigsh(operators.Hessian(model, nn.CrossEntropyLoss(), (x, y)).to_scipy(), k=1)[0]
    values = torch.linalg.eigvalsh(want["Hessian"])
    assert abs(float(top[0]) - float(values[values.abs().argmax()])) < 1e-9
    jacobian = operators.Jacobian(model, None, (x, y)).to_scipy()
    torch.testing.assert_close(torch.from_numpy(jacobian.T @ torch.eye(21).numpy()), want["Jacobian"].T)
    v = torch.randn(27, dtype=torch.complex128)
    torch.testing.assert_close(torch.from_numpy(jacobian @ v.numpy()), want["Jacobian"].to(v.dtype) @ v)
    back = torch.randn(27, dtype=DOUBLE)
    for array in (back.numpy()[::-1], back.flip(0).numpy().astype(">f8"), back.flip(0).numpy().astype(object)):
        torch.testing.assert_close(torch.from_numpy(jacobian @ array), want["Jacobian"] @ back.flip(0))
    half = operators.Jacobian(model.bfloat16(), None, (x.bfloat16(), y)).to_scipy()  # NumPy has no such numbers
    found = torch.from_numpy(half @ back.numpy())
    torch.testing.assert_close(found, (want["Jacobian"] @ back).float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("GGN", "GGNLinearOperator"), ("EmpiricalFisher", "EFLinearOperator"), ("Hessian", "HessianLinearOperator")],
)
@pytest.mark.parametrize("loss", ["mean", "sum", "mse", "mse sum"])
def test_what_curvlinops_defines_alike(ours: str, theirs: str, loss: str, curvlinops: Any) -> None:
    torch.manual_seed(0)
    model, x = conv().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE)
    loss_fn, y = LOSSES[loss][0](), LOSSES[loss][1]()
    data = batches(x, y)
    operator = getattr(operators, ours)(model, loss_fn, data)
    other = getattr(curvlinops, theirs)(model, loss_fn, list(model.parameters()), data)
    torch.testing.assert_close(operator.to_dense(), other @ torch.eye(operator.shape[0], dtype=DOUBLE))


@pytest.mark.parametrize("network", [mlp, conv])
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("loss", ["mean", "mse", "mse sum"])
def test_kfac_of_curvlinops(network: Callable[[], nn.Module], approximation: str, loss: str, curvlinops: Any) -> None:
    """`expand` differs at biases of convolutions: `bpk` has the exact block, curvlinops takes positions apart."""
    torch.manual_seed(0)
    model, x = network().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE)
    loss_fn, y = LOSSES[loss][0](), LOSSES[loss][1]()
    data = batches(x, y)
    other = curvlinops.KFACLinearOperator(
        model, loss_fn, list(model.parameters()), data, fisher_type="type-2", kfac_approx=approximation
    )
    operator = operators.KFAC(model, loss_fn, data, approximation=approximation)
    units = {name: torch.eye(p.numel(), dtype=DOUBLE) for name, p in model.named_parameters()}
    for name in units:
        columns = [
            (unit if key == name else torch.zeros(len(unit), len(units[name]), dtype=DOUBLE)).reshape(*p.shape, -1)
            for (key, unit), p in zip(units.items(), model.parameters(), strict=True)
        ]
        index = list(units).index(name)
        found, want = (operator @ columns)[index], (other @ columns)[index]
        if network is conv and approximation == "expand" and name == "1.bias":
            assert not torch.allclose(found, want)
        else:
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", ["GGN", "Hessian", "Fisher", "EmpiricalFisher", "Jacobian"])
def test_products_in_inference_mode(name: str) -> None:
    """Torch builds no graph there, whatever `enable_grad` says: all products would be zero."""
    model, loss_fn = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.MSELoss()
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    operator = getattr(operators, name)(model, loss_fn, (x, y))
    v = torch.randn(operator.shape[1])
    with torch.inference_mode():
        made = [(x.clone(), y.clone())]  # data and vectors of this mode, too
        found = operator @ v.clone(), getattr(operators, name)(model, loss_fn, made) @ v.clone()
    assert (operator @ v).norm() > 0
    for product in (*found, getattr(operators, name)(model, loss_fn, made) @ v):
        torch.testing.assert_close(product, operator @ v)


def test_buffers_that_are_caches_or_hold_nan() -> None:
    """A cache of positions is made, or grows, in a forward pass, and results stay the same."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("unset", torch.tensor([torch.nan, 1.0]))
            self.register_buffer("cache", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None or len(self.cache) < len(x):
                self.cache = torch.arange(len(x), dtype=x.dtype).cos()[:, None]
            return self.layer(x) * self.cache[: len(x)]

    x, y, loss_fn = torch.randn(5, 3), torch.randn(5, 2), nn.MSELoss(reduction="sum")
    model = Cached()
    v = torch.ones(8)
    whole = operators.GGN(model, loss_fn, [(x, y)]) @ v
    model.cache = torch.ones(1, 1)
    assert operators.GGN(model, loss_fn, [(x[:2], y[:2]), (x, y)]).shape == (8, 8)
    model.cache = torch.ones(1, 1)
    torch.testing.assert_close(operators.GGN(model, loss_fn, [(x, y)]) @ v, whole)


def test_counts_and_outputs_that_make_no_sense_are_refused() -> None:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum()

    model, loss_fn, data = nn.Linear(3, 2), nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 2))
    with pytest.raises(ValueError, match="mc_samples must be a whole number of at least 1"):
        operators.Fisher(model, loss_fn, data, mc_samples=0)  # products were zero
    for name, wrong in (("GGN", 0), ("Jacobian", -1)):
        with pytest.raises(ValueError, match="chunk_size must be a whole number of at least 1"):
            getattr(operators, name)(model, loss_fn, data, chunk_size=wrong)
    with pytest.raises(ValueError, match="no batch axis"):
        operators.Jacobian(Summing(), None, data)
    lengths = [(torch.randn(2, 5, 3), None), (torch.randn(2, 4, 3), None)]  # its shape was that of two of 5
    with pytest.raises(ValueError, match=r"outputs \[5, 2\] and \[4, 2\] per row"):
        operators.Jacobian(model, None, lengths)
