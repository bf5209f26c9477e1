"""Converted models in which what is overwritten in place is looked at by other tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.bpk.converter.helpers import convert, linear

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda h: torch.einsum("nij->nji", h),
    "atleast_3d": torch.atleast_3d,
    "cpu": lambda h: h.cpu(),
    "adjoint": lambda h: h.adjoint(),
    "diagonal": lambda h: torch.linalg.diagonal(h),
    "conj": lambda h: h.conj().resolve_conj(),
    "complex": lambda h: torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (2, 2)))),
    "pos": lambda h: +h,
    "of the same size": lambda h: h.sum_to_size(3, 2, 4),
}


class Overwrites(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.view = linear(), view

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        seen = self.view(h)
        h.add_(1)
        return seen * 2


@pytest.mark.parametrize("name", VIEWS)
def test_views_see_what_is_written(name: str) -> None:
    model, x = Overwrites(VIEWS[name]), torch.randn(3, 2, 4)
    torch.testing.assert_close(convert(model)(x), model(x))
