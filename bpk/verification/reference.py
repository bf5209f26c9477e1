"""Every quantity at some entries, by its definition and with plain autograd: nothing of `bpk` computes here.

`L` is the loss, `f_n` the prediction of sample `n`, and `L_n` the loss as a function of `f_n` alone (the other
predictions are constants), so that divisors, class weights and ignored targets are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from bpk.jacobians.errors import explain
from bpk.verification.layers import Layers, bias_of
from bpk.verification.place import Place, pick
from bpk.verification.problem import NoReference, Problem, differentiable_twice
from bpk.verification.samples import owners

KEPT_GRAPHS = 3
"""How many gradients are kept with the graph that makes them differentiable."""


class Reference:
    """One evaluation of a model, its gradient's graph kept, and derivatives of it.

    `places` says at which entries (flat indices `[E]`) of each parameter the quantities are wanted, `passes` about how
    many backward passes each kind of quantity may take. With `factors` the biases that define Kronecker factors are
    looked at, too.
    """

    def __init__(self, problem: Problem, places: Mapping[str, Place], passes: int, factors: bool) -> None:
        self.problem = problem
        self.n = problem.inputs.n
        self.layers = Layers(problem.model if factors else nn.Module())
        self.entries = {name: place.entries for name, place in places.items()}
        self.share = passes // max(1, len(places))
        with differentiable_twice():
            self.pred = prediction(problem.predict())
            self.layers.close()
            self.params: dict[str, Tensor] = {n: p for n, p in problem.model.named_parameters() if p.requires_grad}
            self.owner = owners(
                lambda inputs: prediction(problem.predict(inputs)).detach(), problem.inputs, self.pred, self.n
            )
            self.point = self.pred.detach().requires_grad_()
            value = problem.loss(self.point, *problem.targets)
            self.slope = torch.autograd.grad(value, self.point, create_graph=True)[0]  # of the loss, at the prediction
        for weight, bias in self.layers.biases.items():
            at = places[weight]
            self.params[bias_of(weight)] = bias
            self.entries[bias_of(weight)] = pick(len(bias), at.count, at.seed).to(bias.device)
        self._individual: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._blocks: dict[str, Tensor] = {}
        self._known: dict[Hashable, Tensor] = {}
        self._live: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def belongs(self, chosen: Sequence[int]) -> Tensor:
        """Which entries of the prediction belong to some samples."""
        wanted = torch.zeros(self.n, dtype=torch.bool, device=self.owner.device)
        wanted[list(chosen)] = True
        return wanted[self.owner].reshape(self.pred.shape)

    def of_samples(self, chosen: Sequence[int], x: Tensor) -> Tensor:
        """A tensor like the prediction, zero where it does not belong to some samples."""
        return torch.where(self.belongs(chosen), x, torch.zeros_like(x))

    # ---- first order -------------------------------------------------------------------------------
    @cached_property
    def used(self) -> dict[str, bool]:
        """Which parameters the prediction depends on."""
        total = self.pred.sum()
        found = torch.autograd.grad(total, list(self.params.values()), retain_graph=True, allow_unused=True)
        return {name: g is not None for name, g in zip(self.params, found, strict=True)}

    def gradient(self, name: str, n: int) -> Tensor:
        """`[E]`: the gradient of `L_n` at the chosen entries."""
        return self._sample(n)[name][0]

    def norm(self, name: str, n: int) -> Tensor:
        """The squared norm of the gradient of `L_n`."""
        return self._sample(n)[name][1]

    def _sample(self, n: int) -> dict[str, tuple[Tensor, Tensor]]:
        if n not in self._individual:
            slope = self.of_samples([n], self.slope.detach())
            found = grads(self.pred, list(self.params.values()), slope)
            self._individual[n] = {
                name: (g.flatten()[self.entries[name]], g.square().sum())
                for name, g in zip(self.params, found, strict=True)
                if name in self.entries
            }
        return self._individual[n]

    # ---- generalised Gauss-Newton ------------------------------------------------------------------
    def ggn(self, name: str, chosen: Sequence[int]) -> Tensor:
        """`[len(chosen), E, E]`: `J_n^T H_n J_n` at the chosen entries (of a costly reference: at the first ones)."""
        if name not in self._blocks:
            with self.derivatives():
                found = self.columns_by_rows() if self.by_rows else {name: self.columns_by_products(name)}
                self._blocks.update({key: self.block(columns) for key, columns in found.items()})
        return self._blocks[name][list(chosen)]

    def block(self, columns: Tensor) -> Tensor:
        """`[N, E, E]`: columns `[E, *prediction]` of the Jacobian times the Hessian of the loss, by sample."""
        flat = columns.flatten(1)
        rows = []
        for column in columns:
            products = flat * self.loss_product(column).flatten()
            rows.append(products.new_zeros(len(flat), self.n).index_add(1, self.owner, products))
        return torch.stack(rows).permute(2, 0, 1)

    def loss_product(self, vector: Tensor) -> Tensor:
        """The Hessian of the loss at the prediction, times a vector in its shape."""
        return grads(self.slope, [self.point], vector)[0].detach()

    @property
    def by_rows(self) -> bool:
        """Whether rows of the Jacobian (a backward pass for each entry of the prediction) are the cheaper way."""
        return self.pred.numel() <= 1.5 * sum(len(e) for e in self.entries.values())

    def columns_by_rows(self) -> dict[str, Tensor]:
        """`[E, *prediction]` for every parameter."""
        rows: dict[str, list[Tensor]] = {name: [] for name in self.entries}
        for k in range(self.pred.numel()):
            unit = self.pred.new_zeros(self.pred.numel())
            unit[k] = 1.0
            found = grads(self.pred, [self.params[name] for name in rows], unit.reshape(self.pred.shape))
            for (name, e), g in zip(self.entries.items(), found, strict=True):
                rows[name].append(g.flatten()[e])
        return {name: torch.stack(r, 1).reshape(-1, *self.pred.shape) for name, r in rows.items()}

    def columns_by_products(self, name: str) -> Tensor:
        """`[E, *prediction]`: products of the Jacobian with unit vectors, as many as `passes` allows."""
        param, columns = self.params[name], []
        for e in self.entries[name][: self.affordable(name, 1)]:
            unit = param.new_zeros(param.numel())
            unit[e] = 1.0
            columns.append(self.forward((self.pulled[name] * unit.reshape(param.shape)).sum()))
        return torch.stack(columns)

    def affordable(self, name: str, each: int) -> int:
        """How many of a parameter's entries can be looked at, if each takes so many backward passes."""
        return max(1, min(len(self.entries[name]), self.share // each))

    @cached_property
    def cotangent(self) -> Tensor:
        """What `J^T u` is differentiated with respect to, to get products with `J`."""
        return torch.zeros_like(self.pred).requires_grad_()

    @cached_property
    def pulled(self) -> dict[str, Tensor]:
        """`J^T u` by parameter."""
        return dict(zip(self.params, grads(self.pred, list(self.params.values()), self.cotangent, True), strict=True))

    def forward(self, pulled: Tensor) -> Tensor:
        """The derivative of a number made from `J^T u` with respect to `u`: a product with `J`."""
        return grads(pulled, [self.cotangent])[0].detach()

    def ggn_product(self, name: str, vector: Tensor, chosen: Sequence[int]) -> Tensor:
        """`sum_n J_n^T H_n J_n v` for a parameter's block."""

        def compute() -> Tensor:
            curved = self.loss_product(self.forward((self.pulled[name] * vector).sum()))
            return grads(self.pred, [self.params[name]], self.of_samples(chosen, curved))[0]

        return self.once(("ggn product", name, *chosen), compute)

    # ---- Hessian -----------------------------------------------------------------------------------
    def live_gradient(self, name: str, chosen: Sequence[int]) -> Tensor:
        """The gradient `[*p]` of the loss of some samples, to be differentiated again."""
        key = tuple(chosen)
        if key not in self._live:
            pred = self.pred
            if len(chosen) < self.n:
                pred = torch.where(self.belongs(chosen), pred, pred.detach())
            found = grads(self.problem.loss(pred, *self.problem.targets), list(self.params.values()), create_graph=True)
            while len(self._live) >= KEPT_GRAPHS:
                del self._live[next(iter(self._live))]
            self._live[key] = dict(zip(self.params, found, strict=True))
        return self._live[key][name]

    def hessian_product(self, name: str, vector: Tensor, chosen: Sequence[int]) -> Tensor:
        """`H v` for a parameter's block, of the loss of some samples."""

        def compute() -> Tensor:
            return grads((self.live_gradient(name, chosen) * vector).sum(), [self.params[name]])[0]

        return self.once(("hessian product", name, *chosen), compute)

    def hessian_diagonal(self, name: str, chosen: Sequence[int], parts: int) -> Tensor:
        """`[E]`: the Hessian's diagonal for some samples, at as many entries as `passes` allows for so many `parts`."""
        entries = self.entries[name][: self.affordable(name, parts)]

        def compute() -> Tensor:
            gradient = self.live_gradient(name, chosen).flatten()
            return torch.stack([grads(gradient[e], [self.params[name]])[0].flatten()[e] for e in entries])

        return self.once(("hessian diagonal", name, parts, *chosen), compute)

    # ---- what all of them share ----------------------------------------------------------------------
    def once(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a value once; say so where torch has no second derivative."""
        if key not in self._known:
            with self.derivatives():
                self._known[key] = compute().detach()
        return self._known[key]

    @contextmanager
    def derivatives(self) -> Iterator[None]:
        """Say so where torch has no second derivative."""
        try:
            with differentiable_twice(), torch.enable_grad():
                yield
        except (RuntimeError, NotImplementedError) as error:
            raise NoReference(f"plain autograd cannot: {str(error).splitlines()[0]}") from error


def grads(
    output: Tensor, wrt: Sequence[Tensor], vector: Tensor | None = None, create_graph: bool = False
) -> list[Tensor]:
    """`torch.autograd.grad` with zeros where nothing depends."""
    if not output.requires_grad:
        return [torch.zeros_like(w) for w in wrt]
    found = torch.autograd.grad(output, wrt, vector, retain_graph=True, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wrt, strict=True)]


def prediction(output: object) -> Tensor:
    """The output of the model, which must be one tensor."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return output
    raise ValueError(
        explain(
            f"verify(...) needs a model which returns one tensor of real numbers; it returned {type(output).__name__}.",
            "the loss is a function of that prediction, and samples are told apart there.",
            "wrap the model in a module that returns the tensor which the loss takes.",
        )
    )
