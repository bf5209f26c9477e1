"""A layer that torch does not have, supported in two ways: by module extensions, and by one rule.

The layer multiplies its input by one trainable number. A *module extension* adds one quantity to one layer: a
method for each parameter, and, in second order, `backpropagate`, which carries the quantity to the layer's input. A
*rule* says what the layer computes, here as an einsum pattern; every quantity follows from that.

Prints the shapes that a module extension sees. Checks individual gradients and the GGN diagonal, by both ways,
against autograd, then everything that the rule gives by `check_rule`, and lets all other extensions run on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from bpk import extensions as E
from bpk.extensions.firstorder.base import FirstOrderModuleExtension
from bpk.extensions.module_extension import ModuleExtension
from bpk.extensions.secondorder.diag_ggn import DiagGGNExact
from bpk.jacobians import Multilinear, case
from bpk.utils.examples import autograd_diag_ggn_exact

Grads = tuple[Tensor, ...]


class Scale(nn.Module):
    """`x * weight`, with one number as weight."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


# ---- the first way: one class for each quantity ----------------------------------------------------------
class ScaleBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of `Scale`."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, ext: E.BatchGrad, module: nn.Module, g_inp: Grads, g_out: Grads, bpQuantities: None) -> Tensor:
        """`[N, 1]` from the layer's input `[N, D]` and the gradient of its output `[N, D]`."""
        print(f"  BatchGrad: input0 {list(module.input0.shape)}, g_out[0] {list(g_out[0].shape)}")
        return (g_out[0] * module.input0).sum(1, keepdim=True)


class ScaleDiagGGNExact(ModuleExtension):
    """The GGN diagonal of `Scale`. What travels is a square root `[C, N, D]` of the GGN of the layer's output."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def backpropagate(
        self, ext: DiagGGNExact, module: nn.Module, grad_inp: Grads, grad_out: Grads, bpQuantities: Tensor
    ) -> Tensor:
        """`[C, N, D]` for the layer's input: each column times the transposed Jacobian."""
        print(f"  DiagGGNExact: output {list(module.output.shape)}, root {list(bpQuantities.shape)}")
        return bpQuantities * module.weight.detach()

    def weight(self, ext: DiagGGNExact, module: nn.Module, g_inp: Grads, g_out: Grads, bpQuantities: Tensor) -> Tensor:
        """`[1]`: the columns `[C, N]` of the parameter's own square root, squared and summed."""
        columns = torch.einsum("cnd,nd->cn", bpQuantities, module.input0)
        return columns.square().sum().reshape(1)


# ---- the second way: one line for all of them (the weight has an axis of length one) ----------------------
RULE = Multilinear("n d, one -> n d", Scale, params=("weight",), examples=[case(Scale, shape=(3, 4))])


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(4, 4), Scale()))
    loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(10, 4), torch.randint(2, (10,))
    rows = []
    for xn, yn in zip(x.split(1), y.split(1), strict=True):
        rows.append(torch.autograd.grad(loss_fn(model(xn), yn), model[1].weight)[0])
    diagonal = autograd_diag_ggn_exact(x, y, model, loss_fn)

    def backward_and_check(first: E.BatchGrad, second: DiagGGNExact, *others: Any) -> None:
        loss = loss_fn(model(x), y)
        with bpk.backpack(first, second, *others):
            loss.backward()
        agree(f"grad_batch {list(model[1].weight.grad_batch.shape)}", model[1].weight.grad_batch, torch.stack(rows))
        found = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
        agree("diag_ggn_exact, of the layer and of the one before it", found, diagonal)

    print("By module extensions, which belong to an instance of an extension:")
    first, second = E.BatchGrad(), DiagGGNExact()
    first.set_module_extension(Scale, ScaleBatchGrad())
    second.set_module_extension(Scale, ScaleDiagGGNExact())
    backward_and_check(first, second)

    print("By a rule, which all extensions read:")
    bpk.register(RULE)
    others = [getattr(E, name)() for name in E.__all__ if name not in ("BatchGrad", "DiagGGNExact")]
    backward_and_check(E.BatchGrad(), DiagGGNExact(), *others)
    for field in (e.savefield for e in others):
        assert getattr(model[1].weight, field) is not None
    print(f"  {', '.join(e.savefield for e in others)}: there, too")
    print(f"  {bpk.check_rule(RULE)}")


if __name__ == "__main__":
    main()
