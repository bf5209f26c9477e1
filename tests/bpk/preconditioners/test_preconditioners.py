"""Preconditioned gradients against dense solves, over several steps; saving and going on; failing decompositions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpk
from bpk import preconditioners
from bpk.preconditioners import Preconditioner
from bpk.utils.damped import DampedInverse, split_damping
from bpk.utils.kroneckers import kfacs_to_mat
from tests.bpk.distributed.processes import run_all
from tests.bpk.preconditioners import preconditioned_worker as worker
from tests.helpers import data, mlp

Make = Callable[..., Preconditioner]


def loss_of(prediction: Tensor, target: Tensor) -> Tensor:
    """An extended loss: made anew, as other tests take hooks away."""
    loss: Tensor = bpk.extend(nn.CrossEntropyLoss())(prediction, target)
    return loss


def kfac(model: nn.Module, **options: Any) -> Preconditioner:
    return preconditioners.KFAC(model, **{"damping": 0.1, "intervals": (1, 1), "mc_samples": None} | options)


def diagonal(model: nn.Module, **options: Any) -> Preconditioner:
    return preconditioners.DiagonalGGN(model, **{"damping": 0.1, "mc_samples": None} | options)


def ekfac(model: nn.Module, **options: Any) -> Preconditioner:
    return preconditioners.EKFAC(model, **{"damping": 0.1, "intervals": (1, 1), "mc_samples": None} | options)


def fields(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """What the extensions give, and gradients."""
    other = bpk.extend(copy.deepcopy(model))
    other.zero_grad()
    with bpk.backpack(bpk.extensions.KFLR(), bpk.extensions.DiagGGNExact()):
        loss_of(other(x), y).backward()
    named = dict(other.named_parameters())
    return {n: [*p.kflr, p.diag_ggn_exact] for n, p in named.items()}, {n: p.grad for n, p in named.items()}


def columns(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By parameter, columns whose squares add up to the GGN `[columns, entries]`, and the gradient."""
    other = bpk.extend(copy.deepcopy(model))
    other.zero_grad()
    with bpk.backpack(bpk.extensions.SqrtGGNExact()):
        loss_of(other(x), y).backward()
    return {n: (p.sqrt_ggn_exact.flatten(2).flatten(0, 1), p.grad) for n, p in other.named_parameters()}


def dense_solve(make: Make, curvature: list[Tensor], gradient: Tensor, damping: float = 0.1) -> Tensor:
    """What a step must make of a gradient."""
    if make is diagonal:
        return gradient / (curvature[-1] + damping)
    matrix = kfacs_to_mat(curvature[:-1])
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    return torch.linalg.solve(matrix + damping * eye, gradient.flatten()).reshape(gradient.shape)


def take_step(model: nn.Module, preconditioner: Preconditioner, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    with preconditioner:
        loss_of(model(x), y).backward()
    preconditioner.step()


@pytest.mark.parametrize("make", [kfac, diagonal])
def test_steps_are_dense_solves_with_running_means(make: Make) -> None:
    torch.manual_seed(0)
    model = mlp()
    preconditioner = make(model, decay=0.6, damping=lambda step: 0.1 * (step + 1))
    means: dict[str, list[Tensor]] = {}
    for step in range(4):
        x, y = data()
        found, gradients = fields(model, x, y)
        decay = min(0.6, 1 - 1 / (step + 1))
        for name, values in found.items():
            old = means.get(name, values)
            means[name] = [decay * m + (1 - decay) * v for m, v in zip(old, values, strict=True)]
        take_step(model, preconditioner, x, y)
        for name, p in model.named_parameters():
            want = dense_solve(make, means[name], gradients[name], 0.1 * (step + 1))
            torch.testing.assert_close(p.grad, want)
            assert not [key for key in vars(p) if "precond" in key]
            with torch.no_grad():
                p -= 0.1 * p.grad


@pytest.mark.parametrize("tied", [False, True])
def test_ekfac_has_the_diagonal_of_the_mean_ggn_in_its_basis(tied: bool) -> None:
    torch.manual_seed(0)
    model = mlp()
    if tied:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        model[2].weight = model[0].weight
    preconditioner = ekfac(model, decay=0.6, intervals=(1, 2 if tied else 1000))
    means: dict[str, Tensor] = {}
    bases: dict[str, Tensor] = {}
    for step in range(4):
        x, y = data()
        known = columns(model, x, y)
        decay = min(0.6, 1 - 1 / (step + 1))
        take_step(model, preconditioner, x, y)
        for name, p in model.named_parameters():
            rows, gradient = known[name]
            basis = kfacs_to_mat(preconditioner.moments.bases[p])
            seen = bases.get(name, basis)  # in which this step's moments were taken
            moments = (rows @ seen).square().sum(0)
            if name in means:
                moments = decay * means[name] + (1 - decay) * moments
            matrix = seen * moments @ seen.T
            means[name], bases[name] = (basis.T @ matrix @ basis).diagonal(), basis
            want = basis @ ((basis.T @ gradient.flatten()) / (means[name] + 0.1))
            torch.testing.assert_close(p.grad.flatten(), want)


def test_intervals() -> None:
    torch.manual_seed(0)
    model = mlp()
    preconditioner = kfac(model, intervals=(2, lambda step: 4), decay=0.0)
    seen = []
    for step in range(6):
        x, y = data()
        found, gradients = fields(model, x, y)
        seen.append(found)
        assert bool(preconditioner.extensions) == (step % 2 == 0)
        take_step(model, preconditioner, x, y)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, dense_solve(kfac, seen[step // 4 * 4][name], gradients[name]))


def test_in_a_context_of_the_users() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    one = kfac(model)
    found, gradients = fields(model, x, y)
    with bpk.backpack(*one.extensions, bpk.extensions.KFLR(), bpk.extensions.BatchGrad()):
        loss_of(model(x), y).backward()
    one.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, dense_solve(kfac, found[name], gradients[name]))
        torch.testing.assert_close(p.kflr, found[name][:-1])
        assert p.grad_batch.shape == (5, *p.shape)


@pytest.mark.parametrize("make", [kfac, diagonal])
def test_kl_clip_limits_the_step(make: Make) -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    _, gradients = fields(model, x, y)

    def length(preconditioner: Preconditioner) -> tuple[float, list[Tensor]]:
        take_step(model, preconditioner, x, y)
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        return sum(float((0.5 * g * 0.5 * gradients[name]).sum()) for name, g in found.items()), list(found.values())

    free, long = length(make(model))
    limited, short = length(make(model, kl_clip=free / 9, lr=lambda step: 0.5))
    torch.testing.assert_close(short, [g / 3 for g in long])
    assert abs(limited - free / 3) < 1e-9
    torch.testing.assert_close(length(make(model, kl_clip=free * 2, lr=0.5))[1], long)


@pytest.mark.parametrize("make", [kfac, diagonal, ekfac])
def test_a_saved_state_goes_on_bit_for_bit(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [data() for _ in range(7)]
    options = {} if make is diagonal else {"intervals": (1, 3)}

    def go(model: nn.Module, preconditioner: Preconditioner, chosen: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        for x, y in chosen:
            take_step(model, preconditioner, x, y)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        return [p.detach().clone() for p in model.parameters()]

    first = mlp()
    second = copy.deepcopy(first)
    want = go(first, make(first, **options), batches)
    saved = make(second, **options)
    go(second, saved, batches[:4])
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    again = make(second, **options)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert all(torch.equal(a, b) for a, b in zip(go(second, again, batches[4:]), want, strict=True))
    with pytest.raises(ValueError, match="lacks"):
        make(nn.Sequential(nn.Linear(4, 3)).double(), **options).load_state_dict(saved.state_dict())


def test_parameters_without_gradient_or_curvature_are_left_alone() -> None:
    torch.manual_seed(0)
    model = mlp()
    model.register_parameter("other", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    model[0].bias.requires_grad_(False)
    x, y = data()
    preconditioner = kfac(model)
    model.other.grad = torch.ones(2, dtype=torch.float64)
    with preconditioner:
        loss_of(model(x), y).backward()
    preconditioner.step()
    assert torch.equal(model.other.grad, torch.ones(2, dtype=torch.float64))
    assert model[0].bias.grad is None


@pytest.mark.parametrize("make", [kfac, diagonal, ekfac])
def test_training_goes_down_faster_than_by_gradients(make: Make) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4, dtype=torch.float64) * torch.tensor([10.0, 1.0, 0.1, 0.1], dtype=torch.float64), None
    y = (x[:, 2:].sum(1) > 0).long()
    losses = {}
    for rate in (0.03, 0.1, 0.3, 1.0, 3.0):
        for preconditioned in (False, True):
            torch.manual_seed(1)
            model = bpk.extend(mlp())
            preconditioner = make(model, damping=1e-3) if preconditioned else None
            for _ in range(30):
                model.zero_grad()
                if preconditioner is None:
                    loss_of(model(x), y).backward()
                else:
                    take_step(model, preconditioner, x, y)
                with torch.no_grad():
                    for p in model.parameters():
                        p -= rate * p.grad
            losses[preconditioned, rate] = loss_of(model(x), y).item()
    assert min(v for k, v in losses.items() if k[0]) < 0.7 * min(v for k, v in losses.items() if not k[0])


def test_refusals() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    preconditioner = kfac(model)
    loss_of(bpk.extend(model)(x), y).backward()
    with pytest.raises(RuntimeError, match="found no curvature"):
        preconditioner.step()
    with pytest.raises(ValueError, match="kl_clip= needs lr="):
        kfac(model, kl_clip=1e-3)
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"kl_clip={limit} is no limit"):
            kfac(model, kl_clip=limit, lr=0.1)
    for rate in ("fast", float("nan"), lambda step: float("nan")):
        with pytest.raises(ValueError, match=r"lr=.* is no learning rate"):
            take_step(model, kfac(model, kl_clip=1e-3, lr=rate), x, y)
    for decay in (-0.1, 1.5, float("nan"), lambda step: 2.0):
        with pytest.raises(ValueError, match=r"decay=.* is no weight of the past"):
            take_step(model, kfac(model, decay=decay), x, y)
    with pytest.raises(ValueError, match="interval of 0"):
        kfac(model, intervals=(0, 1)).extensions, take_step(model, kfac(model, intervals=(1, 0)), x, y)
    for make in (kfac, ekfac):
        with pytest.raises(ValueError, match="intervals=3 are not two"):
            make(model, intervals=3)
    with pytest.raises(ValueError, match=r"Kronecker factor of '0.weight'.* not finite"):
        take_step(model, kfac(model), x * float("inf"), y)


# ---- inverses -----------------------------------------------------------------------------------


def test_damped_inverse_is_that_of_the_dense_matrix() -> None:
    torch.manual_seed(0)
    for sizes in ((4,), (3, 2), (2, 3, 2)):
        factors = [(r := torch.randn(s, s - 1, dtype=torch.float64)) @ r.T for s in sizes]  # singular
        dense = kfacs_to_mat(factors)
        mat = torch.randn(len(dense), 3, dtype=torch.float64)
        inverse = DampedInverse(factors, 1e-3)
        want = torch.linalg.solve(dense + 1e-3 * torch.eye(len(dense), dtype=torch.float64), mat)
        torch.testing.assert_close(inverse(mat), want)
        torch.testing.assert_close(inverse(mat[:, 0]), want[:, 0])
        shifts = torch.tensor(split_damping(factors, 1e-3))
        assert abs(shifts.log().sum().exp() - 1e-3) < 1e-9
        means = [f.diagonal().mean() for f in factors]
        for (a, b), (m, n) in zip(pairwise(shifts), pairwise(means), strict=True):
            assert abs(a / b - m / n) < 1e-5
    zero = torch.zeros(2, 2)
    assert split_damping([zero, torch.eye(2)], 0.01) == [0.1, 0.1]


@pytest.mark.processor("its processes are there")
@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo (torch.distributed)"
)
@pytest.mark.parametrize("world", [2, 4])
def test_many_processes_take_the_steps_of_one(world: int, tmp_path: Path) -> None:
    """With curvature of the global batch, one state everywhere, and decompositions that are shared out."""
    found = run_all("tests.bpk.preconditioners.preconditioned_worker", world, tmp_path)
    for status, text in found:
        assert status == 0 and text.splitlines()[-1] == "right", text
        assert "refused True" in text
    sizes = [[int(n) for n in text.partition("decomposed ")[2].splitlines()[0].split(",")] for _, text in found]
    once = sorted([3, 9, 3, 6, 12, 6, 3, 6, 3])  # factors of three layers: weights have two, biases one
    assert sorted(n for mine in sizes for n in mine) == sorted(once * 6)  # in steps 0, 2 and 4, of two preconditioners
    work = [sum(n**3 for n in mine) for mine in sizes]
    assert max(work) <= sum(work) / world + 6 * max(once) ** 3
    for name, make in worker.MAKES.items():
        model = worker.network()
        alone = make(model, kl_clip=1e-2, lr=0.1)
        worker.train(bpk.extend(model), alone, worker.batches())
        ranks = [torch.load(tmp_path / f"{name}{rank}-of-{world}.pt") for rank in range(world)]
        for known in ranks:
            assert str(known["state"]) == str(ranks[0]["state"])
            torch.testing.assert_close(known["params"], ranks[0]["params"], rtol=0, atol=0)
            torch.testing.assert_close(known["params"], dict(model.state_dict()), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(known["state"]["means"], alone.state_dict()["means"], rtol=1e-9, atol=1e-12)
