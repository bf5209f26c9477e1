"""What `benchmarks.beyond` measures: quantities, with their ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import bpk
from benchmarks import beyond_by_hand as hand
from benchmarks import beyond_peers as peers
from benchmarks import beyond_ways as ways
from benchmarks.beyond_ways import Values, Way, limit
from benchmarks.input_derivatives import network, unit_vectors
from benchmarks.problems import KNOWN, Problem, Setup
from bpk import extensions
from bpk.utils.ekfac import Eigenbasis, ekfac_mat_prod

K, PAIRS, DIRECTIONS = 64, 10, 10
"""How many numbers a projection has, how many eigenpairs are asked for, along how many directions Taylor series go."""

ALL = ("mlp", "3c3d", "transformer")
TANH = Problem(
    "tanh", "Tanh network 50-768-768-512-512-10", partial(network, 50, 768, 768, 512, 512, 10), (50,), 10, 128, ()
)
TINY = Problem("tiny_tanh", "A small tanh network", partial(network, 3, 4, 4, 2), (3,), 2, 3, ())
PROBLEMS = {**KNOWN, TANH.name: TANH, TINY.name: TINY}


@dataclass(frozen=True)
class Quantity:
    """Its ways, by name. The first one by hand, behind `bpk` and the limit, is what all others are held against.

    `values` takes a result to what is compared. A quantity that is drawn at random is compared in the mean over
    `draws`. `samples` says where the whole batch would take minutes.
    """

    ways: dict[str, Way]
    problems: Sequence[str] = ALL
    values: Values = lambda found: found
    draws: int = 1
    tolerance: float = 1e-2
    samples: dict[str, int] = field(default_factory=dict)


def of_bases(found: list[Eigenbasis]) -> list[Tensor]:
    """The trace, and `v^T B v` with one vector for each parameter: bases are unique only up to signs."""
    source = torch.Generator().manual_seed(0)
    vectors = [torch.randn(one.moments.numel(), generator=source) for one in found]
    forms = [v @ ekfac_mat_prod(one)(v) for one, v in zip(found, vectors, strict=True)]
    return [*peers.of_trace(found), torch.stack(forms)]


def of_factors(found: list[list[Tensor]]) -> list[Tensor]:
    """Traces, by parameter: `G` is drawn at random."""
    return [torch.stack([f.diagonal(dim1=1, dim2=2).sum() for f in factors]) for factors in found]


def of_axes(found: list[list[Tensor]]) -> list[Tensor]:
    """All matrices."""
    return [matrix for matrices in found for matrix in matrices]


def of_pairs(found: list[Tensor]) -> list[Tensor]:
    """What does not depend on the sign of an eigenvector."""
    return [found[0], *(f.square() for f in found[1:])]


def spectrum(found: list[Tensor]) -> list[Tensor]:
    """Eigenvalues of a Gram matrix, the largest first."""
    return [torch.linalg.eigvalsh(found[0]).flip(0)]


def pairs(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """`bpk.eigenpairs`, in a list."""
    found = bpk.eigenpairs(model, loss, k=PAIRS)
    return [found.values, *found.vectors.values(), found.slopes, found.curvatures]


def some(x: Tensor) -> Tensor:
    """Directions `[V, N, *in]`."""
    return torch.randn(DIRECTIONS, *x.shape, generator=torch.Generator().manual_seed(1))


def once(setup: Setup) -> int:
    """One column."""
    return 1


def projection(kind: str) -> Quantity:
    """`ProjectedGrad`."""
    by_hand = {
        "vmap(grad), matrix drawn": hand.projected(kind, K, False),
        "vmap(grad), matrix kept": hand.projected(kind, K, True),
    }
    own = ways.extension(lambda: extensions.ProjectedGrad(K, kind))
    least = limit(work=partial(ways.projections, kind=kind, k=K))
    package = {} if kind == "sparse" else {"trak": peers.trak(kind, K)}
    return Quantity({"bpk": own, "limit": least, **by_hand, **package})


def taylor(order: int, problems: Sequence[str]) -> Quantity:
    """`bpk.taylor`."""
    own = ways.of_model(lambda model, x: bpk.taylor(model, x, some(x), order))
    by_hand = {"jvp of jvp": ways.of_model(hand.nested(some, order))}
    if order == 2:
        by_hand = {"autograd.grad twice": ways.of_model(hand.twice(some), graph=True)} | by_hand
    least = ways.forward(1 + DIRECTIONS * order)
    return Quantity({"bpk": own, "limit": least, **by_hand, "jax jet": peers.jet(some, order)}, problems)


def of(make: Callable[[], extensions.backprop_extension.BackpropExtension], least: Way, **others: Way) -> dict[str, Way]:
    """An extension's ways; a way's name has spaces for underscores."""
    return {"bpk": ways.extension(make), "limit": least, **{name.replace("_", " "): way for name, way in others.items()}}


FEW = {"3c3d": 16, "mlp": 16}
ROWS = "vmap(grad)"

QUANTITIES = {
    "EKFLR": Quantity(
        of(extensions.EKFLR, limit(Setup.columns, ways.eigenbases)) | {
            "hooks": Way(partial(hand.eigenbases_by_hand, sampled=False)), "curvlinops": peers.curvlinops("type-2"),
        }, values=of_bases, tolerance=2e-2),
    "EKFAC": Quantity(
        of(extensions.EKFAC, limit(once, ways.eigenbases)) | {
            "hooks": Way(partial(hand.eigenbases_by_hand, sampled=True)), "curvlinops": peers.curvlinops("mc"),
        }, values=peers.of_trace, draws=5, tolerance=0.2),
    "BatchKFAC": Quantity(
        of(extensions.BatchKFAC, limit(once, ways.factors_of_samples)) | {"hooks": Way(hand.factors_by_hand)},
        values=of_factors, draws=5, tolerance=0.3),
    "GradGram": Quantity(
        {"bpk": ways.extension(extensions.GradGram, summed=True), "limit": limit(work=ways.inner_products),
         ROWS: hand.of_rows(lambda rows: [hand.gram(rows)])}),
    "GGNGram": Quantity(
        {"bpk": ways.extension(extensions.GGNGram, summed=True),
         "limit": limit(Setup.columns, lambda s: ways.inner_products(s, s.columns())),
         "vmap(vjp)": hand.of_columns(lambda columns, _: [hand.gram(columns, 2)]), "vivit": peers.vivit(None)},
        values=spectrum, samples=FEW),
    "eigenpairs": Quantity(
        {"bpk": ways.of_loss(pairs),
         "limit": limit(lambda s: s.columns() + 2 * PAIRS, lambda s: ways.inner_products(s, s.columns())),
         "vmap(vjp)": hand.of_columns(partial(hand.eigenpairs, k=PAIRS)), "vivit": peers.vivit(PAIRS)},
        values=of_pairs, samples=FEW),
    "ntk": Quantity(
        {"bpk": ways.of_model(lambda model, x: bpk.ntk(model, x), graph=True),
         "limit": limit(Setup.columns, lambda s: ways.inner_products(s, s.columns())),
         "vmap(jacrev)": Way(hand.kernel), "neural-tangents": peers.neural_tangents()}, samples=FEW),
    "ProjectedGrad gaussian": projection("gaussian"),
    "ProjectedGrad rademacher": projection("rademacher"),
    "ProjectedGrad sparse": projection("sparse"),
    "ProjectedGrad factored": Quantity(
        of(lambda: extensions.ProjectedGrad(K, "factored"), limit()) | {
            ROWS: hand.factored(K), "dattri": peers.dattri(K)}),
    "AxisGram": Quantity(
        of(extensions.AxisGram, limit(work=ways.sums_over_axes)) | {ROWS: hand.of_rows(hand.axes)}, values=of_axes),
    "DiagJTJExact": Quantity(
        of(extensions.DiagJTJExact, limit(Setup.columns)) | {"vmap(jacrev)": Way(hand.jacobian_squares)}),
    "DiagJTJMC": Quantity(
        of(extensions.DiagJTJMC, limit(once)) | {"vmap(vjp)": Way(hand.signed_squares)},
        values=lambda found: [torch.stack([f.sum() for f in found])], draws=5, tolerance=0.3),
    "taylor, order 2": taylor(2, ("tanh", "transformer")),
    "taylor, order 4": taylor(4, ("tanh",)),
    "input_hessian_diag": Quantity(
        {"bpk": ways.of_model(bpk.input_hessian_diag), "limit": ways.forward(1 + 2 * 50),
         "jacfwd(jacrev)": ways.of_model(hand.hessian_diagonals),
         "jvp of jvp": ways.of_model(lambda model, x: [2 * hand.nested(unit_vectors, 2)(model, x)[2].movedim(0, -1)])},
        ("tanh",)),
}  # fmt: skip
