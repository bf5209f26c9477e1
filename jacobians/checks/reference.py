"""The reference of `check_rule`: one layer under plain autograd, with nothing of `bpk` in between."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bpk.jacobians.core.again import with_tied
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.rule import Rule


class Reference:
    """A copy of the layer at the point of a call, and its products by `torch.autograd.grad`.

    It runs in float64 at the call's own (rounded) values. A layer that draws random numbers runs in
    the call's precision instead, from the same seed, so that both drew the same numbers. `live` are
    the inputs to differentiate with respect to. Inputs and output are those that `rule` sees.
    """

    def __init__(
        self, rule: Rule, module: nn.Module, call: Call, dtype: torch.dtype, seed: int, live: Collection[int]
    ) -> None:
        self.module = copy.deepcopy(module).to(dtype)
        self.rule, self.used = rule, tuple(call.used)
        self.axes = rule.bind(module, call.inputs, {}).axes
        self.inputs = [_leaf(x, dtype, i in live) for i, x in enumerate(call.inputs)]
        self.params = {name: _leaf(p, dtype) for name, p in call.params.items()}
        self.seed = seed
        self.output = self.at(self.inputs)

    def at(self, inputs: Sequence[Tensor]) -> Tensor:
        """The output at these inputs, with the same random numbers."""
        torch.manual_seed(self.seed)
        fresh = tuple(x * 1 if x.requires_grad else x for x in inputs)  # in-place layers refuse leaves
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
            given = self.given(fresh)
            params = with_tied(self.module, self.params)
            out = torch.func.functional_call(self.module, params, given, tie_weights=False)
            binding = self.rule.bind(self.module, given, {})
            return self.rule.join(binding, tensors_in(out), self.used)[0]

    def given(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Inputs as the layer takes them, from those that the rule sees."""
        axes = self.axes or (0,) * len(inputs)
        return tuple(x.movedim(0, axis) if axis else x for x, axis in zip(inputs, axes, strict=True))

    @property
    def wrts(self) -> tuple[Wrt, ...]:
        """Every floating-point input and every parameter."""
        return (*(i for i, x in enumerate(self.inputs) if x.requires_grad), *self.params)

    def leaf(self, wrt: Wrt) -> Tensor:
        """The tensor to differentiate with respect to."""
        return self.inputs[wrt] if isinstance(wrt, int) else self.params[wrt]

    def pull(self, vector: Tensor, wrt: Wrt) -> Tensor:
        """`J^T m` for `m` `[N, *out]`, summed over samples for a parameter."""
        return self.grads(self.output, (wrt,), vector)[0]

    def jac_t(self, mat: Tensor, wrt: Wrt) -> Tensor:
        """`[V, N, *out] -> [V, *wrt]`."""
        mat = mat.to(self.output.dtype)
        return torch.stack([self.pull(m, wrt) for m in mat])

    def jac_t_per_sample(self, mat: Tensor, wrt: Wrt) -> Tensor:
        """`[V, N, *out] -> [V, N, *p]`, one sample's output at a time."""
        mat = mat.to(self.output.dtype)
        return torch.stack([torch.stack([self.pull(_only(m, n), wrt) for n in range(m.shape[0])]) for m in mat])

    def jacobian(self, wrt: Wrt) -> Tensor:
        """The dense Jacobian `[N * out, *wrt]`."""
        return self._jacobians[wrt]

    @cached_property
    def _jacobians(self) -> dict[Wrt, Tensor]:
        """One row after the other, with respect to everything at once."""
        size = self.output.numel()
        eye = torch.eye(size, dtype=self.output.dtype, device=self.output.device)
        rows = [self.grads(self.output, self.wrts, row.reshape(self.output.shape)) for row in eye]
        return {wrt: torch.stack(parts) for wrt, parts in zip(self.wrts, zip(*rows, strict=True), strict=True)}

    def jac(self, mat: Tensor, wrt: Wrt) -> Tensor:
        """`[V, *wrt] -> [V, N, *out]`: the transposed product is linear in its vector; transpose it again."""
        mat = mat.to(self.output.dtype)
        try:
            with torch.enable_grad():
                probe = torch.zeros_like(self.output, requires_grad=True)
                pulled = self.grads(self.output, (wrt,), probe, create_graph=True)[0]
                return torch.stack([self.grads(pulled, (probe,), m)[0] for m in mat])
        except (RuntimeError, NotImplementedError):  # no double backward in torch
            return (as_rows(mat) @ as_rows(self.jacobian(wrt)).T).reshape(-1, *self.output.shape)

    def residual(self, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """`sum_k grad_out_k d2 out_k` times `mats`, jointly over their keys, by double backward."""
        wrts = tuple(mats)
        with torch.enable_grad():
            first = self.grads(self.output, wrts, grad_out.to(self.output.dtype), create_graph=True)
        columns: dict[Wrt, list[Tensor]] = {wrt: [] for wrt in wrts}
        for v in range(mats[wrts[0]].shape[0]):
            total = sum((g * mats[w][v].to(g.dtype)).sum() for w, g in zip(wrts, first, strict=True))
            assert isinstance(total, Tensor)
            for wrt, column in zip(wrts, self.grads(total, wrts), strict=True):
                columns[wrt].append(column)
        return {wrt: torch.stack(parts) for wrt, parts in columns.items()}

    def residual_of_sample(self, grad_out: Tensor, mats: Mapping[Wrt, Tensor], n: int) -> dict[Wrt, Tensor]:
        """The same for the output of sample `n` alone; inputs come back as `[V, *in]`."""
        wide = {w: _only(m.transpose(0, 1), n).transpose(0, 1) if isinstance(w, int) else m for w, m in mats.items()}
        product = self.residual(_only(grad_out, n), wide)
        return {w: p[:, n] if isinstance(w, int) else p for w, p in product.items()}

    def grads(
        self, output: Tensor, wrts: Sequence[Wrt | Tensor], vector: Tensor | None = None, create_graph: bool = False
    ) -> list[Tensor]:
        """`torch.autograd.grad`, with zeros where nothing depends."""
        leaves = [w if isinstance(w, Tensor) else self.leaf(w) for w in wrts]
        if not output.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        return list(
            torch.autograd.grad(
                output, leaves, vector, retain_graph=True, create_graph=create_graph, materialize_grads=True
            )
        )


def _leaf(x: Tensor, dtype: torch.dtype, live: bool = True) -> Tensor:
    return x.detach().to(dtype, copy=True).requires_grad_(live) if x.is_floating_point() else x.detach()


def _only(x: Tensor, n: int) -> Tensor:
    """`x` with every sample but `n` set to zero."""
    kept = torch.zeros_like(x)
    kept[n] = x[n]
    return kept
