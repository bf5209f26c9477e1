"""Models as people write them: what a case of `test_any_model.py` is, and its reference by plain autograd.

Samples are told apart at the prediction, whose axis 0 holds them (or samples and positions, samples first). In between,
the reference assumes nothing about where the batch axis is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.references.kronecker import KRONECKER, gradients, jacobian

Output = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, a loss, and data; `spread` if each of the model's outputs is an argument of the loss.

    `factors` says whether the reference sees every use of a weight: not those in gradients that `forward` takes.
    """

    model: nn.Module
    loss: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    spread: bool = False
    factors: bool = True

    def objective(self, loss: nn.Module, output: Any) -> Tensor:
        """The loss of a prediction."""
        return loss(*output, *self.targets) if self.spread else loss(output, *self.targets)


def classified(model: nn.Module, *inputs: Tensor, classes: int = 2) -> Case:
    return Case(model, nn.CrossEntropyLoss(), inputs, (torch.randint(classes, (len(inputs[0]),)),))


def parts(output: Output) -> list[Tensor]:
    """The tensors of a prediction."""
    if isinstance(output, Tensor):
        return [output]
    return list(output.values() if isinstance(output, Mapping) else output)


def like(output: Output, tensors: list[Tensor]) -> Output:
    """The same structure, with other tensors."""
    if isinstance(output, Tensor):
        return tensors[0]
    return dict(zip(output, tensors, strict=True)) if isinstance(output, Mapping) else tuple(tensors)


@dataclass(frozen=True)
class Use:
    """One call of a layer with an input factor."""

    module: Any
    inputs: tuple[Tensor, ...]
    output: Tensor


class Reference:
    """Quantities of a case by their definitions. `loss_hessian` may be replaced by a sampled one."""

    def __init__(self, case: Case) -> None:
        self.case, self.n = case, case.inputs[0].shape[0]
        self.model = copy.deepcopy(case.model)
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.calls: list[Use] = []
        hooks = [m.register_forward_hook(self._see) for m in self.model.modules() if has_factors(m)]
        products = Products(self.calls)
        hooks += [hook for m in self.model.modules() if has_factors(m) for hook in products.leave_out(m)]
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.MATH), products:  # the attention that can be differentiated twice
            self.output: Output = self.model(*[x.clone() for x in case.inputs])
        for hook in hooks:
            hook.remove()
        self.uses = [use for use in self.calls if use.output.requires_grad]
        self.pred = torch.cat([x.reshape(self.n, -1) for x in parts(self.output)], 1)

    def _see(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls.append(Use(module, tuple(x.detach() for x in args), output))
        return output.clone()  # a layer that works in place on it leaves `output` as it was

    def loss_of(self, flat: Tensor) -> Tensor:
        """The loss as a function of the predictions `[N, D]`."""
        shapes = [x.shape for x in parts(self.output)]
        columns = flat.split([shape.numel() // self.n for shape in shapes], 1)
        tensors = [x.reshape(shape) for x, shape in zip(columns, shapes, strict=True)]
        return self.case.objective(copy.deepcopy(self.case.loss), like(self.output, tensors))

    @cached_property
    def grad_batch(self) -> dict[str, Tensor]:
        """`[N, *p]`: the gradient of the loss with the prediction of one sample attached to the graph."""
        rows = []
        for n in range(self.n):
            attached = torch.arange(self.n)[:, None] == n
            loss = self.loss_of(torch.where(attached, self.pred, self.pred.detach()))
            rows.append(gradients(loss, list(self.params.values())))
        return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(self.params)}

    @cached_property
    def loss_hessian(self) -> Tensor:
        """`[N, D, D]`: with respect to each sample's prediction."""
        flat = torch.autograd.functional.hessian(
            lambda x: self.loss_of(x.reshape(self.n, -1)), self.pred.detach().flatten()
        )
        blocks = flat.reshape(self.n, self.pred.shape[1], self.n, -1)
        return torch.stack([blocks[n, :, n] for n in range(self.n)])

    @cached_property
    def jacobians(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """`[N, D, P]` of parameters, and `[N, D, channels]` of a bias added to each use's output."""
        wrt = [*self.params.values(), *[use.output for use in self.uses]]
        rows, shape = jacobian(self.pred, wrt), (*self.pred.shape, -1)
        found = {name: rows[k].reshape(shape) for k, name in enumerate(self.params)}
        of_uses = zip(self.uses, rows[len(self.params) :], strict=True)
        return found, [torch.stack([of_bias(use, r) for r in row]).reshape(shape) for use, row in of_uses]

    def ggn(self, name: str) -> Tensor:
        """`[P, P]`."""
        return congruence(self.jacobians[0][name], self.loss_hessian)

    def diag_ggn(self, name: str) -> Tensor:
        """`[*p]`."""
        return self.ggn(name).diagonal().reshape(self.params[name].shape)

    @cached_property
    def diag_h(self) -> dict[str, Tensor]:
        """`[*p]`: from one more row for each entry."""
        grads = gradients(self.loss_of(self.pred), list(self.params.values()), create_graph=True)
        found = {}
        for (name, p), g in zip(self.params.items(), grads, strict=True):
            found[name] = jacobian(g, [p])[0].reshape(p.numel(), p.numel()).diagonal().reshape(p.shape)
        return found

    def factors(self, name: str) -> list[Tensor]:
        """`[G, A]` of what a layer multiplies with a weight, `[G]` of everything else."""
        here = [k for k, use in enumerate(self.uses) if use.module.weight is self.params[name] and self.feeds(use)]
        tables = [k for k in here if isinstance(self.uses[k].module, nn.Embedding) or input_first(self.uses[k])]
        others = [k for k in here if k not in tables]
        if not here or any(self.shared(self.uses[k]) for k in here) or not self.only_used_by(name, here):
            return [self.ggn(name)]
        if tables and others:
            return nearest(self._pair(others), self._pair(tables)[::-1])
        pair = self._pair(here)
        return pair[::-1] if input_first(self.uses[here[-1]]) else pair

    def feeds(self, use: Use) -> bool:
        """Whether the graph leads from a use to the prediction."""
        return torch.autograd.grad(self.pred.sum(), use.output, retain_graph=True, allow_unused=True)[0] is not None

    def shared(self, use: Use) -> bool:
        """Whether samples share what a use returns (embedded positions): then no axis of it is the batch axis."""
        touched = [gradients((x * torch.rand_like(x)).sum(), [use.output])[0] != 0 for x in self.pred]
        return bool((torch.stack(touched).sum(0) > 1).any())

    def only_used_by(self, name: str, uses: list[int]) -> bool:
        """Whether calls of layers are all that the prediction depends on a weight by: functions may use it, too."""
        mixed, outputs = (self.pred * torch.rand_like(self.pred)).sum(), [self.uses[k].output for k in uses]
        total, *slopes = gradients(mixed, [self.params[name], *outputs])
        found = torch.zeros_like(total)
        for k, slope in zip(uses, slopes, strict=True):
            weight, out = as_function_of_weight(self.uses[k])
            found = found + gradients((out * slope).sum(), [weight])[0]
        return torch.allclose(found, total)

    def _pair(self, uses: list[int]) -> list[Tensor]:
        """`G` of one bias that all uses share, and the sum of `A`."""
        jac = torch.stack([self.jacobians[1][k] for k in uses]).sum(0)
        moments = torch.stack([input_moment(self.uses[k]) for k in uses]).sum(0)
        return [congruence(jac, self.loss_hessian), moments / self.n]


class Multiplied(nn.Linear):
    """What a function does that multiplies with a parameter: `x @ weight.T`, or `x @ weight`."""

    def __init__(self, weight: nn.Parameter, transposed: bool) -> None:
        nn.Module.__init__(self)
        self.weight, self.transposed, self.input_first = weight, transposed, transposed
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.transposed else self.weight.T)


class Products(TorchFunctionMode):
    """While it is entered: functions that multiply something with a parameter from the right, as uses of layers."""

    def __init__(self, uses: list[Use]) -> None:
        super().__init__()
        self.uses, self.depth = uses, 0
        self.views: list[tuple[Tensor, nn.Parameter]] = []

    def leave_out(self, module: nn.Module) -> list[Any]:
        """What is computed within this module does not count."""

        def enter(module: nn.Module, args: Any) -> None:
            self.depth += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.depth -= 1

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def weight_of(self, x: Tensor) -> tuple[nn.Parameter, bool] | None:
        """The parameter that a matrix is, and whether transposed."""
        if isinstance(x, nn.Parameter):
            return x, False
        return next(((p, True) for view, p in self.views if view is x), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.depth:
            return result
        given = args[0] if args and isinstance(args[0], nn.Parameter) and isinstance(result, Tensor) else None
        turned = given is not None and given.dim() == 2 and result.shape == given.shape[::-1]
        if turned and name in ("t", "__get__", "transpose") and result.stride() != given.stride():
            self.views.append((result, given))
        operands = {"matmul": args[:2], "mm": args[:2], "__matmul__": args[:2], "linear": args[:2], "addmm": args[1:3]}
        if name in operands and kwargs in (None, {}):
            x, w = operands[name]
            found = self.weight_of(w) if w.dim() == 2 and x.dim() > 1 else None
            if found is not None and found[0].requires_grad:
                weight, turned = found
                self.uses.append(Use(Multiplied(weight, turned == (name == "linear")), (x.detach(),), result))
                return result.clone()
        return result


def input_first(use: Use) -> bool:
    """Whether a weight is stored as `[in, out]`, so that its factors are `[A, G]`."""
    return getattr(use.module, "input_first", False)


def has_factors(module: nn.Module) -> bool:
    """Whether a layer multiplies its weight with its input as its class says, and not in a `forward` of its own."""
    return isinstance(module, KRONECKER) and type(module).forward in [kind.forward for kind in KRONECKER]


def congruence(jac: Tensor, blocks: Tensor) -> Tensor:
    """`sum_n J_n^T B_n J_n`."""
    return torch.einsum("ndp,nde,neq->pq", jac, blocks, jac)


def of_bias(use: Use, grad: Tensor) -> Tensor:
    """`[*out] -> [channels]`: the sum over all axes but the channels, without padding."""
    if isinstance(use.module, nn.Embedding) and use.module.padding_idx is not None:
        grad = grad * (use.inputs[0] != use.module.padding_idx)[..., None]
    return grad.flatten(0, -2).sum(0) if channels_last(use.module) else grad.movedim(1, -1).flatten(0, -2).sum(0)


def channels_last(module: nn.Module) -> bool:
    """Where a layer has its channels."""
    return isinstance(module, nn.Linear | nn.Bilinear | nn.Embedding)


def as_function_of_weight(use: Use) -> tuple[Tensor, Tensor]:
    """The weight and the output of a call, which depends on nothing else."""
    weight = use.module.weight.detach().requires_grad_()
    return weight, torch.func.functional_call(use.module, {"weight": weight}, use.inputs)


def input_moment(use: Use) -> Tensor:
    """`sum a a^T`, where a row `a` is what one entry of the output multiplies with the weight (mean over groups)."""
    module, (weight, out) = use.module, as_function_of_weight(use)
    by_channel = out.movedim(-1, 0) if channels_last(module) else out.movedim(1, 0)
    groups = getattr(module, "groups", 1)
    transposed = bool(getattr(module, "transposed", False))
    rows = []
    for group in range(groups):
        channel = group * (len(by_channel) // groups)
        for grad in jacobian(by_channel[channel], [weight])[0]:
            own = grad[:, 0] if isinstance(module, nn.Embedding) or transposed else grad[channel]
            rows.append((own.chunk(groups)[group] if transposed else own).flatten())
    stacked = torch.stack(rows)
    return stacked.T @ stacked / groups


def nearest(one: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    """The Kronecker product nearest to the sum of two, by the singular value decomposition of the rearranged sum."""
    total = sum(torch.outer(g.flatten(), a.flatten()) for g, a in (one, other))
    u, s, v = torch.linalg.svd(total)
    return [(s[0] * u[:, 0]).reshape(one[0].shape), v[0].reshape(one[1].shape)]
