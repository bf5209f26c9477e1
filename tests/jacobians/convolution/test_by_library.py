"""Individual gradients of convolutions by the library: equal to those by patches, and chosen where it is faster."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians.convolution.by_library import ByLibrary
from bpk.jacobians.core.call import Call
from bpk.rules import REGISTRY

N = 3
LAYERS: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (nn.Conv2d, (2, 3, 3), {}),
    (nn.Conv2d, (2, 3, 3), {"stride": 2, "padding": 1, "bias": False}),
    (nn.Conv2d, (2, 3, 2), {"padding": "same", "dilation": 2}),
    (nn.Conv2d, (2, 3, 3), {"padding": 1, "padding_mode": "circular"}),
    (nn.Conv1d, (2, 3, 3), {"padding": 2}),
    (nn.Conv3d, (2, 3, 2), {}),
]


def call_of(layer: nn.Module, *shape: int, n: int = N) -> tuple[ByLibrary, Call]:
    torch.manual_seed(0)
    rule = REGISTRY.find(layer)
    assert isinstance(rule, ByLibrary)
    return rule, Call.of(layer, torch.randn(n, *shape), params=("weight",), rule=rule)


@pytest.mark.processor("its kernels")
@pytest.mark.parametrize(("kind", "sizes", "options"), LAYERS, ids=str)
@torch.no_grad()
def test_equal_to_products_with_patches(kind: Any, sizes: Any, options: dict[str, Any]) -> None:
    rule, call = call_of(kind(*sizes, **options), 2, *(7, 6, 5)[: int(kind.__name__[4])])
    mat, weights = torch.randn(1, *call.output.shape), torch.tensor([[1.0, -1.0, 0.5]])

    def results() -> list[Tensor]:
        return [
            rule.jac_t_mat_prod(call, mat, "weight", sum_batch=False),
            rule.squared_sum(call, mat, "weight"),
            rule.squared_sum(call, mat, "weight", weights, per_sample=True),
            rule.norm_squared(call, mat[0], "weight"),
        ]

    with patch.object(ByLibrary, "is_faster", lambda *_: False):
        expected = results()
    with patch.object(ByLibrary, "is_faster", lambda *_: True):
        torch.testing.assert_close(results(), expected, rtol=1e-4, atol=1e-5)
        for compute in (
            lambda: rule.squared_sum(call, mat, "weight"),
            lambda: rule.norm_squared(call, mat[0], "weight"),
        ):
            call.sums = {}
            compute()
            torch.testing.assert_close(call.sums["weight"], expected[0][0].sum(0), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.processor("its kernels")
def test_several_columns_and_double_precision_take_patches() -> None:
    rule, call = call_of(nn.Conv2d(2, 3, 3), 2, 7, 6)
    with patch.object(ByLibrary, "is_faster", lambda *_: True):
        one = torch.randn(1, *call.output.shape)
        assert rule.one_by_one(call, [one]) is not None
        assert rule.one_by_one(call, [one, one]) is None
        assert rule.one_by_one(call, [one.expand(2, *one.shape[1:])]) is None
        assert rule.one_by_one(call.cast(torch.float64), [one.double()]) is None
        with torch.enable_grad():
            assert rule.one_by_one(call, [one]) is None


@pytest.mark.parametrize(
    ("sizes", "size", "faster"),
    [((64, 64, 3), 56, True), ((3, 64, 7), 64, True), ((256, 256, 3), 14, False), ((1, 4, 3), 28, False)],
    ids=str,
)
def test_chosen_where_positions_are_many(sizes: Any, size: int, faster: bool) -> None:
    rule, call = call_of(nn.Conv2d(*sizes, padding=1), sizes[0], size, size, n=1)
    assert rule.is_faster(call) == faster
