"""KFRA on any graph by its definition: `G <- mean_n T_n^T G T_n` with dense matrices over all tensors side by side.

A graph is written down layer by layer, in the order of the forward pass. Every tensor, and every parameter (of a layer
with Kronecker factors: a bias shared by its uses), owns some coordinates of one long vector. Visiting a layer, `T_n` is
the identity with the rows of its output replaced by the Jacobian of sample `n`, which plain autograd computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from tests.models import networks
from tests.references.kronecker import KRONECKER, gradients, leaves, of_bias
from tests.references.reference import LossOf, Reference


@dataclass(frozen=True)
class Layer:
    """`name = function(*inputs)`; `module` owns the parameters. The network's input is called `"x"`."""

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[str, ...]
    module: nn.Module | None = None


def layer(name: str, module: nn.Module, *inputs: str) -> Layer:
    """A layer that is a module."""
    return Layer(name, module, inputs, module)


def chain(layers: Sequence[nn.Module], start: str, prefix: str = "") -> list[Layer]:
    """Modules one after the other."""
    names = [start, *[f"{prefix}{k}" for k in range(len(layers))]]
    return [layer(names[k + 1], module, names[k]) for k, module in enumerate(layers)]


def averaged(
    graph: Sequence[Layer], x: Tensor, losses: Sequence[tuple[str, LossOf]], samples: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """`G` by `id` of a parameter; `losses` are functions of named tensors."""
    values = {"x": x}
    points: dict[str, list[Tensor]] = {}
    for one in graph:
        points[one.name] = [values[i].detach().requires_grad_(values[i].is_floating_point()) for i in one.inputs]
        values[one.name] = one.function(*[p.clone() for p in points[one.name]])
    chosen = list(range(len(x))) if samples is None else list(samples)

    places: dict[str | int, slice] = {}
    jacobians = {one.name: jacobians_of(one, points[one.name], values[one.name]) for one in graph}
    size = 0
    for one in graph:
        for key, width in [(one.name, values[one.name][0].numel())] + [(k, j.shape[2]) for k, j in jacobians[one.name]]:
            if key not in places:
                places[key] = slice(size, size + width)
                size += width
    matrix = torch.zeros(size, size, dtype=x.dtype)
    for name, loss in losses:
        pred = values[name].detach()
        n, d = len(pred), pred[0].numel()
        full = torch.autograd.functional.hessian(lambda flat, p=pred, f=loss: f(flat.reshape(p.shape)), pred.flatten())
        blocks = full.reshape(n, d, n, d)
        matrix[places[name], places[name]] += torch.stack([blocks[k, :, k] for k in chosen]).sum(0)
    for one in reversed(graph):
        here = places[one.name]
        total = torch.zeros_like(matrix)
        for n in chosen:
            step = torch.eye(size, dtype=x.dtype)
            step[here] = 0
            for key, jac in jacobians[one.name]:
                step[here, places[key]] += jac[n]
            total += step.T @ matrix @ step
        matrix = total / len(chosen)
    return {key: matrix[place, place] for key, place in places.items() if isinstance(key, int)}


def jacobians_of(one: Layer, points: Sequence[Tensor], output: Tensor) -> list[tuple[str | int, Tensor]]:
    """`[N, D, D_input]` per input, and `[N, D, C]` per parameter; samples do not mix."""
    flat = output.reshape(len(output), -1)
    found: list[tuple[str | int, Tensor]] = []
    for name, point in zip(one.inputs, points, strict=True):
        if name != "x" and point.requires_grad:
            rows = [gradients(flat[:, d].sum(), [point])[0].flatten(1) for d in range(flat.shape[1])]
            found.append((name, torch.stack(rows, 1)))
    for name, param in one.module.named_parameters() if one.module is not None else ():
        if not param.requires_grad:
            continue
        if isinstance(one.module, KRONECKER) and name in ("weight", "bias"):
            unit = torch.eye(flat.shape[1], dtype=flat.dtype).expand(len(flat), -1, -1)
            jac = of_bias(one.module, unit, output.shape, tuple(p.detach() for p in points))
        else:
            rows = [gradients(entry, [param])[0].flatten() for entry in flat.flatten()]
            jac = torch.stack(rows).reshape(*flat.shape, -1)
        found.append((id(param), jac))
    return found


# ---- the branched networks of the matrix ----------------------------------------------------------------
def graph_of(model: nn.Module) -> list[Layer] | None:
    """A network of the matrix, layer by layer (`None`: nobody has written it down)."""
    m = model
    if any(isinstance(one, nn.RNNBase | nn.RNNCellBase | networks.TakeFirst) for one in m.modules()):
        return None
    if isinstance(m, nn.Sequential):
        return chain([one for _, one in leaves(m, "")], "x")
    if isinstance(m, networks.Squeeze) and isinstance(m.layers, nn.Sequential):
        body = chain(list(m.layers), "x")
        return [*body, Layer("squeezed", lambda z: z.squeeze(1), (body[-1].name,))]
    if isinstance(m, networks.ManyInputs):
        feeds = [layer(f"feed{k}", feed, "x") for k, feed in enumerate(m.feeds)]

        def joined(*fed: Tensor) -> Tensor:
            return m.layer(*[z.reshape(-1, *s) for z, s in zip(fed, m.shapes, strict=True)])

        inside = Layer("layer", joined, tuple(f.name for f in feeds), m.layer)
        return [*feeds, inside, *chain(list(m.head), "layer", "head")]
    if isinstance(m, networks.Residual):

        def gate(z: Tensor, h: Tensor) -> Tensor:
            return nn.functional.softplus(h) * torch.sigmoid(z)

        first, act = layer("first", m.first, "x"), Layer("act", torch.sigmoid, ("first",))
        skip, branch = Layer("skip", torch.sigmoid, ("first",)), Layer("branch", gate, ("first", "inner"))
        join = Layer("sum", torch.add, ("skip", "branch"))
        return [first, act, layer("inner", m.inner, "act"), skip, branch, join, last(m, "sum")]
    if isinstance(m, networks.InPlaceSum):
        first, act = layer("first", m.first, "x"), Layer("act", torch.tanh, ("first",))
        skip, join = Layer("skip", torch.tanh, ("first",)), Layer("sum", torch.add, ("inner", "skip"))
        end = Layer("relu", torch.relu, ("sum",))
        return [first, act, layer("inner", m.inner, "act"), skip, join, end, last(m, "relu")]
    if isinstance(m, networks.Reused | networks.Tied):
        inner, again = (m.inner, m.inner) if isinstance(m, networks.Reused) else (m.first, m.second)
        body = [layer("a", inner, "x"), layer("b", m.act, "a"), layer("c", again, "b"), layer("d", m.act, "c")]
        return [*body, last(m, "d")]
    if isinstance(m, networks.Siamese):
        halves = [Layer(f"in{k}", lambda x, k=k: m.inner(x.chunk(2, 1)[k]), ("x",), m.inner) for k in range(2)]
        acts = [layer(f"act{k}", m.act, f"in{k}") for k in range(2)]
        return [*halves, *acts, Layer("product", torch.mul, ("act0", "act1")), last(m, "product")]
    return None


def last(model: nn.Module, of: str) -> Layer:
    """The last layer."""
    assert isinstance(model.last, nn.Module)
    return layer("last", model.last, of)


@lru_cache(maxsize=2)
def averaged_of(ref: Reference) -> dict[int, Tensor]:
    """`G` of all parameters of a network of the matrix."""
    graph = graph_of(ref.model)
    assert graph is not None
    torch.manual_seed(ref.seed)
    return averaged(graph, ref.inputs[0], [(graph[-1].name, ref.loss_of)])


def kfra(ref: Reference, name: str) -> list[Tensor]:
    """`[G, A]` or `[G]`."""
    factor = averaged_of(ref)[id(ref.params[name])]
    return [factor, *ref.kflr(name)[1:]]
