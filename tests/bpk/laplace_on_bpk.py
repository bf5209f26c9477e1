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
from laplace.curvature import BackPackEF, BackPackGGN, CurvlinopsEF, CurvlinopsGGN  # noqa: E402

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
INPUTS = torch.randn(20, 1, 6, 6)
TARGETS = {"classification": torch.randint(3, (20,)), "regression": torch.randn(20, 3)}
PEERS = {BackPackGGN: CurvlinopsGGN, BackPackEF: CurvlinopsEF}


CONVOLUTION = nn.Sequential(
    nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)
)
PERCEPTRON = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
"""For Kronecker factors: those of convolutions are defined differently by curvlinops."""


def loader(likelihood: str) -> DataLoader[Any]:
    """Batches of unequal size."""
    return DataLoader(TensorDataset(INPUTS, TARGETS[likelihood]), batch_size=8)


def fit(likelihood: str, subset: str, structure: str, backend: type, **options: Any) -> Any:
    """A fitted posterior."""
    laplace = Laplace(
        copy.deepcopy(PERCEPTRON if structure == "kron" else CONVOLUTION),
        likelihood,
        subset_of_weights=subset,
        hessian_structure=structure,
        backend=backend,
        backend_kwargs=options,
    )
    laplace.fit(loader(likelihood))
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
    if (subset, structure, backend) == ("last_layer", "diag", BackPackEF):
        # curvlinops squares sums over each batch here; the diagonal of laplace's own full matrix is the reference
        full = fit(likelihood, subset, "full", CurvlinopsEF)
        return difference(matrix(ours), matrix(full).diagonal())
    theirs = fit(likelihood, subset, structure, PEERS[backend])
    pairs = [(matrix(ours), matrix(theirs)), (ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())]
    found, expected = ours(INPUTS[:4]), theirs(INPUTS[:4])
    pairs += zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return max(difference(a, b) for a, b in pairs)


def jacobians() -> float:
    """The model's Jacobians, which laplace gets from individual gradients."""
    ours = fit("classification", "all", "diag", BackPackGGN).backend.jacobians(INPUTS[:4])
    theirs = fit("classification", "all", "diag", CurvlinopsGGN).backend.jacobians(INPUTS[:4])
    return max(difference(a, b) for a, b in zip(ours, theirs, strict=True))


def sampled(structure: str, draws: int = 100) -> float:
    """The mean of sampled curvatures, which approaches the exact one."""
    mean = sum(matrix(fit("classification", "all", structure, BackPackGGN, stochastic=True)) for _ in range(draws))
    return difference(mean / draws, matrix(fit("classification", "all", structure, BackPackGGN)))


def training() -> float:
    """Training by marginal likelihood: the change of the loss that it reports."""
    result = marglik_training(
        copy.deepcopy(CONVOLUTION),
        loader("classification"),
        "classification",
        hessian_structure="kron",
        backend=BackPackGGN,
        n_epochs=4,
        n_epochs_burnin=1,
        marglik_frequency=2,
    )
    losses = result[2]
    return float(losses[-1] - losses[0])


def report() -> dict[str, Any]:
    """All results by name; those of `posterior` under the words that describe it."""
    found: dict[str, Any] = {"same module": sys.modules["backpack"] is bpk, "jacobians": jacobians()}
    found |= {f"sampled {structure}": sampled(structure) for structure in ("diag", "kron")}
    found["training"] = training()
    for likelihood in TARGETS:
        for subset in ("all", "last_layer"):
            for structure in ("diag", "kron", "full"):
                for backend in (BackPackGGN, BackPackEF):
                    if (structure, backend) != ("kron", BackPackEF):  # laplace has none
                        name = f"{likelihood} {subset} {structure} {backend.__name__}"
                        found[name] = posterior(likelihood, subset, structure, backend)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(report()))
