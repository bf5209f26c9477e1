"""Each sample's Jacobian of the network's outputs with respect to its parameters, `[N, C, P]`.

Two ways with `bpk`. By first order: the individual gradients of output `c`, summed over the batch, are row `c` of
every sample's Jacobian; this takes C backward passes. By second order in one: the square root of the GGN is `Jᵀ S`
with `S Sᵀ` the loss's Hessian. For half the summed squared error the Hessian is the identity, and the root is the
Jacobian itself.

Prints the time of each way and of `torch.func`, checks both against it, and uses the result for the empirical
neural tangent kernel and for the linearised network.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import bpk
from _check import agree
from bpk.extensions import BatchGrad, SqrtGGNExact


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    model = bpk.extend(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(1152, 10))
    )
    x = torch.rand(32, 1, 16, 16)
    want = timed("torch.func: vmap(jacrev(...))", lambda: by_torch_func(model, x))
    first = timed("BatchGrad, one backward pass for each output", lambda: by_individual_gradients(model, x))
    second = timed("SqrtGGNExact, one backward pass", lambda: by_square_root(model, x))
    agree(f"BatchGrad, {list(first.shape)}", first, want)
    agree(f"SqrtGGNExact, {list(second.shape)}", second, want)

    flat = second.flatten(0, 1)
    kernel = flat @ flat.T
    print(
        f"neural tangent kernel {list(kernel.shape)}, rank {torch.linalg.matrix_rank(kernel)}, of outputs and samples"
    )

    step = 1e-4 * torch.randn(second.shape[2])
    before = model(x).detach()
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(start + step, model.parameters())
    moved = (model(x) - before).detach()
    nn.utils.vector_to_parameters(start, model.parameters())
    agree("the linearised network after a small step", second @ step, moved, 1e-2)


def by_individual_gradients(model: nn.Module, x: Tensor) -> Tensor:
    """Row `c` of every Jacobian from the backward pass of output `c`."""
    outputs = model(x)
    rows = []
    for c in range(outputs.shape[1]):
        with bpk.backpack(BatchGrad()):
            outputs[:, c].sum().backward(retain_graph=True)
        rows.append(torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], 1))
    return torch.stack(rows, 1)


class HalfSquaredError(nn.Module):
    """`0.5 * sum (f - t)²`: its Hessian with respect to `f` is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = nn.MSELoss(reduction="sum")

    def forward(self, outputs: Tensor) -> Tensor:
        return 0.5 * self.squares(outputs, torch.zeros_like(outputs))


def by_square_root(model: nn.Module, x: Tensor) -> Tensor:
    """All rows at once; a root `[C, N, *p]` is the transposed Jacobian, sample by sample."""
    loss = bpk.extend(HalfSquaredError())(model(x))
    with bpk.backpack(SqrtGGNExact()):
        loss.backward()
    return torch.cat([p.sqrt_ggn_exact.flatten(2) for p in model.parameters()], 2).transpose(0, 1)


def by_torch_func(model: nn.Module, x: Tensor) -> Tensor:
    """The reference."""

    def outputs(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x[None],))[0]

    params = {name: p.detach() for name, p in model.named_parameters()}
    with bpk.disable():
        blocks = vmap(jacrev(outputs), (None, 0))(params, x)
    return torch.cat([b.flatten(2) for b in blocks.values()], 2)


def timed(label: str, way: Callable[[], Tensor]) -> Tensor:
    """The result, and the time of the second of two runs."""
    way()
    start = time.perf_counter()
    result = way().detach()
    print(f"{label:<46} {(time.perf_counter() - start) * 1e3:6.0f} ms")
    return result


if __name__ == "__main__":
    main()
