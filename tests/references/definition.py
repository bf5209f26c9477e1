"""Definitions of extensions, evaluated with the dense matrices of the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form, PlainAutograd
from tests.references.reference import Reference


class Dense(PlainAutograd):
    """All samples and all entries of one parameter."""

    def __init__(self, ref: Reference, name: str, vector: Tensor) -> None:
        self.ref, self.name, self._vector = ref, name, vector
        self.batch_size = ref.N

    @property
    def gradients(self) -> Tensor:
        return self.ref.grad_batch(self.name).flatten(1)

    @property
    def norms(self) -> Tensor:
        return self.ref.batch_l2(self.name)

    @property
    def total_norms(self) -> Tensor:
        return torch.stack([self.ref.batch_l2(name) for name in self.ref.trained]).sum(0)

    @property
    def token_gradients(self) -> Tensor:
        return self.ref.token_gradients(self.name)

    @property
    def token_norms(self) -> Tensor:
        return self.token_gradients.square().sum(2)

    @property
    def token_ggn_diagonals(self) -> Tensor:
        return self.ref.token_ggn_diagonals(self.name)

    @property
    def jacobian_squares(self) -> Tensor:
        return self.ref.jacobian_squares(self.name)

    @property
    def output_jacobian_squares(self) -> Tensor:
        return self.ref.output_jacobian_squares(self.name)

    @property
    def ggn(self) -> Tensor:
        return self.ref.ggn_batch(self.name)

    @property
    def hessian_diagonals(self) -> Tensor:
        return self.ref.diag_h_batch(self.name).flatten(1)

    @property
    def hessian_diagonal(self) -> Tensor:
        return self.ref.diag_h(self.name).flatten()

    @property
    def vector(self) -> Tensor:
        return self._vector

    @property
    def ggn_product(self) -> Tensor:
        return (self.ref.ggn(self.name) @ self.vector.flatten()).reshape(self.vector.shape)

    @property
    def hessian_product(self) -> Tensor:
        return (self.ref.hessian(self.name) @ self.vector.flatten()).reshape(self.vector.shape)


def shapes(ref: Reference, name: str) -> dict[Form, tuple[int, ...]]:
    """Of fields that are numbers."""
    shape = ref.params[name].shape
    return {
        Form.BATCH: shape,
        Form.SAMPLES: (ref.N, *shape),
        Form.NUMBER: (),
        Form.NUMBERS: (ref.N,),
        Form.GRAM: (ref.N, ref.N),
    }


def pairs(extension: BackpropExtension, ref: Reference, name: str, found: Any) -> list[tuple[Tensor, Tensor]]:
    """What is in a field, and what must be."""
    param = ref.params[name]
    vectors = torch.randn(2, *param.shape, dtype=param.dtype)
    is_product = extension.form in (Form.PRODUCT, Form.BOUNDED_PRODUCT)
    defined = [extension.definition(Dense(ref, name, v)) for v in (vectors if is_product else vectors[:1])]
    if extension.form in shapes(ref, name):
        return [(found, defined[0].reshape(shapes(ref, name)[extension.form]))]
    if extension.form is Form.AXES:
        return [(torch.cat([matrix.flatten() for matrix in found]), defined[0])]
    if extension.form in (Form.TOKENS, Form.OUTPUTS):
        return [(found, defined[0].unflatten(-1, param.shape))]
    if extension.form in (Form.SAMPLE_VECTORS, Form.TOKEN_NUMBERS, Form.TOKEN_VECTORS):
        return [(found, defined[0])]
    if extension.form is Form.ROOT_GRAM:
        blocks = found.reshape(-1, ref.N, len(found) // ref.N, ref.N)
        return [(blocks.square().sum((0, 2)), defined[0]), (found, found.T)]
    if extension.form is Form.ROOT:
        rows = found.flatten(2)
        return [(torch.einsum("cnp,cnq->npq", rows, rows), defined[0])]
    products = found(vectors)
    if extension.form is Form.PRODUCT:
        return [(products, torch.stack(defined))]
    assert extension.form is Form.BOUNDED_PRODUCT, "Kronecker factors need a reference of their own"
    forth, back = (products[0] * vectors[1]).sum(), (products[1] * vectors[0]).sum()
    size = torch.stack([(product * v).sum() for product, v in zip(products, vectors, strict=True)])
    least = torch.stack([(d * v).flatten(1).sum(1).max() for d, v in zip(defined, vectors, strict=True)])
    return [(forth, back), (size, torch.maximum(size, least))]
