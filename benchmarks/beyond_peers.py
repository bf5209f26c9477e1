"""Packages that give quantities of `benchmarks.beyond`, where they are installed, by what their documentation says.

Each is imported when it is prepared: what is missing is told of and left out.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
from collections.abc import Callable
from math import factorial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.beyond_ways import Inapplicable, Run, Way
from benchmarks.functional import VmapJob
from benchmarks.peers import declare_torchvision_operators
from benchmarks.problems import Setup
from benchmarks.quantities import QUANTITIES
from bpk.utils.ekfac import Eigenbasis

PACKAGES = (
    "curvlinops-for-pytorch", "backpack-for-pytorch", "vivit-for-pytorch", "traker", "dattri", "jax", "neural-tangents"
)  # fmt: skip


def curvlinops(fisher_type: str) -> Way:
    """`EKFACLinearOperator`, made anew in every run: it has no other way to see new parameters."""

    def prepare(setup: Setup) -> Run:
        package: Any = importlib.import_module("curvlinops")

        def run() -> list[Any]:
            operator = package.EKFACLinearOperator(
                setup.model, setup.loss, setup.params, [(setup.inputs, setup.targets)], check_deterministic=False,
                fisher_type=fisher_type, seed=int(torch.randint(2**31, ())), num_data=setup.batch,
                num_per_example_loss_terms=1,
            )  # fmt: skip
            operator.compute_kronecker_factors()
            operator.compute_eigenvalue_correction()
            return [operator]

        return run

    return Way(prepare, lambda found: [found[0].trace], of_trace)


def of_trace(found: list[Eigenbasis]) -> list[Tensor]:
    """The sum of all moments: another basis has the same."""
    return [torch.stack([one.moments.sum() for one in found]).sum()]


def vivit(k: int | None) -> Way:
    """ViViT's `EigvalshComputation`, or `EighComputation` with `k` eigenvectors: without slopes and curvatures.

    Version 1.0.0 calls `Tensor.symeig`, which torch has removed; it is given back, as torch's message says it.
    """

    def prepare(setup: Setup) -> Run:
        declare_torchvision_operators()
        linalg: Any = importlib.import_module("vivit")
        backpack: Any = importlib.import_module("backpack")
        torch.Tensor.symeig = symeig  # type: ignore[method-assign, assignment]
        if setup.functions:
            raise Inapplicable("needs a chain of BackPACK's modules")
        model, loss = backpack.extend(setup.model), backpack.extend(setup.loss)
        group: dict[str, Any] = {"params": setup.params}
        if k is not None:
            group["criterion"] = lambda values: list(range(len(values) - k, len(values)))

        def run() -> list[Any]:
            made = linalg.EigvalshComputation() if k is None else linalg.EighComputation(warn_small_eigvals=0.0)
            with backpack.backpack(made.get_extension(), extension_hook=made.get_extension_hook([group])):
                loss(model(setup.inputs), setup.targets).backward()
            found = made.get_result(group)
            return [found.flip(0)] if k is None else [found[0].flip(0), *(v.flip(0) for v in found[1])]

        return run

    return Way(prepare, lambda found: [found[0]], None if k is None else lambda found: [found[0]])


def symeig(matrix: Tensor, eigenvectors: bool = False, upper: bool = True) -> tuple[Tensor, Tensor]:
    """What torch had under this name."""
    side = "U" if upper else "L"
    if eigenvectors:
        values, vectors = torch.linalg.eigh(matrix, UPLO=side)
        return values, vectors
    return torch.linalg.eigvalsh(matrix, UPLO=side), matrix.new_empty(0)


def inner_products(found: list[Tensor]) -> list[Tensor]:
    """Of projections of the whole model's gradients."""
    return [torch.stack([z @ z.T for z in found]).sum(0)]


def trak(kind: str, k: int) -> Way:
    """Individual gradients by `vmap(grad)`, as TRAK's gradient computer has them, and TRAK's projector for a CPU."""

    def prepare(setup: Setup) -> Run:
        projectors: Any = importlib.import_module("trak.projectors")
        job, width = VmapJob(setup, QUANTITIES["BatchGrad"]), sum(p.numel() for p in setup.params)
        type_of = {"gaussian": projectors.ProjectionType.normal, "rademacher": projectors.ProjectionType.rademacher}
        project = projectors.BasicProjector(width, k, 0, type_of[kind], torch.device("cpu"), block_size=min(k, 16))

        def run() -> list[Any]:
            rows = job.rows(setup.targets, setup.positions)
            return [project.project(torch.cat([r.flatten(1) for r in rows], 1), 0) / k**0.5]

        return run

    return Way(prepare, inner_products, inner_products, 0.5)


def dattri(k: int) -> Way:
    """LoGra of dattri, for weights of linear layers: what it caches of a data set of one batch."""

    def prepare(setup: Setup) -> Run:
        algorithm: Any = importlib.import_module("dattri.algorithm")
        task: Any = importlib.import_module("dattri.task")
        if setup.functions or any(isinstance(m, nn.Conv2d) for m in setup.model.modules()):
            raise Inapplicable("linear layers only")
        data = DataLoader(TensorDataset(setup.inputs, setup.targets), batch_size=setup.batch)

        def loss(model: nn.Module, batch: Any, device: str) -> Tensor:
            return setup.loss(model(batch[0]), batch[1])

        model = copy.deepcopy(setup.model)
        made = task.AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())

        def run() -> list[Any]:
            with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
                found = algorithm.LoGraAttributor(made, hessian="Identity", proj_dim=k, offload="none")
                found.cache(data)
            return [found, data]

        return run

    def values(found: list[Any]) -> list[Tensor]:
        with contextlib.redirect_stderr(io.StringIO()):
            return [found[0].attribute(found[1], found[1]) / len(found[1].dataset) ** 2]

    return Way(prepare, values, inner_products, 0.5)


def jax_function(model: nn.Module) -> tuple[Callable[[list[Any], Any], Any], list[Any]]:
    """A chain of layers as a function of parameters and inputs, on one thread, and the parameters."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    jax: Any = importlib.import_module("jax")
    known: dict[type[nn.Module], Callable[[Any, Any, list[Any]], Any]] = {
        nn.Linear: lambda layer, x, own: x @ own[0].T + own[1],
        nn.Conv2d: lambda layer, x, own: (
            jax.lax.conv_general_dilated(x, own[0], layer.stride, [(p, p) for p in layer.padding])
            + own[1][:, None, None]
        ),
        nn.MaxPool2d: lambda layer, x, own: jax.lax.reduce_window(
            x, -jax.numpy.inf, jax.lax.max, (1, 1, layer.kernel_size, layer.kernel_size),
            (1, 1, layer.stride, layer.stride), [(0, 0), (0, 0), *(beyond(layer, size) for size in x.shape[2:])],
        ),
        nn.Flatten: lambda layer, x, own: x.reshape(len(x), -1),
        nn.ReLU: lambda layer, x, own: jax.nn.relu(x),
        nn.Tanh: lambda layer, x, own: jax.numpy.tanh(x),
    }  # fmt: skip
    if not isinstance(model, nn.Sequential) or not {type(layer) for layer in model} <= set(known):
        raise Inapplicable("chains of a few layers only")

    def apply(params: list[Any], x: Any) -> Any:
        for layer, own in zip(model, params, strict=True):
            x = known[type(layer)](layer, x, own)
        return x

    return apply, [[jax.numpy.asarray(p.detach().numpy()) for p in layer.parameters()] for layer in model]


def beyond(layer: nn.MaxPool2d, size: int) -> tuple[int, int]:
    """How far the windows of a pooling with `ceil_mode` reach over the end."""
    steps = (size - layer.kernel_size) / layer.stride  # type: ignore[operator]
    last = int(-(-steps // 1) if layer.ceil_mode else steps // 1)
    return 0, max(0, last * layer.stride + layer.kernel_size - size)  # type: ignore[operator]


def neural_tangents() -> Way:
    """The kernel of all outputs by structured derivatives, compiled."""

    def prepare(setup: Setup) -> Run:
        function, params = jax_function(setup.model)
        jax: Any = importlib.import_module("jax")
        package: Any = importlib.import_module("neural_tangents")
        way = package.NtkImplementation.STRUCTURED_DERIVATIVES
        made = package.empirical_ntk_fn(
            lambda p, x: function(p, x), trace_axes=(), vmap_axes=0, implementation=way
        )
        kernel, inputs = jax.jit(lambda x, p: made(x, None, p)), jax.numpy.asarray(setup.inputs.numpy())
        return lambda: [kernel(inputs, params).block_until_ready()]

    return Way(prepare, as_tensors)


def jet(directions: Callable[[Tensor], Tensor], order: int) -> Way:
    """Taylor coefficients by `jax.experimental.jet`, for all directions at once, compiled."""

    def prepare(setup: Setup) -> Run:
        function, params = jax_function(setup.model)
        jax: Any = importlib.import_module("jax")
        mode: Any = importlib.import_module("jax.experimental.jet")

        def along(params: list[Any], x: Any, v: Any) -> Any:
            out, found = mode.jet(lambda z: function(params, z), (x,), ([v] + [0 * v] * (order - 1),))
            return [out, *(c / factorial(k) for k, c in enumerate(found, 1))]

        compiled = jax.jit(jax.vmap(along, (None, None, 0), (([None] + [0] * order))))
        x, v = (jax.numpy.asarray(t.contiguous().numpy()) for t in (setup.inputs, directions(setup.inputs)))
        return lambda: jax.block_until_ready(compiled(params, x, v))

    return Way(prepare, as_tensors)


def as_tensors(found: list[Any]) -> list[Tensor]:
    """Arrays of JAX in torch."""
    return [torch.from_numpy(np.array(f)) for f in found]
