"""What definitions of quantities are written in, evaluated by plain autograd at some entries of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.verification.place import Place
from bpk.verification.problem import NoReference
from bpk.verification.reference import Reference
from bpk.verification.tokens import TokenTerms

MATRIX = 10
"""How many entries the side of a whole matrix may have, for each backward pass that is allowed."""


class AtPlace(PlainAutograd):
    """Quantities of one parameter, for a definition of this form.

    Of a costly reference they are those at the first entries, and `hessian_diagonals` those of the first samples.
    """

    def __init__(self, ref: Reference, place: Place, form: Form) -> None:
        self.ref, self.place, self.name, self.form = ref, place, place.name, form
        self.samples = place.numbers if form.by_sample else place.chosen
        self.batch_size = place.n

    def require_passes(self, passes: int) -> None:
        """Refuse all entries, if so many backward passes for a whole matrix, or its size, are too many."""
        size = self.place.shape.numel()
        if passes > self.ref.passes or size > MATRIX * self.ref.passes:
            raise NoReference(f"all {size} entries of the parameter are too many (passes=)")

    @cached_property
    def gradients(self) -> Tensor:
        if self.form.of_every_entry:
            return torch.stack([self.ref.whole_gradient(self.name, n) for n in self.samples])
        return torch.stack([self.ref.gradients(n)[self.name][0] for n in self.samples])

    @cached_property
    def norms(self) -> Tensor:
        return torch.stack([self.ref.gradients(n)[self.name][1] for n in self.samples])

    @cached_property
    def total_norms(self) -> Tensor:
        each = [[self.ref.gradients(n)[name][1] for name in self.ref.places] for n in self.samples]
        return torch.stack([torch.stack(norms).sum() for norms in each])

    @property
    def terms(self) -> TokenTerms:
        """Derivatives of the terms of the loss."""
        return TokenTerms(self.ref)

    @cached_property
    def token_gradients(self) -> Tensor:
        found = torch.stack([self.terms.gradients(self.name, n) for n in self.samples])
        return found if self.form.of_every_entry else found[:, :, self.place.entries]

    @cached_property
    def token_norms(self) -> Tensor:
        return torch.stack([self.terms.gradients(self.name, n).square().sum(1) for n in self.samples])

    @cached_property
    def token_ggn_diagonals(self) -> Tensor:
        return self.terms.diagonals(self.columns, self.samples)

    @cached_property
    def jacobian_squares(self) -> Tensor:
        split, drawn = self.ref.split, self.ref.drawn
        if drawn is None:
            found = split.by_sample(self.columns.square())
        else:
            found = torch.stack([split.by_sample(self.columns * signs).square() for signs in drawn]).sum(0)
        return found.T[list(self.samples)]

    @cached_property
    def output_jacobian_squares(self) -> Tensor:
        number, owner = self.terms.outputs, self.ref.split.owner
        rows, squares = [(owner == n).nonzero()[:, 0] for n in self.samples], self.columns.square().T
        found = squares.new_zeros(int(number.max()) + 1, squares.shape[1])
        return found.index_add(0, torch.cat([number[at] for at in rows]), torch.cat([squares[at] for at in rows]))

    @property
    def columns(self) -> Tensor:
        """`[E, P]`: columns of the Jacobian."""
        if not self.form.of_every_entry:
            return self.ref.columns(self.name)
        size = self.place.shape.numel()
        self.require_passes(min(size, self.ref.split.pred.numel()))
        return self.ref.columns_at(self.name, torch.arange(size, device=self.place.entries.device))

    @cached_property
    def ggn(self) -> Tensor:
        if not self.form.of_every_entry:
            return self.ref.ggn(self.name, self.samples)
        return self.ref.blocks(self.columns)[list(self.samples)]

    @cached_property
    def hessian_diagonals(self) -> Tensor:
        samples = self.samples[: max(1, self.ref.share)] if self.form.by_sample else self.samples
        return torch.stack([self.of_hessian((n,), len(samples)) for n in samples])

    @cached_property
    def hessian_diagonal(self) -> Tensor:
        return self.of_hessian(self.samples, 1)

    def of_hessian(self, samples: Sequence[int], parts: int) -> Tensor:
        """`[E]`: the diagonal of the Hessian of some samples, which is one of so many parts of what is wanted."""
        if self.form.of_every_entry:
            self.require_passes(self.place.shape.numel())
        return self.ref.hessian_diagonal(self.name, samples, parts, self.form.of_every_entry)

    @property
    def vector(self) -> Tensor:
        return self.place.vector

    @cached_property
    def ggn_product(self) -> Tensor:
        return self.ref.ggn_product(self.name, self.samples)

    @cached_property
    def hessian_product(self) -> Tensor:
        return self.ref.hessian_product(self.name, self.samples)
