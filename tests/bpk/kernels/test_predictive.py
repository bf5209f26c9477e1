"""Predictive covariances of posteriors, and the factors that posteriors are made of, by plain Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import bpk
from bpk.extensions import EKFLR, KFLR, DiagGGNExact
from bpk.jacobians.core import outer
from bpk.kernels import Diagonal, Eigenbases, Kronecker, LowRank
from bpk.utils.kroneckers import kfacs_to_mat
from tests.bpk.kernels.test_kernels import Make, N, close, jacobians
from tests.bpk.kernels.test_kernels import doubles as doubles  # fixtures
from tests.bpk.kernels.test_kernels import given as given
from tests.bpk.kernels.test_kernels import room as room


def test_predictive_covariance(given: tuple[nn.Module, Make], room: None) -> None:
    model, data = given
    x = data(N)
    rows, shapes = jacobians(model, x), {name: p.shape for name, p in model.named_parameters()}
    some = list(shapes)[1:]  # the first one is known exactly
    variances = {name: torch.rand(shapes[name]) for name in some}
    expected = sum(torch.einsum("ncp,p,ndp->ncd", rows[k], variances[k].flatten(), rows[k]) for k in some)
    close(bpk.predictive_covariance(model, x, Diagonal(variances)), expected)
    directions, weights = {name: torch.randn(4, *shapes[name]) for name in some}, torch.randn(4)
    seen = sum(torch.einsum("ncp,kp->nck", rows[k], directions[k].flatten(1)) for k in some)
    expected = torch.einsum("nck,k,ndk->ncd", seen, weights, seen)
    close(bpk.predictive_covariance(model, x, LowRank(directions, weights)), expected)
    expected = expected + 0.3 * sum(torch.einsum("ncp,ndp->ncd", rows[k], rows[k]) for k in some)
    close(bpk.predictive_covariance(model, x, LowRank(directions, weights, 0.3)), expected)
    assert all(p.requires_grad for p in model.parameters())


def test_nothing_is_left_on_layers() -> None:
    """Also on those in front of the parameters that the posterior names, which the backward pass does not come to."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = {path: set(vars(layer)) for path, layer in bpk.extend(model).named_modules()}
    bpk.predictive_covariance(model, torch.randn(5, 3), Diagonal({"2.weight": torch.ones(2, 4)}))
    model[0].requires_grad_(False)
    bpk.ntk(model, torch.randn(5, 3))
    assert {path: set(vars(layer)) for path, layer in model.named_modules()} == before
    assert not any(vars(p) for p in model.parameters())


def test_what_is_no_posterior_is_refused() -> None:
    for wrong in (torch.ones(8), {"weight": torch.ones(2, 3)}, 1.0):
        with pytest.raises(TypeError, match=r"bpk\.kernels\.Diagonal"):
            bpk.predictive_covariance(nn.Linear(3, 2), torch.randn(4, 3), wrong)  # type: ignore[arg-type]


class Routed(nn.Module):
    """Rows go to one of three experts by their sign; the second one may be sent none, and the third one never is."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.experts, self.twice = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)]), twice

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        found = x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            found = found.index_add(0, rows, expert(x[rows]).tanh())
        return found + self.experts[2](x) if self.twice else found


@pytest.mark.parametrize("twice", [False, True])
def test_kronecker_factors_of_experts_that_are_sent_nothing(twice: bool) -> None:
    model, loss_fn, x = bpk.extend(Routed(twice)), bpk.extend(nn.MSELoss()), torch.randn(N, 3)
    with bpk.backpack(KFLR()):
        loss_fn(model(x), torch.randn(N, 2)).backward()
    factors = {name: p.kflr for name, p in model.named_parameters()}
    found = bpk.predictive_covariance(model, x, Kronecker(factors, 0.5))
    with bpk.disable():
        outputs = model(x)
        each = [torch.autograd.grad(z, list(model.parameters()), retain_graph=True) for z in outputs.flatten()]
    rows = torch.stack([torch.cat([g.flatten() for g in row]) for row in each]).unflatten(0, (N, 2))
    blocks = [torch.linalg.inv(kfacs_to_mat(f) + 0.5 * torch.eye(len(kfacs_to_mat(f)))) for f in factors.values()]
    close(found, rows @ torch.block_diag(*blocks) @ rows.mT)


@pytest.mark.parametrize("damped", [False, True])
def test_kronecker_factors(given: tuple[nn.Module, Make], room: None, damped: bool) -> None:
    model, data = given
    x, loss_fn = data(N), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(KFLR()):
        loss_fn(model(x), torch.arange(N) % 3).backward()
    rows = jacobians(model, x)
    for name, p in model.named_parameters():
        factors = p.kflr
        if damped and len(factors) == 2:
            root, shift = 2.0**0.5, 0.5**0.5
            precision = kfacs_to_mat([root * f + shift * torch.eye(len(f)) for f in factors])
        else:
            precision = 2 * kfacs_to_mat(factors) + 0.5 * torch.eye(p.numel())
        if len(factors) == 2 and len(factors[0]) != len(p):  # of a table: A belongs to the first axis
            size = len(factors[0])
            order = torch.arange(p.numel()).view(size, -1).T.flatten()
            precision = precision[order][:, order]
        expected = torch.einsum("ncp,pq,ndq->ncd", rows[name], torch.linalg.inv(precision), rows[name])
        close(bpk.predictive_covariance(model, x, Kronecker({name: factors}, 0.5, 2.0, damped)), expected)
    everything = bpk.predictive_covariance(model, x, Kronecker.of(model, "kflr", 0.5, 2.0))
    parts = [Kronecker({name: p.kflr}, 0.5, 2.0) for name, p in model.named_parameters()]
    close(everything, sum(bpk.predictive_covariance(model, x, part) for part in parts))


@pytest.mark.parametrize("routed", [False, True])
def test_half_precision(routed: bool) -> None:
    """Posteriors in the precision of the model, whose rows are multiplied in float32 (`ProjectedGrad` as well)."""
    torch.manual_seed(0)
    inner = Routed(True) if routed else nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    found: dict[torch.dtype, list[Tensor]] = {}
    x, variances = torch.randn(N, 3).bfloat16(), [torch.rand(p.shape).bfloat16() for p in inner.parameters()]
    model, loss_fn = bpk.extend(inner.bfloat16()), bpk.extend(nn.MSELoss())
    with bpk.backpack(KFLR(), EKFLR()):
        loss_fn(model(x), torch.zeros(N, 2).bfloat16()).backward()
    named = dict(model.named_parameters())
    kflr, ekflr = ({name: getattr(p, field) for name, p in named.items()} for field in ("kflr", "ekflr"))
    for dtype in (torch.bfloat16, torch.float64):
        model.to(dtype)
        factors = {name: [f.to(dtype) for f in some] for name, some in kflr.items()}
        bases = {name: [basis.to(dtype) for basis in e.bases] for name, e in ekflr.items()}
        precisions = {name: e.moments.to(dtype) + 0.5 for name, e in ekflr.items()}
        diagonal = Diagonal({name: v.to(dtype) for name, v in zip(named, variances, strict=True)})
        posteriors = diagonal, Kronecker(factors, 0.5), Eigenbases(bases, precisions)
        found[dtype] = [bpk.predictive_covariance(model, x.to(dtype), posterior) for posterior in posteriors]
        loss = loss_fn(model(x.to(dtype)), torch.zeros(N, 2, dtype=dtype))
        found[dtype].append(bpk.projected_gradients(model, loss, k=4))
    for ours, theirs in zip(*found.values(), strict=True):
        assert float((ours - theirs).abs().max()) < 0.03 * float(theirs.abs().max())


def test_unit_columns_of_a_last_layer_are_not_multiplied() -> None:
    """By no posterior: what is left for Kronecker factors and low ranks is `V K V`, once for weight and for bias."""
    c, model = 40, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 40)).double()
    x = torch.randn(2, 3).double()
    last = {"2.weight": torch.rand(c, 4).double(), "2.bias": torch.rand(c).double()}
    factors = {"2.weight": [torch.eye(c).double(), torch.eye(4).double()], "2.bias": [torch.eye(c).double()]}
    for posterior, most in ((Diagonal(last), 0), (Kronecker(factors), 2)):
        with FlopCounterMode(display=False) as counter:
            bpk.predictive_covariance(model, x, posterior)
        assert counter.get_total_flops() < 2 * len(x) * c**3 * (most + 0.5)


def test_products_with_diagonals_are_told_from_others() -> None:
    y = torch.randn(3, 4, 5)
    diagonal = torch.randn(3, 4).diag_embed()
    one_off, none = diagonal.clone(), torch.zeros(3, 4, 4)
    one_off[2, 3, 0] = one_off[2, 3, 3] = 1e-30  # one sample has an entry elsewhere
    moved = one_off.clone()
    moved[2, 3, 3] = 0  # as many entries as a diagonal has
    for x in (diagonal, one_off * 1e30, moved * 1e30, none, diagonal[:, :3], diagonal.roll(1, 2)):
        torch.testing.assert_close(outer.times(x, y), x @ y)
    assert outer.times(one_off.fill_(torch.nan), y).isnan().all()


def test_diagonal_of_a_field() -> None:
    model, loss_fn = bpk.extend(nn.Linear(3, 2)), bpk.extend(nn.CrossEntropyLoss())
    x = torch.randn(N, 3)
    with bpk.backpack(DiagGGNExact()):
        loss_fn(model(x), torch.arange(N) % 2).backward()
    found = Diagonal.of(model, "diag_ggn_exact", prior_precision=0.5, scale=3.0)
    close(found.variances["weight"], 1 / (3 * model.weight.diag_ggn_exact + 0.5))
    with pytest.raises(ValueError, match="has the field 'kfac'"):
        Diagonal.of(model, "kfac")


class Complex(nn.Module):
    """A complex parameter between real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).to(self.weight.dtype) @ self.weight
        return z.real * z.imag


def test_posteriors_of_complex_parameters() -> None:
    """Directions are complex, as the eigenvectors that they are; imaginary parts had been left out."""
    model, x, rows = bpk.extend(Complex()), torch.randn(N, 3), []
    for e in model(x).flatten().unbind():
        grads = torch.autograd.grad(e, [*model.parameters()], retain_graph=True)
        rows.append(torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in grads]))
    jacobian = torch.stack(rows).view(N, 2, -1)
    loss_fn = bpk.extend(nn.MSELoss())
    pairs = bpk.eigenpairs(model, loss_fn(model(x), torch.randn(N, 2)), k=4)
    parts = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in pairs.vectors.items()}
    e = torch.cat([parts[name].flatten(1) for name, _ in model.named_parameters()], 1)
    sigma = torch.linalg.inv(0.5 * torch.eye(e.shape[1]) + e.T @ torch.diag(pairs.values) @ e)
    posterior = LowRank.of(pairs.vectors, pairs.values, prior_precision=0.5)
    close(bpk.predictive_covariance(model, x, posterior), jacobian @ sigma @ jacobian.mT)
