"""The diagonal of the residual in a parameter alone, of a rule that has nothing but products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian

from bpk.jacobians.core.call import Call
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.second_order import bordered

F64 = torch.float64


class Bent(nn.Module):
    """Not linear in its weight, and with columns of all entries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).sin().cumsum(-1).tanh()


class Counting(Autodiff):
    """Notes how many vectors are multiplied at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most = 0

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        self.most = max(self.most, *map(len, mats.values()))
        return super().residual_mat_prod(call, grad_out, mats)


@pytest.mark.parametrize("together", [1, 5, 12])
def test_diagonal_is_that_of_autograd(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few unit vectors at a time: no matrix of all entries by all entries is made."""
    torch.manual_seed(0)
    monkeypatch.setattr(bordered, "UNITS", together * 12)
    layer, x = Bent(), torch.randn(2, 4, dtype=F64)
    rule = Counting(Bent, params=("weight",))
    call = Call.of(layer, x, params=("weight",))
    grad = torch.randn_like(call.output)
    found = rule.residual_squares(call, grad, "weight")
    assert rule.most == together
    for n in range(2):

        def contracted(weight: Tensor, n: int = n) -> Tensor:
            return (torch.func.functional_call(layer, {"weight": weight}, (x[n : n + 1],)) * grad[n]).sum()

        whole = hessian(contracted)(layer.weight.detach()).reshape(12, 12)
        torch.testing.assert_close(found[n], whole.diagonal().reshape(3, 4))


class Power(nn.Module):
    """With a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.tensor(1.5, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() ** self.exponent


def test_a_parameter_without_axes() -> None:
    torch.manual_seed(0)
    layer, x = Power(), torch.randn(3, 2, dtype=F64)
    call = Call.of(layer, x, params=("exponent",))
    grad = torch.randn_like(call.output)
    found = Autodiff(Power, params=("exponent",)).residual_squares(call, grad, "exponent")
    expected = (grad * call.output * x.abs().log().square()).sum(1)
    torch.testing.assert_close(found, expected.detach())
