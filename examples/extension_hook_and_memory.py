"""Less memory by an extension hook: fields are reduced and dropped while the backward pass goes on.

All individual gradients of a network take batch size times its parameters. Often only a reduction of them is
wanted, here the median over the batch for every weight, for which no extension exists. `extension_hook` is called
with each module as soon as its fields are there: it keeps the medians and deletes the rows, so that no two layers'
rows exist at the same time.

Prints the peak memory of the backward pass with and without the hook (each in a process of its own); checks that
both ways give the same medians, and those of one layer against a loop with autograd.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from _check import agree
from _plots import bars
from bpk.extensions import BatchGrad

N, WIDTH, DEPTH = 48, 384, 6


def keep_median(module: nn.Module) -> None:
    """The hook: layer by layer, the median in place of the individual gradients."""
    for p in module.parameters(recurse=False):
        p.median = p.grad_batch.median(0).values
        del p.grad_batch


def backward(hook: bool, n: int = N) -> tuple[nn.Module, Tensor, Tensor]:
    """One backward pass, after which every parameter has the field `median`."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = bpk.extend(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    x, y = torch.randn(n, WIDTH), torch.randint(10, (n,))
    loss = cross_entropy(model(x), y)
    with bpk.backpack(BatchGrad(), extension_hook=keep_median if hook else None):
        loss.backward()
    if not hook:
        for p in model.parameters():
            p.median = p.grad_batch.median(0).values
    return model, x, y


def peak(hook: bool) -> float:
    """MiB at the peak of this process, beyond what it takes with a batch of one."""
    import resource  # not on Windows

    backward(hook, n=1)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kilobytes elsewhere
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backward(hook)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 2**20


def peak_in_own_process(hook: bool) -> float:
    """The same in a new process, whose freed tensors go back to the system at once."""
    command = [sys.executable, __file__, "--peak", "hook" if hook else "none"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    rows = N * (DEPTH * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10) * 4 / 2**20
    print(f"{DEPTH + 1} layers, batch of {N}: all individual gradients together take {rows:.0f} MiB")
    without, with_hook = peak_in_own_process(False), peak_in_own_process(True)
    print(f"peak of the backward pass without a hook: {without:.0f} MiB")
    print(f"peak with the hook, one layer at a time:  {with_hook:.0f} MiB")
    bars(
        "Peak memory of the backward pass",
        "MiB",
        {"all individual gradients": rows, "without a hook": without, "with the hook": with_hook},
    )
    assert with_hook < 0.6 * without, "the hook must save memory"

    few = 8
    model, x, y = backward(hook=True, n=few)
    other, _, _ = backward(hook=False, n=few)
    assert not any("grad_batch" in vars(p) for p in model.parameters())
    agree("medians of all layers, with and without the hook", medians(model), medians(other))
    weight = model[-1].weight
    own = [torch.autograd.grad(cross_entropy(model(x[[n]]), y[[n]]) / few, weight)[0] for n in range(few)]
    agree("medians of the last layer, by a loop", weight.median, torch.stack(own).median(0).values)


def medians(model: nn.Module) -> Tensor:
    """The fields of all parameters."""
    return torch.cat([p.median.flatten() for p in model.parameters()])


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    if sys.argv[1:2] == ["--peak"]:
        print(peak(sys.argv[2] == "hook"))
    else:
        main()
