"""Runs laplace-torch on `bpk` (in a process of its own, see `test_dropin.py`) and prints differences as JSON.

Every posterior is compared with that of laplace's backend for curvlinops, which uses neither BackPACK nor `bpk`.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import bpk
from _torchvision import import_torchvision

import_torchvision()
bpk.install_as_backpack()

from laplace import Laplace, marglik_training  # noqa: E402 - it must come after install_as_backpack
from laplace.curvature import BackPackEF, BackPackGGN, CurvatureInterface, CurvlinopsEF, CurvlinopsGGN  # noqa: E402

from bpk import laplace_torch  # noqa: E402
from bpk.jacobians.core.errors import UnsupportedLayer  # noqa: E402
from bpk.laplace_torch import EF, GGN  # noqa: E402

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
INPUTS = torch.randn(20, 1, 6, 6)
TARGETS = {"classification": torch.randint(3, (20,)), "regression": torch.randn(20, 3)}
PEERS = {BackPackGGN: CurvlinopsGGN, BackPackEF: CurvlinopsEF, GGN: CurvlinopsGGN, EF: CurvlinopsEF}


LINEAR = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
CONVOLUTION = nn.Sequential(
    nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
)
PERCEPTRON = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
"""For Kronecker factors: those of convolutions are defined differently by curvlinops."""


def loader(likelihood: str, times: int = 1) -> DataLoader[Any]:
    """Batches of unequal size, of data that is there so many times."""
    inputs, targets = (torch.cat([x] * times) for x in (INPUTS, TARGETS[likelihood]))
    return DataLoader(TensorDataset(inputs, targets), batch_size=8 * times)


def fit(likelihood: str, subset: str, structure: str, backend: type, times: int = 1, **options: Any) -> Any:
    """A fitted posterior."""
    make = laplace_torch.Laplace if backend in (GGN, EF) else Laplace
    laplace = make(
        copy.deepcopy(PERCEPTRON if structure == "kron" else CONVOLUTION),
        likelihood,
        subset_of_weights=subset,
        hessian_structure=structure,
        backend=backend,
        backend_kwargs=options,
    )
    laplace.fit(loader(likelihood, times))
    return laplace


def matrix(laplace: Any) -> Tensor:
    """The curvature as a tensor."""
    return laplace.H if isinstance(laplace.H, Tensor) else laplace.H.to_matrix()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max())


def posterior(likelihood: str, subset: str, structure: str, backend: type) -> float:
    """Curvature, predictions and evidence: the largest difference to the peer."""
    ours = fit(likelihood, subset, structure, backend)
    if (subset, structure) == ("last_layer", "diag") and backend in (BackPackEF, EF):
        # curvlinops squares sums over each batch here; the diagonal of laplace's own full matrix is the reference
        full = fit(likelihood, subset, "full", CurvlinopsEF)
        return difference(matrix(ours), matrix(full).diagonal())
    theirs = fit(likelihood, subset, structure, PEERS[backend])
    pairs = [(matrix(ours), matrix(theirs)), (ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())]
    found, expected = ours(INPUTS[:4]), theirs(INPUTS[:4])
    pairs += zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return max(difference(a, b) for a, b in pairs)


def jacobians(backend: type) -> float:
    """The model's Jacobians, which laplace gets from individual gradients."""
    ours = fit("classification", "all", "diag", backend).backend.jacobians(INPUTS[:4])
    theirs = fit("classification", "all", "diag", CurvlinopsGGN).backend.jacobians(INPUTS[:4])
    return max(difference(a, b) for a, b in zip(ours, theirs, strict=True))


def sampled(structure: str, backend: type, draws: int = 5, times: int = 20) -> float:
    """The mean of sampled curvatures, which approaches the exact one: each draw is of data that is there 20 times."""
    mean = sum(matrix(fit("classification", "all", structure, backend, times, stochastic=True)) for _ in range(draws))
    return difference(mean / draws, matrix(fit("classification", "all", structure, backend, times)))


def training(backend: type) -> float:
    """Training by marginal likelihood: the change of the loss that it reports."""
    result = marglik_training(
        copy.deepcopy(CONVOLUTION),
        loader("classification"),
        "classification",
        hessian_structure="kron",
        backend=backend,
        n_epochs=4,
        n_epochs_burnin=1,
        marglik_frequency=2,
    )
    losses = result[2]
    return float(losses[-1] - losses[0])


def low_rank() -> float:
    """All eigenpairs of the GGN, and a prior with an entry for each weight: predictions of the full posterior.

    Of a linear classifier, too: the probabilities are the same when the same is added to all of its weights.
    """
    return max(low_rank_of("regression", CONVOLUTION), low_rank_of("classification", LINEAR))


def low_rank_of(likelihood: str, model: nn.Module) -> float:
    """The same of one model."""
    found, data = [], loader(likelihood)
    size = sum(p.numel() for p in model.parameters())
    prior = torch.rand(size) + 0.5
    for make, structure, options in (
        (laplace_torch.Laplace, "lowrank", {"backend": GGN, "backend_kwargs": {"rank": size}}),
        (Laplace, "full", {"backend": CurvlinopsGGN}),
    ):
        laplace = make(copy.deepcopy(model), likelihood, "all", structure, prior_precision=prior, **options)
        laplace.fit(data)
        found.append(laplace)
    both = [laplace(INPUTS[:4]) for laplace in found]
    pairs = zip(*both, strict=True) if likelihood == "regression" else [both]
    return max(difference(a, b) for a, b in pairs)


def covariances() -> float:
    """`J Sigma J^T` by laplace itself from autograd's Jacobians: priors, joint inputs, frozen weights."""
    errors = []
    for structure, model in (("diag", CONVOLUTION), ("kron", PERCEPTRON)):
        part = copy.deepcopy(model)
        part[-3].weight.requires_grad_(False)
        for net, options in (
            (model, {"prior_precision": torch.rand(len(list(model.parameters()))) + 0.5}),
            (model, {"sigma_noise": 0.3, "temperature": 0.5}),
            (part, {}),
        ):
            ours = laplace_torch.Laplace(copy.deepcopy(net), "regression", "all", structure, **options)
            ours.fit(loader("regression"))
            jacobian = CurvatureInterface.jacobians(ours.backend, INPUTS[:4])[0]
            errors.append(difference(ours(INPUTS[:4])[1], ours.functional_variance(jacobian)))
            errors.append(difference(ours(INPUTS[:4], joint=True)[1], ours.functional_covariance(jacobian)))
            frozen = [p for p in ours.model.parameters() if not p.requires_grad]
            assert len(frozen) == (net is part) and all(p.grad is None for p in ours.model.parameters())
    return max(errors)


def without_jacobians() -> bool:
    """Predictions ask the backend for no Jacobian; those that are differentiated do, and give its gradient."""
    for subset in ("all", "last_layer"):
        for structure in ("diag", "kron", *["lowrank"] * (subset == "all")):
            laplace = fit("classification", subset, structure, GGN)
            laplace.backend.jacobians = laplace.backend.last_layer_jacobians = None
            laplace(INPUTS[:4])
            laplace.predictive_samples(INPUTS[:4])
    gradients = []
    for make, backend in ((laplace_torch.Laplace, GGN), (Laplace, CurvlinopsGGN)):
        laplace = make(copy.deepcopy(PERCEPTRON), "regression", "all", "kron", backend=backend, enable_backprop=True)
        laplace.fit(loader("regression"))
        x = INPUTS[:4].clone().requires_grad_()
        gradients.append(torch.autograd.grad(laplace(x)[1].sum(), x)[0])
    return difference(*gradients) < 1e-10


def others() -> float:
    """Subnetworks, and Jacobians of chosen outputs."""
    indices = torch.tensor([0, 3, 20, 50])
    errors = []
    for structure in ("diag", "full"):
        pair = []
        for make, backend in ((laplace_torch.Laplace, GGN), (Laplace, CurvlinopsGGN)):
            laplace = make(
                copy.deepcopy(CONVOLUTION),
                "classification",
                "subnetwork",
                structure,
                backend=backend,
                subnetwork_indices=indices,
            )
            laplace.fit(loader("classification"))
            pair.append(laplace)
        errors.append(difference(pair[0].H, pair[1].H))
        errors.append(difference(pair[0](INPUTS[:4]), pair[1](INPUTS[:4])))
    backend = fit("classification", "all", "diag", GGN).backend
    whole, chosen = backend.jacobians(INPUTS[:3])[0], torch.tensor([[0, 2], [1, 1], [2, 0]])
    some = backend.selected_output_jacobians(INPUTS[:3], chosen)[0]
    errors.append(difference(some, torch.stack([whole[n, c] for n, c in enumerate(chosen)])))
    return max(errors)


def by_jacobians() -> float:
    """Gaussian processes, and full posteriors whose predictions are differentiated."""
    errors = []
    for subset in ("all", "last_layer"):
        for structure, options in (("gp", {"n_subset": 12, "seed": 3}), ("full", {"enable_backprop": True})):
            pair = []
            for make, backend in ((laplace_torch.Laplace, GGN), (Laplace, CurvlinopsGGN)):
                laplace = make(copy.deepcopy(PERCEPTRON), "regression", subset, structure, backend=backend, **options)
                laplace.fit(loader("regression"))
                assert isinstance(laplace.backend, backend)
                x = INPUTS[:4].clone().requires_grad_(structure == "full")
                mean, variance = laplace(x)
                pair.append([mean.detach(), variance.detach(), laplace.log_marginal_likelihood().detach()])
                if structure == "full":
                    pair[-1].append(torch.autograd.grad(mean.square().sum() + variance.sum(), x)[0])
            errors += [difference(a, b) for a, b in zip(*pair, strict=True)]
    return max(errors)


class Shift(nn.Module):
    """Has a matrix that nothing is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.weight).tanh()


class Tokens(nn.Module):
    """Whole numbers from images."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) > 0).long()


class Scaled(nn.Module):
    """A layer with a scalar parameter behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(36, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x.flatten(1)).tanh()


def scalars() -> float:
    """Predictions of a model with a scalar parameter, against Jacobians by `torch.func`."""
    model, errors, x = Scaled(), [], INPUTS[:4]
    params = dict(model.named_parameters())
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    rows = torch.cat([jacobians[name].reshape(4, 3, -1) for name in params], 2).detach()
    for structure in ("diag", "kron", "full"):
        laplace = laplace_torch.Laplace(model, "regression", "all", structure)
        laplace.fit(loader("regression"))
        variance = laplace._glm_predictive_distribution(x)[1]
        precision = laplace.posterior_precision
        if structure == "kron":
            inverse = precision.bmm(torch.eye(rows.shape[2]), exponent=-1)
            whole = laplace_torch.Laplace(model, "regression", "all", "diag")
            whole.fit(loader("regression"))
            errors.append(difference(laplace.H.to_matrix().diagonal()[-1], whole.H[-1]))  # exact for a single number
        else:
            inverse = torch.linalg.inv(precision if structure == "full" else precision.diag())
        errors.append(difference(variance, torch.einsum("ncp,pq,ndq->ncd", rows, inverse, rows)))
    return max(errors)


def refusals() -> list[str]:
    """What is refused, in words."""
    found = []
    shifted = copy.deepcopy(PERCEPTRON)
    shifted[2] = Shift()
    table = nn.Sequential(Tokens(), nn.Embedding(5, 5), nn.Flatten(), nn.Linear(180, 3))
    unused = nn.ModuleDict({"used": nn.Linear(36, 3), "unused": nn.Linear(2, 2)})
    unused.forward = lambda x: unused["used"](x.flatten(1))
    steps = nn.Flatten(), nn.Unflatten(1, (4, 9))
    transposed = nn.Sequential(*steps, nn.ConvTranspose1d(4, 4, 1), nn.Flatten(), nn.Linear(36, 3))
    volumes = nn.Sequential(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 1, 1), nn.Flatten(), nn.Linear(36, 3))
    for model, structure in (
        (volumes, "kron"),
        (shifted, "kron"),
        (table, "kron"),
        (transposed, "kron"),
        (unused, "diag"),
    ):
        try:
            laplace_torch.Laplace(model, "classification", "all", structure).fit(loader("classification"))
        except ValueError as error:
            found.append(str(error))
    try:
        laplace_torch.posterior_of(fit("classification", "all", "full", GGN))
    except UnsupportedLayer as error:
        found.append(str(error))
    frozen = copy.deepcopy(PERCEPTRON)
    frozen[-1].bias.requires_grad_(False)
    try:
        laplace_torch.Laplace(frozen, "classification", "last_layer", "full").fit(loader("classification"))
    except ValueError as error:
        found.append(str(error))
    return found


def report() -> dict[str, Any]:
    """All results by name; those of `posterior` under the words that describe it."""
    found: dict[str, Any] = {"same module": sys.modules["backpack"] is bpk}
    for backend in (BackPackGGN, GGN):
        name = backend.__name__
        found[f"jacobians {name}"] = jacobians(backend)
        found |= {f"sampled {structure} {name}": sampled(structure, backend) for structure in ("diag", "kron")}
        found[f"training {name}"] = training(backend)
    found |= {
        check.__name__: check()
        for check in (low_rank, covariances, without_jacobians, others, by_jacobians, scalars, refusals)
    }
    for likelihood in TARGETS:
        for subset in ("all", "last_layer"):
            for structure in ("diag", "kron", "full"):
                for backend in PEERS:
                    if structure != "kron" or backend in (BackPackGGN, GGN):  # the others have none
                        name = f"{likelihood} {subset} {structure} {backend.__name__}"
                        found[name] = posterior(likelihood, subset, structure, backend)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(report()))
