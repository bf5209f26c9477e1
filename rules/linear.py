"""Linear and bilinear layers, with any number of axes between batch and features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.example import case
from bpk.jacobians.core.function_module import TimesWeight
from bpk.jacobians.core.numeric import linear
from bpk.jacobians.families.affine import Affine

NO_BATCH = "its input has no batch axis"


class FeaturesLast(Affine):
    """Outputs `[N, *t, O]`: one group, positions between batch and features."""

    def acts_on(self, call: Call) -> int | None:
        return 1

    def obstacle(self, call: Call) -> str | None:
        return NO_BATCH if call.output.dim() < 2 else super().obstacle(call)

    def as_columns(self, call: Call, mat: Tensor) -> Tensor:
        if call.output.dim() < 2:
            what = f"{self.name} has no individual gradients."
            raise UnsupportedLayer(explain(what, NO_BATCH + ".", "add one: x.unsqueeze(0)."))
        positions = mat.shape[2:-1].numel()
        return mat.reshape(*mat.shape[:2], positions, mat.shape[-1]).transpose(2, 3)[:, :, None]

    def as_output(self, call: Call, columns: Tensor) -> Tensor:
        v, n, _, o, _ = columns.shape
        out = call.output.shape
        return columns[:, :, 0].transpose(2, 3).expand(v, n, out[1:-1].numel(), o).reshape(v, n, *out[1:])

    def as_matrix(self, call: Call, weight: Tensor) -> Tensor:
        lead = weight.shape[: weight.dim() - call.params["weight"].dim()]
        return weight.reshape(*lead, 1, call.params["weight"].shape[0], -1)

    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        return matrix.reshape(*matrix.shape[:-3], *call.params["weight"].shape)


class LinearRule(FeaturesLast):
    """`out = x W^T + b`."""

    def forward(self, options: Any, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.linear(inputs[0], params["weight"], params.get("bias"))

    def patches(self, call: Call, samples: slice = slice(None)) -> Tensor:
        x = call.inputs[0][samples]
        return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1]).transpose(1, 2)[:, None]

    def input_product(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return linear(mat, call.params["weight"])

    def input_adjoint(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return linear(mat, call.params["weight"].T)

    def weight_product(self, call: Call, mat: Tensor) -> Tensor:
        x = call.inputs[0].flatten(0, -2)
        return torch.matmul(x, mat.transpose(1, 2)).reshape(mat.shape[0], *call.output.shape)

    def weight_adjoint(self, call: Call, mat: Tensor) -> Tensor:
        x = call.inputs[0].flatten(0, -2)
        return torch.matmul(mat.reshape(mat.shape[0], x.shape[0], mat.shape[-1]).transpose(1, 2), x)


class TimesWeightRule(LinearRule):
    """`out = x W + b`: a linear layer with the weight `W^T`."""

    def forward(self, options: Any, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.linear(inputs[0], params["weight"].T, params.get("bias"))

    def as_matrix(self, call: Call, weight: Tensor) -> Tensor:
        return weight.transpose(-2, -1).unsqueeze(-3)

    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        return matrix.squeeze(-3).transpose(-2, -1)

    def input_product(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return linear(mat, call.params["weight"].T)

    def input_adjoint(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return linear(mat, call.params["weight"])

    def weight_product(self, call: Call, mat: Tensor) -> Tensor:
        return super().weight_product(call, mat.transpose(1, 2))

    def weight_adjoint(self, call: Call, mat: Tensor) -> Tensor:
        return super().weight_adjoint(call, mat).transpose(1, 2)

    def transposes(self, param: str) -> bool:
        return param == "weight"

    def input_first(self, param: str) -> bool:
        return param == "weight"


class BilinearRule(FeaturesLast):
    """`out_o = x1^T W_o x2 + b_o`: a linear layer on the outer product of its inputs."""

    def forward(self, options: Any, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.bilinear(inputs[0], inputs[1], params["weight"], params.get("bias"))

    def patches(self, call: Call, samples: slice = slice(None)) -> Tensor:
        left, right = (x[samples] for x in call.inputs)
        product = left[..., :, None] * right[..., None, :]
        columns = product.reshape(left.shape[0], left.shape[1:-1].numel(), left.shape[-1] * right.shape[-1])
        return columns.transpose(1, 2)[:, None]

    def _partial(self, call: Call, wrt: int) -> Tensor:
        """The weight contracted with the other input: `[N, *t, O, I_wrt]`."""
        pattern = "oij,n...j->n...oi" if wrt == 0 else "oij,n...i->n...oj"
        return torch.einsum(pattern, call.params["weight"], call.inputs[1 - wrt])

    def input_product(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return torch.einsum("...oi,v...i->v...o", self._partial(call, wrt), mat)

    def input_adjoint(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return torch.einsum("...oi,v...o->v...i", self._partial(call, wrt), mat)


RULES = (
    LinearRule(
        nn.Linear,
        functions=(F.linear,),
        params=("weight", "bias"),
        examples=(
            case(nn.Linear, 4, 3, shape=(5, 4)),
            case(nn.Linear, 4, 3, bias=False, shape=(5, 4)),
            case(nn.Linear, 4, 3, shape=(3, 5, 4)),
            case(nn.Linear, 3, 2, shape=(2, 3, 2, 3)),
            case(nn.Linear, 1, 1, shape=(3, 1)),
        ),
    ),
    TimesWeightRule(
        TimesWeight,
        params=("weight", "bias"),
        examples=(
            case(TimesWeight, 4, 3, shape=(5, 4)),
            case(TimesWeight, 4, 3, bias=False, shape=(3, 5, 4)),
            case(TimesWeight, 3, 2, shape=(2, 3, 2, 3)),
        ),
    ),
    BilinearRule(
        nn.Bilinear,
        functions=(F.bilinear,),
        params=("weight", "bias"),
        examples=(
            case(nn.Bilinear, 3, 2, 4, shapes=((5, 3), (5, 2))),
            case(nn.Bilinear, 3, 2, 4, bias=False, shapes=((5, 3), (5, 2))),
            case(nn.Bilinear, 2, 3, 2, shapes=((3, 4, 2), (3, 4, 3))),
        ),
    ),
)
