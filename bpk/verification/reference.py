"""Every quantity at some entries, by its definition and with plain autograd: nothing of `bpk` computes here.

`L` is the loss, `f_n` the prediction of sample `n`, and `L_n` the loss as a function of `f_n` alone (the other
predictions are constants), so that divisors, class weights and ignored targets are those of the whole batch. Where
samples mix, the whole batch is one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bpk.plan.parts import in_parts
from bpk.verification.known import once
from bpk.verification.layers import Layers, bias_of
from bpk.verification.objective import UNKNOWN_LOSS, Objective, coarsest, gradients_of
from bpk.verification.place import Place
from bpk.verification.problem import NoReference, Problem, derivatives, differentiable_twice
from bpk.verification.split import Split, grads

KEPT_GRAPHS = 3
"""How many gradients are kept with the graph that makes them differentiable."""
ROUNDINGS = 100
"""So many of the largest product, or fewer, are none."""


class Reference:
    """One evaluation of a model, its gradient's graph kept, and derivatives of it.

    `places` says at which entries (flat indices `[E]`) of each parameter the quantities are wanted, `passes` about how
    many backward passes each kind of quantity may take. With `factors` the biases that define Kronecker factors are
    looked at, too. `say` is told what is being computed.
    """

    def __init__(
        self, problem: Problem, places: Mapping[str, Place], passes: int, factors: bool, say: Callable[[str], None]
    ) -> None:
        self.problem, self.say, self.passes = problem, say, passes
        self.layers = Layers(problem.model if factors else nn.Module())
        self.places, self.entries = places, {name: place.entries for name, place in places.items()}
        self.share = passes // max(1, len(places))
        every = dict(problem.model.named_parameters(remove_duplicate=False))  # a property may hide one of them
        self.params: dict[str, Tensor] = {name: every[name] for name in places}
        with differentiable_twice():
            with self.layers.functions:
                objective = Objective(problem)
            self.layers.close(objective.value)
            self.rounding = torch.finfo(coarsest(objective.value)).eps
            self.whole = Split(problem, objective.whole())
            self.n = self.whole.n
            self.inside, self.is_known = objective.inside(), objective.is_known
        for weight, sides in self.layers.sides.items():
            for k, side in enumerate(sides if weight in places else ()):
                self.params[bias_of(weight, k)] = side.bias
                entries = places[weight].side(side.sizes[0]).to(side.bias.device)
                self.entries[bias_of(weight, k)] = entries + side.offset
        self.known: dict[Hashable, Any] = {}
        self.drawn: Tensor | None = None
        self.merged = False
        self._live: dict[tuple[int, ...], dict[str, Tensor]] = {}

    @cached_property
    def split(self) -> Split:
        """Where the GGN splits the objective."""
        if not self.is_known:
            raise NoReference(UNKNOWN_LOSS)
        split = self.whole if self.inside is None else Split(self.problem, self.inside)
        if split.mixing and not self.whole.mixing:
            raise NoReference(f"{split.mixing}, inside of the loss")
        return split

    # ---- first order -------------------------------------------------------------------------------
    @cached_property
    def used(self) -> dict[str, bool]:
        """Which parameters the prediction depends on."""
        found = gradients_of(self.whole.pred.sum(), list(self.params.values()))
        return {name: g is not None for name, g in zip(self.params, found, strict=True)}

    @once
    def whole_gradient(self, name: str, n: int) -> Tensor:
        """`[P]`: the gradient of `L_n` at all entries."""
        slope = self.whole.of_samples([n], self.whole.slope.detach())
        return grads(self.whole.pred, [self.params[name]], slope)[0].flatten()

    @once
    def gradients(self, n: int) -> dict[str, tuple[Tensor, Tensor]]:
        """For every parameter: the gradient of `L_n` at the chosen entries, and its squared norm."""
        self.say(f"gradient of sample {n}")
        found = self.pulled_back(self.whole, self.whole.of_samples([n], self.whole.slope.detach()))
        return {name: (g.flatten()[self.entries[name]], g.square().sum()) for name, g in found.items()}

    def pulled_back(self, split: Split, vector: Tensor, create_graph: bool = False) -> dict[str, Tensor]:
        """`J^T u` by parameter."""
        found = grads(split.pred, list(self.params.values()), vector, create_graph)
        return dict(zip(self.params, found, strict=True))

    # ---- generalised Gauss-Newton ------------------------------------------------------------------
    def ggn(self, name: str, chosen: Sequence[int]) -> Tensor:
        """`[len(chosen), E, E]`: `J_n^T H_n J_n` at the chosen entries (of a costly reference: at the first ones)."""
        blocks = self.exact_blocks(name) if self.drawn is None else self.blocks(self.columns(name))
        return blocks[list(chosen)]

    @once
    def exact_blocks(self, name: str) -> Tensor:
        """The same for all samples, with the Hessian of the loss."""
        return self.blocks(self.columns(name))

    def blocks(self, columns: Tensor) -> Tensor:
        """`[N, E, E]`: columns `[E, P]` of the Jacobian times the Hessian of the loss, by sample."""
        rows = [self.split.by_sample(columns * self.curved(column)) for column in columns]
        return torch.stack(rows).permute(2, 0, 1)

    def curved(self, vector: Tensor) -> Tensor:
        """The Hessian of the loss, or `S S^T` of its draws, times a vector `[P]`."""
        if self.drawn is None:
            return self.split.loss_product(vector)
        along = self.drawn * vector
        along = along.sum(1, keepdim=True) if self.merged else self.split.by_sample(along)[:, self.split.owner]
        return (self.drawn * along).sum(0)

    @contextmanager
    def sampled(self, drawn: Tensor | None, merged: bool = False) -> Iterator[None]:
        """Inside, the GGN is that of draws `S` `[M, P]`, with `S S^T` in place of the Hessian of the loss.

        By sample, or `merged`, the whole batch as one sample: its draws are multiplied with each other, too.
        """
        before = self.drawn, self.merged
        self.drawn, self.merged = drawn, merged
        try:
            yield
        finally:
            self.drawn, self.merged = before

    @once
    def columns(self, name: str) -> Tensor:
        """`[E, P]`: the Jacobian at the chosen entries (of a costly reference: at the first ones).

        Rows of the Jacobian (a backward pass for each entry of the prediction) may be the cheaper way.
        """
        self.say(f"GGN of {name}")
        if self.split.pred.numel() <= 1.5 * sum(len(e) for e in self.entries.values()):
            return self.columns_of_all[name]
        return self.columns_by_products(name, self.entries[name][: self.affordable(name, 1)])

    @cached_property
    def columns_of_all(self) -> dict[str, Tensor]:
        """`[E, P]` for every parameter."""
        return self.columns_by_rows(self.entries)

    def columns_by_rows(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`[E, P]` for some parameters: a backward pass for each entry of the prediction."""
        rows: dict[str, list[Tensor]] = {name: [] for name in entries}
        pred = self.split.pred
        for k in range(len(pred)):
            self.say(f"row {k + 1} of {len(pred)} of the Jacobian")
            unit = torch.zeros_like(pred)
            unit[k] = 1.0
            found = grads(pred, [self.params[name] for name in rows], unit)
            for (name, some), g in zip(entries.items(), found, strict=True):
                rows[name].append(g.flatten()[some])
        return {name: torch.stack(r, 1) for name, r in rows.items()}

    def columns_by_products(self, name: str, entries: Tensor) -> Tensor:
        """`[E, P]`: products of the Jacobian with unit vectors."""
        pulled = self.pulled[name].flatten()
        return torch.stack([self.split.forward(pulled[e]) for e in entries])

    def columns_at(self, name: str, entries: Tensor) -> Tensor:
        """`[E, P]`: the Jacobian at these entries; a backward pass for each, or for each of the prediction."""
        few = self.split.pred.numel() < len(entries)
        return self.columns_by_rows({name: entries})[name] if few else self.columns_by_products(name, entries)

    def affordable(self, name: str, each: int) -> int:
        """How many of a parameter's entries can be looked at, if each takes so many backward passes."""
        return max(1, min(len(self.entries[name]), self.share // each))

    @cached_property
    def pulled(self) -> dict[str, Tensor]:
        """`J^T u` by parameter, which gives products with `J`."""
        return self.pulled_back(self.split, self.split.cotangent, create_graph=True)

    def ggn_times(self, vectors: Mapping[str, Tensor], chosen: Sequence[int]) -> list[Tensor]:
        """`sum_n J_n^T H_n J_n v` for a vector over some parameters."""
        pulled = torch.stack([(self.pulled[name] * v).sum() for name, v in vectors.items()]).sum()
        curved = self.split.of_samples(chosen, self.curved(self.split.forward(pulled)))
        return grads(self.split.pred, [self.params[name] for name in vectors], curved)

    @once
    def ggn_product(self, name: str, chosen: Sequence[int]) -> Tensor:
        """The same for a parameter's block and its vector."""
        self.say(f"GGN product of {name}")
        return self.ggn_times({name: self.places[name].vector}, chosen)[0]

    @cached_property
    def noise(self) -> float:
        """Up to which size a curvature is zero but for rounding, such as that along biases of keys.

        A product of the GGN with all parameters at once tells; where autograd cannot, none is taken for zero.
        """
        parts = {name: in_parts(p.detach()) for name, p in self.params.items()}
        vectors = {name: torch.linspace(1, 2, p.numel()).to(p).reshape(p.shape) for name, p in parts.items()}
        try:
            with derivatives(), self.sampled(None):
                found = self.ggn_times(vectors, range(self.n))
        except NoReference:
            return 0.0
        largest = max((float(g.abs().max()) for g in found if g.numel()), default=0.0)
        return ROUNDINGS * self.rounding * largest

    # ---- Hessian -----------------------------------------------------------------------------------
    def live_gradient(self, name: str, chosen: Sequence[int]) -> Tensor:
        """The gradient `[*p]` of the loss of some samples, to be differentiated again."""
        key = tuple(chosen)
        if key not in self._live:
            count, pred = self.whole.count(chosen), self.whole.pred
            if not count.all():
                pred = torch.where(count > 0, pred, pred.detach())
            slope = torch.autograd.grad(self.whole.value(pred), pred, create_graph=True)[0]
            found = grads(pred, list(self.params.values()), slope * count, create_graph=True)
            while len(self._live) >= KEPT_GRAPHS:
                del self._live[next(iter(self._live))]
            self._live[key] = dict(zip(self.params, found, strict=True))
        return self._live[key][name]

    @once
    def hessian_product(self, name: str, chosen: Sequence[int]) -> Tensor:
        """`H v` for a parameter's block and its vector, of the loss of some samples."""
        self.say(f"Hessian product of {name}")
        return grads((self.live_gradient(name, chosen) * self.places[name].vector).sum(), [self.params[name]])[0]

    @once
    def hessian_diagonal(self, name: str, chosen: Sequence[int], parts: int, every: bool) -> Tensor:
        """`[E]`: the Hessian's diagonal for some samples, at `every` entry, or at as many as so many `parts` allow."""
        self.say(f"Hessian of {name}")
        gradient = self.live_gradient(name, chosen).flatten()
        some = range(len(gradient)) if every else self.entries[name][: self.affordable(name, parts)]
        return torch.stack([grads(gradient[e], [self.params[name]])[0].flatten()[e] for e in some])
