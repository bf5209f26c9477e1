"""The Laplacian of a network in its input: `bpk.laplacian` beside nested autograd, time and peak memory.

    python -m benchmarks.input_derivatives [--samples 2048] [--rounds 5]

Two problems: the network of Dangel et al. (2025), Collapsing Taylor mode automatic differentiation (50 inputs, four
hidden layers), evaluated; and the step of a physics-informed network (two inputs), whose loss is differentiated in the
parameters.
Alternatives run one after the other in each round, on one thread; times are the process's CPU seconds, medians over
rounds. Peaks of memory are those of a process that runs one alternative once, less that of a process that runs the
forward pass alone.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import bpk
from benchmarks.own_process import in_own_process

Run = Callable[[], Tensor]


def network(*sizes: int) -> nn.Sequential:
    """Linear layers with tanh in between."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def unit_vectors(x: Tensor) -> Tensor:
    """`[D, N, D]`."""
    return torch.eye(x.shape[1])[:, None].expand(-1, *x.shape)


def forward_over_reverse(model: nn.Module, x: Tensor) -> Tensor:
    """`e_i^T (H e_i)`: the derivative of the gradient along each unit vector, all at once."""
    gradient = grad(lambda z: model(z).sum())
    return vmap(lambda v: (jvp(gradient, (x,), (v,))[1] * v).sum(1))(unit_vectors(x)).sum(0)


def forward_over_forward(model: nn.Module, x: Tensor) -> Tensor:
    """`jvp` of `jvp` along each unit vector, all at once."""

    def second(v: Tensor) -> Tensor:
        return jvp(lambda z: jvp(model, (z,), (v,))[1], (x,), (v,))[1]

    return vmap(second)(unit_vectors(x)).sum(0)[:, 0]


def hessians(model: nn.Module, x: Tensor) -> Tensor:
    """The trace of `jacfwd(jacrev(f))` of each sample."""
    return vmap(jacfwd(jacrev(lambda z: model(z)[0])))(x).diagonal(dim1=1, dim2=2).sum(1)


def double_backward(model: nn.Module, x: Tensor) -> Tensor:
    """As most physics-informed networks are written: `torch.autograd.grad` twice, for each input."""
    x = x.detach().requires_grad_()
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    columns = range(x.shape[1])
    return torch.stack([torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in columns]).sum(0)


def forward_laplacian(model: nn.Module, x: Tensor) -> Tensor:
    """`bpk.laplacian`."""
    return bpk.laplacian(model, x)[:, 0]


def output(model: nn.Module, x: Tensor) -> Tensor:
    """The forward pass alone."""
    return model(x)[:, 0]


ALTERNATIVES = {
    "forward pass": output,
    "jvp of grad, vmap": forward_over_reverse,
    "jvp of jvp, vmap": forward_over_forward,
    "jacfwd(jacrev), vmap": hessians,
    "bpk.laplacian": forward_laplacian,
}

SIZES = {"evaluate": (50, 768, 768, 512, 512, 1), "train": (2, 64, 64, 64, 1)}


def prepared(problem: str, samples: int, alternative: str) -> Run:
    """One alternative on a problem; the same network and inputs for all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network(*SIZES[problem])
    x = torch.randn(samples, SIZES[problem][0])
    function = ALTERNATIVES.get(alternative, double_backward)
    if problem == "evaluate":
        model.requires_grad_(False)
        return partial(evaluated, function, model, x)
    return partial(gradient, function, model, x)


def evaluated(function: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The values, without a graph."""
    with torch.no_grad():
        return function(model, x)


def gradient(function: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the mean square in the parameters."""
    grads = torch.autograd.grad(function(model, x).square().mean(), list(model.parameters())[:-1])
    return torch.cat([g.flatten() for g in grads])


def peak(problem: str, samples: int, alternative: str) -> int:
    """Bytes, at the highest point of this process."""
    prepared(problem, samples, alternative)()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(problem: str, samples: int, rounds: int) -> list[str]:
    """A table in Markdown."""
    names = [*ALTERNATIVES, *(["autograd.grad twice"] if problem == "train" else [])]
    jobs = {name: prepared(problem, samples, name) for name in names}
    expected = jobs["jvp of grad, vmap"]()
    for name in names[1:]:
        error = (jobs[name]() - expected).abs().max() / expected.abs().max()
        assert error < 1e-3, (name, error)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            seconds[name].append(time.process_time() - start)
    bytes_ = {name: in_own_process(peak, problem, samples, name, preload=__name__) for name in names}
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    base, nested = bytes_["forward pass"], names[1]
    rows = [f"{problem}, {samples} samples, {'-'.join(map(str, SIZES[problem]))}", ""]
    rows += ["| | seconds | of nested | MiB more | of nested |", "|---|---|---|---|---|"]
    for name in names:
        more, of = bytes_[name] - base, max(1, bytes_[nested] - base)
        time_ = f"{medians[name]:.4f} | {medians[name] / medians[nested]:.2f}"
        rows.append(f"| {name} | {time_} | {more / 2**20:.0f} | {more / of:.2f} |")
    return rows


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for problem, samples in (("evaluate", given.samples), ("train", given.samples)):
        print("\n".join(measure(problem, samples, given.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
