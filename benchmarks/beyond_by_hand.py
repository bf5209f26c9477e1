"""Ways to the quantities of `benchmarks.beyond` that users write by hand: `torch.func`, hooks, nested derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vjp, vmap
from torch.nn.functional import unfold

from benchmarks.alternative import draw_targets, hessian_root
from benchmarks.beyond_ways import Inapplicable, Run, Way
from benchmarks.functional import COLUMN_CHUNK_BYTES, VmapJob
from benchmarks.problems import Setup
from benchmarks.quantities import QUANTITIES
from bpk.extensions import ProjectedGrad
from bpk.utils.ekfac import Eigenbasis
from bpk.utils.projections import blocks_of_matrix

# torch.func


def of_rows(function: Callable[[list[Tensor]], list[Any]]) -> Way:
    """From individual gradients `[N, *p]` by `vmap(grad)`."""

    def prepare(setup: Setup) -> Run:
        job = VmapJob(setup, QUANTITIES["BatchGrad"])
        return lambda: function(job.rows(setup.targets, setup.positions))

    return Way(prepare)


def of_columns(function: Callable[[list[Tensor], Setup], list[Any]]) -> Way:
    """From the columns `[C, N, *p]` of the GGN's square root, by `vmap` of `vjp`."""

    def prepare(setup: Setup) -> Run:
        job = VmapJob(setup, QUANTITIES["SqrtGGNExact"])
        return lambda: function(job.exact(), setup)

    return Way(prepare)


def gram(rows: list[Tensor], lead: int = 1) -> Tensor:
    """Inner products of all rows, over all parameters."""
    flat = [r.flatten(0, lead - 1).flatten(1) for r in rows]
    return torch.stack([r @ r.T for r in flat]).sum(0)


def projected(kind: str, k: int, kept: bool) -> Way:
    """Rows times the transposed matrix, which is drawn in each run, or once and kept."""

    def prepare(setup: Setup) -> Run:
        job = VmapJob(setup, QUANTITIES["BatchGrad"])

        def matrix(p: Tensor) -> Tensor:
            blocks = blocks_of_matrix(kind, k, p.shape, 0, p.detach())
            return torch.cat([rows for _, rows in blocks], 1).flatten(1)

        known = [matrix(p) for p in setup.params] if kept else None

        def run() -> list[Any]:
            rows = job.rows(setup.targets, setup.positions)
            matrices = known or (matrix(p) for p in setup.params)
            return [r.flatten(1) @ m.T for r, m in zip(rows, matrices, strict=True)]

        return run

    return Way(prepare)


def factored(k: int) -> Way:
    """`R_o g R_i^T` of rows, and Gaussian projections of parameters with one axis; the matrices are kept."""

    def prepare(setup: Setup) -> Run:
        job, made = VmapJob(setup, QUANTITIES["BatchGrad"]), ProjectedGrad(k, "factored")
        sides = [made.factors(p.shape, p.detach()) if p.dim() > 1 else None for p in setup.params]
        whole = [made.whole(p.shape, p.detach()) if p.dim() < 2 else None for p in setup.params]

        def run() -> list[Any]:
            found = []
            for r, pair, matrix in zip(job.rows(setup.targets, setup.positions), sides, whole, strict=True):
                if pair is not None:
                    found.append((pair[0] @ r.flatten(2) @ pair[1].T).flatten(1))
                elif matrix is not None:
                    found.append(r @ matrix.T)
            return found

        return run

    return Way(prepare)


def axes(rows: list[Tensor]) -> list[Any]:
    """`sum_n G_nk G_nk^T` for each axis."""
    found = []
    for r in rows:
        unfolded = [r.movedim(1 + axis, 0).flatten(1) for axis in range(r.dim() - 1)]
        found.append([u @ u.T for u in unfolded])
    return found


def eigenpairs(columns: list[Tensor], setup: Setup, k: int) -> list[Any]:
    """Eigenvalues, eigenvectors, slopes of the samples' losses, and curvatures."""
    values, vectors = torch.linalg.eigh(gram(columns, 2))
    values, vectors = values[-k:].flip(0), vectors[:, -k:].flip(1)
    flat = [c.flatten(0, 1) for c in columns]
    directions = [torch.tensordot(vectors / values.sqrt(), f, ([0], [0])) for f in flat]
    rows = VmapJob(setup, QUANTITIES["BatchGrad"]).rows(setup.targets, setup.positions)
    slopes = sum(r.flatten(1) @ d.flatten(1).T for r, d in zip(rows, directions, strict=True))
    curvatures = values * vectors.view(-1, setup.batch, len(values)).square().sum(0)
    return [values, *directions, slopes, curvatures]


def outputs(setup: Setup) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The prediction for one sample, as a function of parameters."""
    return lambda params, x: functional_call(setup.model, params, (x[None],))[0]


def jacobian_squares(setup: Setup) -> Run:
    """`sum_nc (d f_nc / d p)^2`, some samples at a time."""
    each = vmap(jacrev(outputs(setup)), (None, 0))
    weights = sum(p.numel() for p in setup.params) * setup.columns()

    def run() -> list[Any]:
        point = {name: p.detach() for name, p in setup.model.named_parameters()}
        parts = setup.inputs.split(max(1, COLUMN_CHUNK_BYTES // (4 * weights)))
        found = [[j.square().sum((0, 1)) for j in each(point, x).values()] for x in parts]
        return [torch.stack(one).sum(0) for one in zip(*found, strict=True)]

    return run


def signed_squares(setup: Setup) -> Run:
    """The same by a product with random signs."""

    def one(point: dict[str, Tensor], x: Tensor, signs: Tensor) -> dict[str, Tensor]:
        return vjp(lambda params: outputs(setup)(params, x), point)[1](signs)[0]

    def run() -> list[Any]:
        point = {name: p.detach() for name, p in setup.model.named_parameters()}
        signs = torch.randint(2, (setup.batch, setup.columns())).float() * 2 - 1
        return [j.square().sum(0) for j in vmap(one, (None, 0, 0))(point, setup.inputs, signs).values()]

    return run


def kernel(setup: Setup) -> Run:
    """`J(x_n) J(x_m)^T` of all outputs, from Jacobians by `vmap(jacrev)`."""
    each = vmap(jacrev(outputs(setup)), (None, 0))

    def run() -> list[Any]:
        point = {name: p.detach() for name, p in setup.model.named_parameters()}
        rows = [j.flatten(2) for j in each(point, setup.inputs).values()]
        return [torch.stack([torch.einsum("ncp,mdp->nmcd", j, j) for j in rows]).sum(0)]

    return run


# Hooks at linear layers and convolutions


def layers(setup: Setup) -> Callable[[], tuple[Tensor, list[tuple[nn.Module, Tensor, Tensor]]]]:
    """A forward pass: the prediction, and of each layer its inputs `[N, A, T]` and its output."""
    known = [m for m in setup.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    if sum(len(list(m.parameters())) for m in known) != len(setup.params) or setup.functions:
        raise Inapplicable("needs the inputs of all layers")
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        seen.append((module, inputs[0], out))

    for layer in known:
        layer.register_forward_hook(note)

    def patches(layer: nn.Module, x: Tensor) -> Tensor:
        x = x.detach()
        if isinstance(layer, nn.Conv2d):
            return unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return x.unsqueeze(2)

    def run() -> tuple[Tensor, list[tuple[nn.Module, Tensor, Tensor]]]:
        seen.clear()
        out = setup.model(setup.inputs)
        found = [(layer, patches(layer, x), y) for layer, x, y in seen]
        seen.clear()
        return out, found

    return run


def backpropagated(setup: Setup, out: Tensor, at: list[Tensor], sampled: bool) -> list[list[Tensor]]:
    """Columns `[N, O, T]` at outputs of layers: for each column, one for each layer."""
    root = hessian_root(out.detach(), setup.positions)
    if sampled:
        target = nn.functional.one_hot(draw_targets(out), out.shape[1])
        root = ((out.detach().softmax(1) - target) / setup.positions**0.5)[None]
    return [[m.flatten(2) if m.dim() > 2 else m[..., None] for m in torch.autograd.grad(out, at, c, retain_graph=True)]
            for c in root]  # fmt: skip


def eigenbases_by_hand(setup: Setup, sampled: bool) -> Run:
    """Factors, their eigenbases, and the second moments of columns in them."""
    forward = layers(setup)

    def run() -> list[Any]:
        out, seen = forward()
        columns = backpropagated(setup, out, [y for _, _, y in seen], sampled)
        found: list[Any] = []
        for (layer, a, _), ms in zip(seen, zip(*columns, strict=True), strict=True):
            bias = torch.cat([m.sum(2) for m in ms])
            values, left = torch.linalg.eigh(bias.T @ bias)
            flat = a.transpose(1, 2).flatten(0, 1)
            right = torch.linalg.eigh(flat.T @ flat)[1]
            rotated = (a.mT @ right).mT
            turned = [(m.mT @ left).mT for m in ms]
            if a.shape[2] == 1:  # the square of an outer product is the outer product of the squares
                moments = sum(t[..., 0].square() for t in turned).T @ rotated[..., 0].square()
            else:
                moments = sum((t @ rotated.mT).square().sum(0) for t in turned)
            found += [Eigenbasis([left, right], moments)] + [Eigenbasis([left], values)] * (layer.bias is not None)
        return found

    return run


def factors_by_hand(setup: Setup) -> Run:
    """Kronecker factors of each sample, with sampled columns."""
    forward = layers(setup)

    def run() -> list[Any]:
        out, seen = forward()
        (columns,) = backpropagated(setup, out, [y for _, _, y in seen], True)
        found: list[Any] = []
        for (layer, a, _), m in zip(seen, columns, strict=True):
            b = m.sum(2, keepdim=True)
            outer = b @ b.mT
            found += [[outer, a @ a.mT]] + [[outer]] * (layer.bias is not None)
        return found

    return run
