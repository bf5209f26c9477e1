"""Rules of layers that are not elementwise against sympy: forward, Jacobian and second derivative of tiny cases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.families.autodiff import Autodiff
from bpk.rules import REGISTRY
from tests.references import symbolic_forwards as forwards
from tests.references.crosscheck import Forward, crosscheck


def targets(shape: tuple[int, ...]) -> torch.Tensor:
    """Class indices that include class 1."""
    return torch.arange(shape[0] * torch.Size(shape[2:]).numel()).reshape(shape[0], *shape[2:]) % shape[1]


def fractions(shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64)


WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)

CASES: list[tuple[Forward, Example]] = [
    (forwards.linear, case(nn.Linear, 2, 3, shape=(2, 2))),
    (forwards.linear, case(nn.Linear, 2, 1, bias=False, shape=(2, 2, 2))),
    (forwards.bilinear, case(nn.Bilinear, 2, 1, 2, shapes=((2, 2), (2, 1)))),
    (forwards.convolution, case(nn.Conv1d, 2, 2, 2, stride=2, padding=1, groups=2, shape=(2, 2, 3))),
    (forwards.convolution, case(nn.Conv1d, 1, 2, 2, dilation=2, padding=1, padding_mode="circular", shape=(2, 1, 3))),
    (forwards.convolution, case(nn.Conv2d, 1, 2, (1, 2), padding=(1, 0), padding_mode="replicate", shape=(1, 1, 2, 3))),
    (forwards.convolution, case(nn.Conv3d, 1, 1, (1, 2, 1), bias=False, shape=(2, 1, 1, 2, 2))),
    (
        forwards.transposed_convolution,
        case(nn.ConvTranspose1d, 2, 2, 2, stride=2, padding=1, output_padding=1, groups=2, shape=(2, 2, 2)),
    ),
    (forwards.transposed_convolution, case(nn.ConvTranspose2d, 1, 2, (2, 1), dilation=(2, 1), shape=(1, 1, 2, 2))),
    (forwards.average_pool, case(nn.AvgPool2d, 2, stride=1, padding=1, count_include_pad=False, shape=(1, 1, 2, 3))),
    (forwards.average_pool, case(nn.AvgPool2d, (1, 2), divisor_override=3, shape=(2, 1, 2, 4))),
    (forwards.adaptive_average_pool, case(nn.AdaptiveAvgPool2d, (2, 3), shape=(1, 1, 3, 4))),
    (forwards.padding, case(nn.ConstantPad1d, (1, 2), 0.5, shape=(2, 1, 3))),
    (forwards.padding, case(nn.ReflectionPad1d, (1, 2), shape=(2, 1, 3))),
    (forwards.padding, case(nn.ReplicationPad2d, (1, 0, 0, 2), shape=(1, 1, 2, 2))),
    (forwards.padding, case(nn.CircularPad2d, (1, 0, 2, 1), shape=(1, 1, 2, 2))),
    (forwards.padding, case(nn.ZeroPad2d, (-1, 1, 0, 1), shape=(1, 1, 2, 3))),
    (forwards.softmax, case(nn.Softmax, 1, shape=(2, 3))),
    (forwards.softmax, case(nn.Softmax, -1, shape=(1, 2, 3))),
    (forwards.softmin, case(nn.Softmin, 1, shape=(2, 2))),
    (forwards.log_softmax, case(nn.LogSoftmax, 1, shape=(2, 3))),
    (forwards.glu, case(nn.GLU, shape=(2, 4))),
    (forwards.glu, case(nn.GLU, 1, shape=(1, 2, 2))),
    (forwards.prelu, case(nn.PReLU, shape=(2, 3))),
    (forwards.prelu, case(nn.PReLU, 2, 0.3, shape=(2, 2, 2))),
    (forwards.square_error, case(nn.MSELoss, shape=(2, 3), target=fractions)),
    (forwards.square_error, case(nn.MSELoss, reduction="sum", shape=(3, 2), target=fractions)),
    (forwards.binary_cross_entropy, case(nn.BCEWithLogitsLoss, shape=(2, 3), target=fractions)),
    (
        forwards.binary_cross_entropy,
        case(nn.BCEWithLogitsLoss, WEIGHT, reduction="sum", pos_weight=WEIGHT + 1, shape=(2, 3), target=fractions),
    ),
    (forwards.cross_entropy, case(nn.CrossEntropyLoss, shape=(3, 3), target=targets)),
    (
        forwards.cross_entropy,
        case(nn.CrossEntropyLoss, WEIGHT, ignore_index=1, label_smoothing=0.2, shape=(3, 3), target=targets),
    ),
    (forwards.cross_entropy, case(nn.CrossEntropyLoss, reduction="sum", shape=(1, 3, 2), target=targets)),
]


@pytest.mark.parametrize(("forward", "example"), CASES, ids=[str(example) for _, example in CASES])
def test_rule_agrees_with_sympy(forward: Forward, example: Example) -> None:
    torch.manual_seed(0)
    module = example.build().double()
    rule = REGISTRY.find(module)
    assert rule is not None, f"{type(module).__name__} has no rule in the registry"
    assert crosscheck(rule, module, example.inputs(), forward) > 0


def test_a_wrong_product_is_found() -> None:
    class Doubled(Autodiff):
        def jac_mat_prod(self, call, mat, wrt=0):
            return 2 * super().jac_mat_prod(call, mat, wrt)

    inputs = [torch.ones(1, 2, dtype=torch.float64)]
    with pytest.raises(RuleError, match=r"jac_mat_prod for input 0 .* wrong(.|\n)*entry \(0, 0\)(.|\n)*in sympy"):
        crosscheck(Doubled(nn.Softmax), nn.Softmax(1), inputs, forwards.softmax)
