"""What is made of several passes, batches or derivatives in the input, on random networks, by dense matrices.

    python -m tests.random_networks.beyond --count 400 --seed 0

compares operators, kernels and predictive covariances, eigenpairs and projections, derivatives in the input, what
`bpk.accumulate` makes of batches of unequal size (stopped, saved, in memory or on disk), a step of a preconditioner,
and products without extensions with their definitions by plain autograd; what is wrong is printed. `--only kernels`
looks at some of them.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bpk
from bpk import extensions as E
from bpk import preconditioners as P
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.hessianfree.ggnvp import ggn_vector_product
from bpk.hessianfree.hvp import hessian_vector_product
from bpk.kernels import Diagonal, Eigenbases, Kronecker, LowRank
from bpk.utils.ekfac import ekfac_to_mat
from bpk.utils.kroneckers import kfacs_to_mat
from tests.hunts import parser_of_seeds
from tests.random_networks.batches import Case, case
from tests.random_networks.program import Unfit
from tests.references.weight_norm import WrittenOut

SUMS = (E.Variance, E.SumGradSquared, E.DiagGGNExact, E.DiagHessian, E.KFLR, E.AxisGram, E.DiagJTJExact)
ROWS = (E.BatchGrad, E.BatchL2Grad, E.SqrtGGNExact, E.BatchDiagGGNExact, E.BatchDiagHessian, E.BatchKFLR)
TOKENS = (E.TokenL2Grad, E.TokenGrad, E.TokenDiagGGNExact, E.TokenTraceGGNExact)
ADDING_UP: tuple[type[BackpropExtension], ...] = (*SUMS, E.OutputDiagJTJExact, *ROWS, E.ProjectedGrad, *TOKENS)

Found = Iterator[tuple[str, Any, Any]]
"""What is compared: its name, what it is, and what it must be."""


def eye(n: int) -> Tensor:
    return torch.eye(n).double()


def in_blocks(c: Case, matrix: Tensor, blocks: str) -> Tensor:
    """The blocks on the diagonal."""
    kinds = {"whole": "", "parameter": "{0}", "layer": "{1}"}[blocks]
    owners = [kinds.format(name, name.rpartition(".")[0]) for name, p in c.params.items() for _ in range(p.numel())]
    numbers = torch.tensor([owners.index(owner) for owner in owners])
    return torch.where(numbers[:, None] == numbers, matrix, torch.zeros_like(matrix))


def in_order(matrix: Tensor, order: Tensor | None) -> Tensor:
    """A matrix by the entries of a parameter, of one by those of its factors (`note_order`)."""
    if order is None:
        return matrix
    found = torch.empty_like(matrix)
    found[order[:, None], order] = matrix
    return found


def passed(c: Case, *extensions: BackpropExtension, **options: Any) -> nn.Module:
    """A model of its own after one pass of all batches as one."""
    model, loss_fn = bpk.extend(copy.deepcopy(c.model)), bpk.extend(copy.deepcopy(c.loss_fn))
    with bpk.backpack(*extensions, **options):
        loss_fn(model(c.whole[0]), c.whole[1]).backward()
    return model


def blocks_of(c: Case, model: nn.Module, extension: Any, orders: E.KFLR) -> dict[str, Tensor]:
    """What fields of Kronecker factors, eigenbases or diagonals stand for, by parameter."""
    found = {}
    for name, p in model.named_parameters():
        value = getattr(p, extension.savefield, None)
        if value is None:
            continue
        if isinstance(value, Tensor):
            found[name] = value.flatten().diag()
            continue
        matrix = ekfac_to_mat(value) if isinstance(extension, E.EKFLR) else kfacs_to_mat(value)
        found[name] = in_order(matrix, (orders.orders or {}).get(p))
    return found


# ---- what is compared ----------------------------------------------------------------------------------
def operators(c: Case, r: random.Random) -> Found:
    loader: Any = c.batches[0] if len(c.batches) == 1 and r.random() < 0.5 else c.batches
    blocks, chunk_size = r.choice(["whole", "whole", "layer", "parameter"]), r.choice([1, 2, 16])
    given: Any = c.model, c.loss_fn, loader
    options: Any = {"blocks": blocks, "chunk_size": chunk_size}
    ggn, operator = in_blocks(c, c.ggn, blocks), bpk.operators.GGN(*given, **options)
    v = torch.randn(len(ggn), 3).double()
    yield "GGN", operator @ v, ggn @ v
    yield "GGN, one vector", operator @ v[:, 0], ggn @ v[:, 0]
    yield "GGN, a list", operator @ [*c.parts(v[:, 1]).values()], [*c.parts(ggn @ v[:, 1]).values()]
    several = {name: x.movedim(0, -1) for name, x in c.parts(v.T).items()}
    yield "GGN, a dictionary", operator @ several, {n: x.movedim(0, -1) for n, x in c.parts((ggn @ v).T).items()}
    fisher = in_blocks(c, c.gradients.T @ c.gradients * c.divisor, blocks)
    yield "EmpiricalFisher", bpk.operators.EmpiricalFisher(*given, **options) @ v, fisher @ v
    if c.hessian is not None:
        yield "Hessian", bpk.operators.Hessian(*given, **options) @ v, in_blocks(c, c.hessian, blocks) @ v
    jacobian, rows = bpk.operators.Jacobian(*given, chunk_size=chunk_size), c.jacobian.flatten(0, 1)
    u = torch.randn(len(rows), 2).double()
    yield "Jacobian", jacobian @ v, rows @ v
    yield "Jacobian, transposed", jacobian.T @ u, rows.T @ u
    drawn = bpk.operators.Fisher(*given, mc_samples=2, **options)
    yield "Fisher, twice", drawn @ v, drawn @ v
    yield "Fisher, symmetric", v.T @ (drawn @ v), (drawn @ v).T @ v


def factors(c: Case, r: random.Random) -> Found:
    extension = E.KFLR(r.choice(["default", "default", "expand", "reduce"]))
    extension.orders = {}
    operator = bpk.operators.KFAC(c.model, c.loss_fn, c.batches, approximation=extension.approximation)
    named = blocks_of(c, passed(c, extension), extension, extension)
    blocks = [named.get(name, 0 * eye(p.numel())) for name, p in c.params.items()]
    dense, v = torch.block_diag(*blocks), torch.randn(sum(map(len, blocks)), 2).double()
    yield "KFAC", operator @ v, dense @ v
    yield "KFAC, inverse", operator.inverse(0.1) @ (dense @ v + 0.1 * v), v


def kernels(c: Case, r: random.Random) -> Found:
    x1, x2 = c.batches[0][0], c.batches[-1][0]
    first, second, both = c.rows(c.model(x1)), c.rows(c.model(x2)), r.random() < 0.6
    full = torch.einsum("ncp,mdp->nmcd", first, second if both else first)
    given = (c.model, x1, x2) if both else (c.model, x1)
    yield "ntk", bpk.ntk(*given), full
    yield "ntk, diagonal", bpk.ntk(*given, kind="diagonal"), full.diagonal(dim1=2, dim2=3)
    yield "ntk, trace", bpk.ntk(*given, kind="trace"), full.diagonal(dim1=2, dim2=3).sum(2)
    chosen = r.sample([*c.params], r.randint(1, len(c.params)))
    some = {name: p for name, p in c.params.items() if name in chosen}
    rows = torch.cat([c.parts(first)[name].reshape(*first.shape[:2], -1) for name in some], 2)
    variances = {name: torch.rand(p.shape).double() for name, p in some.items()}
    flat = torch.cat([x.flatten() for x in variances.values()])
    yield "Diagonal", bpk.predictive_covariance(c.model, x1, Diagonal(variances)), (rows * flat) @ rows.mT
    u, w = {name: torch.randn(3, *p.shape).double() for name, p in some.items()}, torch.rand(3).double()
    along, rest = rows @ torch.cat([x.reshape(3, -1) for x in u.values()], 1).T, r.choice([0.0, 0.3])
    expected = (along * w) @ along.mT + rest * rows @ rows.mT
    yield "LowRank", bpk.predictive_covariance(c.model, x1, LowRank(u, w, rest)), expected
    for extension in (E.KFLR(), E.EKFLR()):
        orders = extension if isinstance(extension, E.KFLR) else E.KFLR()
        orders.orders = {}
        model = passed(c, *{extension, orders})
        named = blocks_of(c, model, extension, orders)
        if set(some) <= set(named):
            fields = {name: getattr(dict(model.named_parameters())[name], extension.savefield) for name in some}
            posterior = Kronecker(fields, 0.5, 2.0) if extension is orders else Eigenbases.of(fields, 0.5, 2.0)
            sigma = torch.linalg.inv(torch.block_diag(*[2.0 * named[n] + 0.5 * eye(len(named[n])) for n in some]))
            yield str(extension), bpk.predictive_covariance(c.model, x1, posterior), rows @ sigma @ rows.mT


def eigenpairs(c: Case, r: random.Random) -> Found:
    model, loss_fn, (x, y) = bpk.extend(c.model), bpk.extend(c.loss_fn), c.whole
    for of in ("ggn", "empirical_fisher"):
        each = c.ggn_of_samples if of == "ggn" else torch.einsum("np,nq->npq", c.gradients, c.gradients)
        values = torch.linalg.eigvalsh(each.sum(0)).flip(0)
        pairs = bpk.eigenpairs(model, loss_fn(model(x), y), k=r.choice([1, 3, 50]), of=of)
        good = pairs.values > 1e-6 * values[0].abs()
        yield f"eigenvalues, {of}", pairs.values, values[: len(good)]
        sizes = [p.numel() for p in c.params.values()]
        vectors = [v.reshape(len(good), size) for v, size in zip(pairs.vectors.values(), sizes, strict=True)]
        v = torch.cat(vectors, 1)[good]
        yield f"eigenvectors, {of}", each.sum(0) @ v.T, v.T * pairs.values[good]
        yield f"orthonormal, {of}", v @ v.T, eye(len(v))
        yield f"slopes, {of}", pairs.slopes[:, good], c.gradients @ v.T
        yield f"curvatures, {of}", pairs.curvatures[:, good], torch.einsum("kp,npq,kq->nk", v, each, v)
    for kind in ("gaussian", "factored", "sparse", "rademacher"):  # linear in gradients: the same matrix for all
        found = bpk.projected_gradients(model, loss_fn(model(x), y), k=4, kind=kind, seed=3)
        matrix = torch.linalg.lstsq(c.gradients, found, driver="gelsd").solution
        yield f"projections, {kind}", found, c.gradients @ matrix


def in_inputs(c: Case, r: random.Random) -> Found:
    x = c.batches[0][0]
    if isinstance(x, tuple) or not x.is_floating_point():
        return
    at = x.clone().requires_grad_()
    z, columns = c.model(at).flatten(1), []
    try:
        for e in z.unbind(1):  # samples do not mix
            (g,) = torch.autograd.grad(e.sum(), at, create_graph=True, allow_unused=True)
            flat = (at * 0 if g is None else g + 0 * at).flatten(1)
            more = [torch.autograd.grad(f.sum(), at, retain_graph=True)[0].flatten(1) for f in flat.unbind(1)]
            columns.append(torch.stack(more, 1).diagonal(dim1=1, dim2=2))
    except RuntimeError:  # torch has no second derivative
        return
    expected, chunk_size = torch.stack(columns, 1), r.choice([None, 1, 2])
    if not expected.isfinite().all():
        return
    with torch.no_grad():
        diagonal = bpk.input_hessian_diag(c.model, x, chunk_size=chunk_size)
        yield "diagonal", diagonal.reshape(expected.shape), expected
        yield "laplacian", bpk.laplacian(c.model, x, chunk_size=chunk_size).flatten(1), expected.sum(2)
        v, w = torch.randn(2, *x.shape).double(), torch.randn(2).double()
        series = bpk.taylor(c.model, x, v, order=2)
        yield "value", series[0].flatten(1), z
        yield "weighted", bpk.laplacian(c.model, x, v, w, chunk_size), 2 * torch.einsum("v,v...->...", w, series[2])


class Stop(Exception):
    """A run is killed."""


class Loader:
    """Batches; once, there is an error before one of them."""

    def __init__(self, batches: Sequence[Any], stop: int | None) -> None:
        self.batches, self.stop = batches, stop

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            if number == self.stop:
                self.stop = None
                raise Stop
            yield batch


def data_sets(c: Case, r: random.Random) -> Found:
    kinds, options = r.sample(ADDING_UP, r.randint(1, 4)), {"chunk_size": r.choice([None, None, 1, 2])}
    with tempfile.TemporaryDirectory() as folder:
        stops, where = r.random() < 0.4, r.choice([True, folder])
        loader = Loader(c.batches, r.randrange(len(c.batches)) if stops else None)
        kept: Any = {"checkpoint": f"{folder}/run.ckpt", "every": 1} if stops else {}

        def run() -> bpk.Accumulated:
            extensions = [kind() for kind in kinds]
            return bpk.accumulate(c.model, c.loss_fn, loader, *extensions, per_sample=where, **options, **kept)

        if stops:
            with suppress(Stop):
                run()
        found = run()
        if where is True and r.random() < 0.3:
            found.save(f"{folder}/found.safetensors")
            found = bpk.Accumulated.load(f"{folder}/found.safetensors")
        parts = [found.fields.get(name, {}).get("grad", p * 0).flatten() for name, p in c.params.items()]
        yield "gradient", torch.cat(parts), c.gradients.sum(0)
        yield "loss", found.loss, c.loss.item()
        yield "samples", found.samples, len(c.outputs)
        for name, p in passed(c, *[kind() for kind in kinds], **options).named_parameters():
            for field in (kind().savefield for kind in kinds):
                ours, theirs = found.fields.get(name, {}).get(field), getattr(p, field, None)
                if ours is None or theirs is None:
                    yield f"whether there is {field} of {name}", ours is None, theirs is None
                elif field == "sqrt_ggn_exact":  # any root of the same matrices
                    yield f"{field} of {name}", *(torch.as_tensor(x).square().sum(0) for x in (ours, theirs))
                else:
                    yield f"{field} of {name}", in_tensors(ours), in_tensors(theirs)


def in_tensors(value: Any) -> Any:
    """A field as dense tensors."""
    several = isinstance(value, (list, tuple))
    return [in_tensors(x) for x in value] if several else torch.as_tensor(value).to_dense()


PRECONDITIONERS: Sequence[tuple[Any, Any]] = ((P.KFAC, E.KFLR), (P.EKFAC, E.EKFLR), (P.DiagonalGGN, E.DiagGGNExact))


def preconditioned(c: Case, r: random.Random) -> Found:
    kind, field_of = r.choice(PRECONDITIONERS)
    model, loss_fn, extension = copy.deepcopy(c.model), bpk.extend(copy.deepcopy(c.loss_fn)), field_of()
    intervals: Any = {} if kind is P.DiagonalGGN else {"intervals": (1, 1)}
    preconditioner = kind(model, damping=0.2, mc_samples=None, **intervals)
    one = kind is P.EKFAC or c.loss_fn.reduction != "sum"  # bases of EKFAC are those of the first pass
    for x, y in [c.whole] if one else c.batches:
        with preconditioner:
            loss_fn(model(x), y).backward()
    preconditioner.step()
    orders = extension if isinstance(extension, E.KFLR) else E.KFLR()
    orders.orders = {}
    other = passed(c, *{extension, orders})
    named = blocks_of(c, other, extension, orders)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if name in named and q.grad is not None:
            matrix = named[name] + 0.2 * eye(p.numel())
            yield f"{kind.__name__} of {name}", p.grad, torch.linalg.solve(matrix, q.grad.flatten()).view_as(p)


def without_extensions(c: Case, r: random.Random) -> Found:
    (x, y), model = c.whole, bpk.extend(c.model) if r.random() < 0.5 else c.model
    v = torch.randn(len(c.ggn)).double()
    if c.hessian is None:
        return
    with sdpa_kernel(SDPBackend.MATH), WrittenOut():  # as for the Hessian by plain autograd
        output, vectors = model(x), [*c.parts(v).values()]
    loss = c.loss_fn(output, y)
    found = hessian_vector_product(loss, [*c.params.values()], vectors)
    yield "Hessian", [*found], [*c.parts(c.hessian @ v).values()]
    yield "GGN", [*ggn_vector_product(loss, output, model, vectors)], [*c.parts(c.ggn @ v).values()]


CHECKS: tuple[Callable[[Case, random.Random], Found], ...] = (
    *(operators, factors, kernels, eigenpairs, in_inputs, data_sets, preconditioned, without_extensions),
)


# ---- how it is compared --------------------------------------------------------------------------------
def same(found: Any, expected: Any) -> bool:
    """Whether two values agree, nested ones part by part."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, Tensor):
        size = float(expected.abs().max()) if expected.numel() else 0.0
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-6, atol=1e-8 * (1 + size))
    if isinstance(expected, float):
        return abs(found - expected) <= 1e-8 * max(1.0, abs(expected))
    return bool(found == expected)


def examine(seed: int, only: Sequence[str] = ()) -> tuple[list[str], list[str], int]:
    """What is wrong with the network of a seed, what is refused, and how much was compared.

    Raises:
        Unfit: If it is none.
    """
    drawn, count = case(seed), 0
    wrong, refused = list[str](), list[str]()
    for check in CHECKS:
        name = check.__name__
        if only and name not in only:
            continue
        torch.manual_seed(seed)
        try:
            for what, found, expected in check(drawn.fresh(), random.Random(f"{seed} {name}")):
                count += 1
                if not same(found, expected):
                    wrong.append(f"{name}: {what}")
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}"
            if "Why:" in text:
                refused.append(text)
            else:
                wrong.append(text + "\n" + "".join(traceback.format_tb(error.__traceback__)[-5:]))
    return wrong, refused, count


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at many networks, print what is wrong, and what was refused."""
    parser = parser_of_seeds(__doc__)
    parser.add_argument("--only", action="append", default=[], choices=[check.__name__ for check in CHECKS])
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    counts, reasons = Counter[str](), Counter[str]()
    for seed in range(given.seed, given.seed + given.count):
        try:
            wrong, refused, count = examine(seed, given.only)
        except Unfit:
            continue
        counts.update({"networks": 1, "comparisons": count, "wrong": len(wrong)})
        for text in wrong:
            print(f"seed {seed}: {text}", flush=True)
        for text in refused:
            why = next(line.strip() for line in text.splitlines() if "Why:" in line)
            reasons[f"{text.partition(':')[0]}: {why[:120]}"] += 1
    print(dict(counts))
    for reason, count in reasons.most_common():
        print(f"  refused {count:4d} x {reason}")
    return bool(counts["wrong"])


if __name__ == "__main__":
    sys.exit(main())
