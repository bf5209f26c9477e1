"""Every quantity at some entries, by its definition and with plain autograd: nothing of `bpk` computes here.

`L` is the loss, `f_n` the prediction of sample `n`, and `L_n` the loss as a function of `f_n` alone (the other
predictions are constants), so that divisors, class weights and ignored targets are those of the whole batch. Where
samples mix, the whole batch is one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from bpk.jacobians.core.rule import add_up
from bpk.verification.layers import Layers, bias_of
from bpk.verification.objective import Objective, Points
from bpk.verification.place import Place
from bpk.verification.problem import NoReference, Problem, differentiable_twice
from bpk.verification.split import Split, each_once, grads

KEPT_GRAPHS = 3
"""How many gradients are kept with the graph that makes them differentiable."""


def say_nothing(text: str) -> None:
    """Nobody watches."""


class Reference:
    """One evaluation of a model, its gradient's graph kept, and derivatives of it.

    `places` says at which entries (flat indices `[E]`) of each parameter the quantities are wanted, `passes` about how
    many backward passes each kind of quantity may take. With `factors` the biases that define Kronecker factors are
    looked at, too. `say` is told what is being computed.
    """

    def __init__(
        self,
        problem: Problem,
        places: Mapping[str, Place],
        passes: int,
        factors: bool,
        say: Callable[[str], None] = say_nothing,
    ) -> None:
        self.problem, self.say, self.passes = problem, say, passes
        self.layers = Layers(problem.model if factors else nn.Module())
        self.entries = {name: place.entries for name, place in places.items()}
        self.share = passes // max(1, len(places))
        named = dict(problem.model.named_parameters())
        self.params: dict[str, Tensor] = {name: named[name] for name in places}
        with differentiable_twice():
            with self.layers.elsewhere:
                objective = Objective(problem)
            self.layers.close(objective.value)
            self.whole = Split(problem, objective.whole())
            self.n = self.whole.n
            self.inside = objective.inside()
        for weight, sides in self.layers.sides.items():
            for k, side in enumerate(sides if weight in places else ()):
                if side.bias is not None:
                    self.params[bias_of(weight, k)] = side.bias
                    entries = places[weight].side(side.sizes[0]).to(side.bias.device)
                    self.entries[bias_of(weight, k)] = entries + side.offset
        self._individual: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._columns: dict[str, Tensor] = {}
        self._blocks: dict[str, Tensor] = {}
        self._drawn: Tensor | None = None
        self._known: dict[Hashable, Tensor] = {}
        self._live: dict[tuple[int, ...], dict[str, Tensor]] = {}

    @cached_property
    def split(self) -> Split:
        """Where the GGN splits the objective."""
        inside: Points | None = self.inside
        if inside is None:
            return self.whole
        split = Split(self.problem, inside)
        if split.mixing and not self.whole.mixing:
            raise NoReference(f"{split.mixing}, inside of the loss")
        return split

    # ---- first order -------------------------------------------------------------------------------
    @cached_property
    def used(self) -> dict[str, bool]:
        """Which parameters the prediction depends on."""
        total = self.whole.pred.sum()
        found = torch.autograd.grad(total, list(self.params.values()), retain_graph=True, allow_unused=True)
        return {name: g is not None for name, g in zip(self.params, found, strict=True)}

    def gradient(self, name: str, n: int) -> Tensor:
        """`[E]`: the gradient of `L_n` at the chosen entries."""
        return self._sample(n)[name][0]

    def whole_gradient(self, name: str, n: int) -> Tensor:
        """The same at all entries."""
        slope = self.whole.of_samples([n], self.whole.slope.detach())
        return grads(self.whole.pred, [self.params[name]], slope)[0].flatten()

    def norm(self, name: str, n: int) -> Tensor:
        """The squared norm of the gradient of `L_n`."""
        return self._sample(n)[name][1]

    def _sample(self, n: int) -> dict[str, tuple[Tensor, Tensor]]:
        if n not in self._individual:
            self.say(f"gradient of sample {n}")
            slope = self.whole.of_samples([n], self.whole.slope.detach())
            found = grads(self.whole.pred, list(self.params.values()), slope)
            self._individual[n] = {
                name: (g.flatten()[self.entries[name]], g.square().sum())
                for name, g in zip(self.params, found, strict=True)
            }
        return self._individual[n]

    # ---- generalised Gauss-Newton ------------------------------------------------------------------
    def ggn(self, name: str, chosen: Sequence[int]) -> Tensor:
        """`[len(chosen), E, E]`: `J_n^T H_n J_n` at the chosen entries (of a costly reference: at the first ones)."""
        if self._drawn is not None:
            return self.sampled_block(self.columns(name), self._drawn)[list(chosen)]
        if name not in self._blocks:
            columns = self.columns(name)
            with self.derivatives():
                self._blocks[name] = self.block(columns)
        return self._blocks[name][list(chosen)]

    def block(self, columns: Tensor) -> Tensor:
        """`[N, E, E]`: columns `[E, P]` of the Jacobian times the Hessian of the loss, by sample."""
        rows = [self.split.by_sample(columns * self.split.loss_product(column)) for column in columns]
        return torch.stack(rows).permute(2, 0, 1)

    def sampled_block(self, columns: Tensor, drawn: Tensor) -> Tensor:
        """`[N, E, E]`: the same with `S S^T` in place of the Hessian, for draws `S` `[M, P]`."""
        rows = torch.stack([self.split.by_sample(columns * one) for one in drawn])
        return torch.einsum("men,mfn->nef", rows, rows)

    @contextmanager
    def sampled(self, drawn: Tensor | None) -> Iterator[None]:
        """Inside, the GGN is the one of these draws."""
        before, self._drawn = self._drawn, drawn
        try:
            yield
        finally:
            self._drawn = before

    @property
    def repeats(self) -> bool:
        """Whether the draws of a sampled quantity are known."""
        return self._drawn is not None

    def columns(self, name: str) -> Tensor:
        """`[E, P]`: the Jacobian at the chosen entries (of a costly reference: at the first ones)."""
        if name not in self._columns:
            self.say(f"GGN of {name}")
            with self.derivatives():
                by_rows = self.columns_by_rows(self.entries) if self.by_rows else None
                self._columns.update(by_rows or {name: self.columns_by_products(name)})
        return self._columns[name]

    @property
    def by_rows(self) -> bool:
        """Whether rows of the Jacobian (a backward pass for each entry of the prediction) are the cheaper way."""
        return self.split.pred.numel() <= 1.5 * sum(len(e) for e in self.entries.values())

    def columns_by_rows(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`[E, P]` for several parameters."""
        rows: dict[str, list[Tensor]] = {name: [] for name in entries}
        pred = self.split.pred
        for k in range(pred.numel()):
            self.say(f"row {k + 1} of {pred.numel()} of the Jacobian")
            unit = torch.zeros_like(pred)
            unit[k] = 1.0
            found = grads(pred, [self.params[name] for name in rows], unit)
            for (name, e), g in zip(entries.items(), found, strict=True):
                rows[name].append(g.flatten()[e])
        return {name: torch.stack(r, 1) for name, r in rows.items()}

    def columns_by_products(self, name: str, entries: Tensor | None = None) -> Tensor:
        """`[E, P]`: products of the Jacobian with unit vectors, as many as `passes` allows, or for all `entries`."""
        param, columns = self.params[name], []
        for e in self.entries[name][: self.affordable(name, 1)] if entries is None else entries:
            unit = param.new_zeros(param.numel())
            unit[e] = 1.0
            columns.append(self.split.forward((self.pulled[name] * unit.reshape(param.shape)).sum()))
        return torch.stack(columns)

    def whole_ggn(self, name: str, entries: Tensor, chosen: Sequence[int]) -> Tensor:
        """`[len(chosen), E, E]`: the GGN at these entries; a backward pass for each, or for each of the prediction."""
        with self.derivatives():
            few = self.split.pred.numel() < len(entries)
            columns = self.columns_by_rows({name: entries})[name] if few else self.columns_by_products(name, entries)
            block = self.block(columns) if self._drawn is None else self.sampled_block(columns, self._drawn)
            return block[list(chosen)]

    def affordable(self, name: str, each: int) -> int:
        """How many of a parameter's entries can be looked at, if each takes so many backward passes."""
        return max(1, min(len(self.entries[name]), self.share // each))

    @cached_property
    def pulled(self) -> dict[str, Tensor]:
        """`J^T u` by parameter."""
        split = self.split
        return dict(zip(self.params, grads(split.pred, list(self.params.values()), split.cotangent, True), strict=True))

    def ggn_product(self, name: str, vector: Tensor, chosen: Sequence[int]) -> Tensor:
        """`sum_n J_n^T H_n J_n v` for a parameter's block."""

        def compute() -> Tensor:
            self.say(f"GGN product of {name}")
            split = self.split
            curved = split.loss_product(split.forward((self.pulled[name] * vector).sum()))
            return grads(split.pred, [self.params[name]], split.of_samples(chosen, curved))[0]

        return self.once(("ggn product", name, *chosen), compute)

    # ---- Hessian -----------------------------------------------------------------------------------
    def live_gradient(self, name: str, chosen: Sequence[int]) -> Tensor:
        """The gradient `[*p]` of the loss of some samples, to be differentiated again."""
        return add_up([self.live_gradient_of(name, part) for part in each_once(chosen)])

    def live_gradient_of(self, name: str, chosen: Sequence[int]) -> Tensor:
        """The same for samples that are named once each."""
        key = tuple(chosen)
        if key not in self._live:
            pred = self.whole.pred
            if len(chosen) < self.n:
                pred = torch.where(self.whole.belongs(chosen), pred, pred.detach())
            found = grads(self.whole.value(pred), list(self.params.values()), create_graph=True)
            while len(self._live) >= KEPT_GRAPHS:
                del self._live[next(iter(self._live))]
            self._live[key] = dict(zip(self.params, found, strict=True))
        return self._live[key][name]

    def hessian_product(self, name: str, vector: Tensor, chosen: Sequence[int]) -> Tensor:
        """`H v` for a parameter's block, of the loss of some samples."""

        def compute() -> Tensor:
            self.say(f"Hessian product of {name}")
            return grads((self.live_gradient(name, chosen) * vector).sum(), [self.params[name]])[0]

        return self.once(("hessian product", name, *chosen), compute)

    def hessian_diagonal(self, name: str, chosen: Sequence[int], parts: int, entries: Tensor | None = None) -> Tensor:
        """`[E]`: the Hessian's diagonal for some samples, at as many entries as `passes` allows for so many `parts`."""
        whole = entries is not None
        entries = self.entries[name][: self.affordable(name, parts)] if entries is None else entries

        def compute() -> Tensor:
            self.say(f"Hessian of {name}")
            gradient = self.live_gradient(name, chosen).flatten()
            return torch.stack([grads(gradient[e], [self.params[name]])[0].flatten()[e] for e in entries])

        return self.once(("hessian diagonal", name, parts, whole, *chosen), compute)

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
