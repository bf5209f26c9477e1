"""Normalisation and similarity layers: what the generated tests do not cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.families.normalization import trained
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from tests.references.crosscheck import crosscheck

Array = Any


def rule_of(module: nn.Module) -> Rule:
    found = REGISTRY.find(module)
    assert found is not None
    return found


def call_of(module: nn.Module, x: Tensor) -> Call:
    return Call.of(module, x, params=rule_of(module).params)


# ---- against sympy -----------------------------------------------------------------------------------
def standardise(rows: Array, eps: float, centred: bool = True) -> Array:
    """`[B, D]`, row by row."""
    rows = rows - rows.mean(1, keepdims=True) if centred else rows
    scale = np.vectorize(sympy.sqrt, otypes=[object])((rows**2).mean(1, keepdims=True) + eps)
    return rows / scale


def layer_norm(options: Any, inputs: Sequence[Array], params: Mapping[str, Array]) -> Array:
    x = inputs[0]
    rows = x.reshape(-1, int(np.prod(options.normalized_shape)))
    unit = standardise(rows, options.eps, centred=isinstance(options, nn.LayerNorm))
    return unit.reshape(x.shape) * params["weight"] + params.get("bias", 0)


def group_norm(options: Any, inputs: Sequence[Array], params: Mapping[str, Array]) -> Array:
    x = inputs[0]
    unit = standardise(x.reshape(len(x) * options.num_groups, -1), options.eps).reshape(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return unit * params["weight"].reshape(shape) + params["bias"].reshape(shape)


def batch_norm(options: Any, inputs: Sequence[Array], params: Mapping[str, Array]) -> Array:
    mean, std = options.running_mean.cpu().numpy(), np.sqrt(options.running_var.cpu().numpy() + options.eps)
    shape = (1, -1, *[1] * (inputs[0].ndim - 2))
    scale, shift = params["weight"] / std, params["bias"] - params["weight"] * mean / std
    return inputs[0] * scale.reshape(shape) + shift.reshape(shape)


@pytest.mark.parametrize(
    ("forward", "example"),
    [
        (layer_norm, trained(nn.LayerNorm, 3, shape=(2, 3))),
        (layer_norm, trained(nn.RMSNorm, 2, eps=0.1, shape=(1, 2, 2))),
        (group_norm, trained(nn.GroupNorm, 2, 4, shape=(1, 4))),
        (group_norm, trained(nn.GroupNorm, 1, 2, shape=(1, 2, 2))),
        (batch_norm, trained(nn.BatchNorm1d, 2, shape=(2, 2, 2))),
    ],
    ids=lambda value: str(value) if isinstance(value, Example) else value.__name__,
)
def test_agrees_with_sympy(forward: Any, example: Example) -> None:
    module = example.build().double()
    assert crosscheck(rule_of(module), module, example.inputs(), forward) > 0


# ---- shapes without features of their own ------------------------------------------------------------
@pytest.mark.parametrize(
    "example",
    [
        case(nn.CosineSimilarity, shapes=((3, 4), (3, 4))),
        case(nn.CosineSimilarity, shapes=((3, 4, 2), (3, 1, 2))),  # one number is compared with several
        case(nn.PairwiseDistance, shapes=((3, 4), (3, 4))),
        case(nn.PairwiseDistance, p=1.0, shapes=((3, 4), (3, 4))),
        trained(nn.LayerNorm, 1, shape=(3, 2, 1)),
        trained(nn.RMSNorm, 1, shape=(3, 1)),
        trained(nn.GroupNorm, 4, 4, shape=(3, 4)),
        trained(nn.BatchNorm1d, 3, shape=(1, 3)),
    ],
    ids=str,
)
def test_degenerate_shapes(example: Example) -> None:
    assert check_rule(rule_of(example.build()), [example], [torch.float64]).checks > 20


@pytest.mark.parametrize(("x", "y"), [((3, 4), (4,)), ((3, 4), (1, 4))])
def test_similarity_leaves_inputs_without_samples_of_their_own(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    """To autograd: the rule sees nothing of the call."""
    module = nn.PairwiseDistance()
    assert rule_of(module).bind(module, (torch.ones(x), torch.zeros(y)), {}).inputs == ()


def test_distance_of_single_vectors_is_refused() -> None:
    module, x = nn.PairwiseDistance(), torch.ones(4)
    reason = rule_of(module).obstacle(Call(module, (x, x), {}, module(x, x)))
    assert reason == "it mixes samples: it compares along the batch axis"


def test_cosine_along_the_batch_axis_is_refused() -> None:
    module = nn.CosineSimilarity(dim=0)
    x = torch.ones(3, 4)
    reason = rule_of(module).obstacle(Call(module, (x, x), {}, module(x, x)))
    assert reason == "it mixes samples: it compares along the batch axis"


def test_cosine_of_inputs_by_name() -> None:
    class Compared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cosine = nn.Linear(4, 3), nn.CosineSimilarity()

        def forward(self, x: Tensor) -> Tensor:
            return self.cosine(x2=self.linear(x), x1=x[:, :3])

    x, y = torch.randn(3, 4), torch.rand(3)
    found = bpk.verify(Compared(), nn.MSELoss(), x, y, E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian())
    assert found.summary() == "6 ok"


# ---- the factored residual ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(5, eps=0.1), (2, 3, 5)),
        (nn.LayerNorm(2), (2, 3, 2)),
        (nn.RMSNorm(4, eps=0.1), (3, 4)),
        (nn.GroupNorm(2, 4), (2, 4, 3)),
        (nn.InstanceNorm1d(2), (2, 2, 3)),
    ],
    ids=str,
)
def test_columns_of_opposite_signs_are_orthogonal(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """So that clipping the negative ones is clipping the negative eigenvalues."""
    torch.manual_seed(0)
    rule, call = rule_of(layer), call_of(layer.double(), torch.randn(shape, dtype=torch.float64))
    grad = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        columns, signs = rule.residual_columns(call, grad)
        size = grad[0].numel()
        eye = torch.eye(size, dtype=torch.float64).reshape(size, 1, *shape[1:]).expand(-1, *shape)
        dense = rule.residual_mat_prod(call, grad, {0: eye})[0].flatten(2)
    for n in range(shape[0]):
        rows, sign = columns[0][:, n].flatten(1), signs[:, n]
        values, basis = torch.linalg.eigh(dense[:, n])
        for kept, clipped in ((sign > 0, values.clamp(min=0)), (sign < 0, (-values).clamp(min=0))):
            expected = basis @ torch.diag(clipped) @ basis.T
            torch.testing.assert_close(rows[kept].T @ rows[kept], expected, rtol=1e-7, atol=1e-9)


def test_columns_can_be_differentiated_where_they_vanish() -> None:
    layer = nn.LayerNorm(3).double()
    x = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    call = Call(layer, [x], dict(layer.named_parameters()), layer(x))
    columns, _ = rule_of(layer).residual_columns(call, torch.zeros(2, 3, dtype=torch.float64))
    (grad,) = torch.autograd.grad(columns[0].sum(), x)
    assert torch.isfinite(grad).all() and not columns[0].any()


# ---- statistics of groups and batches ----------------------------------------------------------------
@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)], ids=str)
def test_groups_without_variance(layer: nn.Module) -> None:
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, -2.0, 0.5, 3.0]])
    call, mat = call_of(layer, x), torch.randn(2, 2, 4)
    rule = rule_of(layer)
    expected = torch.stack([torch.autograd.functional.vjp(layer, x, m)[1] for m in mat])
    with torch.no_grad():
        torch.testing.assert_close(rule.jac_t_mat_prod(call, mat), expected, rtol=1e-4, atol=1e-3)
        assert torch.isfinite(rule.residual_columns(call, mat[0])[0][0]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_eps_that_is_left_out_is_torchs(dtype: torch.dtype) -> None:
    """In half precision torch adds that of float32, and not that of the input's type."""
    torch.manual_seed(0)
    layer, x = nn.RMSNorm(4).to(dtype), (0.01 * torch.randn(3, 4)).to(dtype)
    call, mat = call_of(layer, x), torch.randn(1, 3, 4).to(dtype)
    for wrt, of in ((0, 1), ("weight", 0)):
        expected = torch.autograd.functional.vjp(
            lambda w, x: torch.func.functional_call(layer, {"weight": w}, (x,)), (layer.weight.detach(), x), mat[0]
        )[1][of]
        found = rule_of(layer).jac_t_mat_prod(call, mat, wrt)[0]
        scale = float(expected.float().abs().max())
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * scale)


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.Softmax(-1), nn.LogSoftmax(-1), nn.GLU()], ids=str
)
def test_no_positions(layer: nn.Module) -> None:
    """Sequences without entries have zero gradients, as those of a detector that has found nothing."""
    model = bpk.extend(nn.Sequential(nn.Linear(3, 4), layer, nn.Flatten(), nn.Linear(0, 2)))
    lossfunc, x = bpk.extend(nn.MSELoss()), torch.randn(2, 0, 3)
    with bpk.backpack(E.BatchGrad(), E.DiagHessian()):
        lossfunc(model(x), torch.randn(2, 2)).backward()
    weight = model[0].weight
    assert weight.grad_batch.shape == (2, 4, 3) and not weight.grad_batch.any() and not weight.diag_h.any()


def test_large_batches_of_columns_are_the_same_as_single_ones() -> None:
    """Columns are processed in blocks."""
    torch.manual_seed(0)
    for layer in (nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.BatchNorm1d(64).eval(), nn.RMSNorm(64)):
        x = torch.randn(64, 64) if isinstance(layer, nn.RMSNorm) else torch.randn(64, 64, 64)
        call, rule = call_of(layer, x), rule_of(layer)
        mat = torch.randn(5, *x.shape)
        with torch.no_grad():
            for wrt in (0, "weight", "bias"):
                if wrt == "bias" and wrt not in call.params:
                    continue
                together = rule.jac_t_mat_prod(call, mat, wrt, sum_batch=False)
                apart = torch.cat([rule.jac_t_mat_prod(call, m[None], wrt, sum_batch=False) for m in mat])
                torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_results_may_overwrite_the_columns() -> None:
    torch.manual_seed(0)
    for layer in (nn.BatchNorm1d(3, affine=False).eval(), nn.GroupNorm(3, 3, affine=False)):
        call, rule = call_of(layer, torch.randn(2, 3, 4)), rule_of(layer)
        mat = torch.randn(5, 2, 3, 4)
        with torch.no_grad():
            expected = rule.jac_t_mat_prod(call, mat)
            call.spares = [mat.view(-1)]
            found = rule.jac_t_mat_prod(call, mat)
        assert found.data_ptr() == mat.data_ptr()
        torch.testing.assert_close(found, expected)


def test_lazy_layers_become_plain_ones() -> None:
    module = nn.LazyBatchNorm1d()
    module(torch.randn(3, 2))
    assert rule_of(module) is rule_of(nn.BatchNorm1d(2))


def test_missing_batch_axis_is_refused() -> None:
    module = nn.LayerNorm((3, 4))
    call, rule = call_of(module, torch.randn(3, 4)), rule_of(module)
    assert rule.obstacle(call) == "it mixes samples: its normalized_shape covers the batch axis"
    with pytest.raises(UnsupportedLayer, match="covers the batch axis"):
        rule.jac_t_mat_prod(call, torch.randn(1, 3, 4), "weight", sum_batch=False)
    unbatched = nn.InstanceNorm1d(3, affine=True)
    call = call_of(unbatched, torch.randn(3, 4))
    assert rule_of(unbatched).obstacle(call) == "its input has no batch axis"


# ---- batch statistics under extensions ---------------------------------------------------------------
def batch_norm_network() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    return model, nn.CrossEntropyLoss(), torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_some_samples_are_standardised_with_the_whole_batch() -> None:
    rows = {}
    for subsampling in (None, [3, 0]):
        model, lossfunc, x, y = batch_norm_network()
        model, lossfunc = bpk.extend(model), bpk.extend(lossfunc)
        with bpk.backpack(E.BatchGrad(subsampling=subsampling)):
            lossfunc(model(x), y).backward()
        rows[subsampling is None] = [p.grad_batch for p in model.parameters()]
        if subsampling is None:
            for p in model.parameters():
                torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
    for every, some in zip(rows[True], rows[False], strict=True):
        torch.testing.assert_close(some, every[[3, 0]])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_running_statistics_are_updated_once() -> None:
    model, lossfunc, x, y = batch_norm_network()
    plain, *_ = batch_norm_network()
    plain(x)
    model, lossfunc = bpk.extend(model), bpk.extend(lossfunc)
    with bpk.backpack(E.BatchGrad(), E.SumGradSquared()):
        lossfunc(model(x), y).backward()
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)
    torch.testing.assert_close(model[1].running_var, plain[1].running_var)


@pytest.mark.parametrize("extension", [E.BatchDiagGGNExact, E.BatchDiagHessian, E.KFAC, E.SqrtGGNMC])
def test_second_order_of_samples_is_refused_with_the_reason(extension: Any) -> None:
    model, lossfunc, x, y = batch_norm_network()
    model, lossfunc = bpk.extend(model), bpk.extend(lossfunc)
    with (
        pytest.raises(UnsupportedLayer, match="BatchNorm in training mode mixes samples"),
        bpk.backpack(extension()),
    ):
        lossfunc(model(x), y).backward()


# ---- steps in front -----------------------------------------------------------------------------------
class Normalised(nn.Module):
    """A normalisation between two layers, with steps behind the samples or in front of them."""

    def __init__(self, steps_in_front: bool) -> None:
        super().__init__()
        self.steps_in_front = steps_in_front
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4, eps=0.1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.steps_in_front else x
        x = self.last(self.norm(self.first(x)).tanh())
        return (x.transpose(0, 1) if self.steps_in_front else x).sum(1)


@pytest.mark.parametrize("quantity", [E.BatchGrad, E.DiagGGNExact])
@pytest.mark.parametrize("steps_in_front", [False, True])
def test_as_many_steps_as_samples(quantity: Any, steps_in_front: bool) -> None:
    """Each row is standardised by its own mean and deviation, whichever axis comes first."""
    torch.manual_seed(0)
    model, x, y = Normalised(steps_in_front).double(), torch.randn(5, 5, 3).double(), torch.randint(2, (5,))
    with torch.no_grad():
        for p in model.norm.parameters():
            p.normal_()
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, quantity())


# ---- functions in a model that is converted ----------------------------------------------------------
class Functional(nn.Module):
    """Every function without parameters of its own that the rules of this file serve."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = nn.functional.layer_norm(x, (4,)) + nn.functional.rms_norm(x, (4,), eps=0.1)
        x = nn.functional.group_norm(x, 2, eps=0.1) * nn.functional.normalize(x)
        return self.last(x) * nn.functional.cosine_similarity(x, 1 + x * x)[:, None]


def test_functions_are_converted() -> None:
    torch.manual_seed(0)
    model, x, y = Functional().double(), torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 1, 1])
    expected = model(x)
    params = list(model.parameters())
    model, lossfunc = bpk.extend(model, use_converter=True), bpk.extend(nn.CrossEntropyLoss())
    out = model(x)
    torch.testing.assert_close(out, expected)
    loss = lossfunc(out, y)
    first = torch.autograd.grad(loss, params, create_graph=True)
    diagonals = [
        torch.stack(
            [torch.autograd.grad(g, p, retain_graph=True)[0].flatten()[k] for k, g in enumerate(grad.flatten())]
        )
        for grad, p in zip(first, params, strict=True)
    ]
    kinds = {type(m) for m in model.modules()}
    assert {nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.CosineSimilarity} <= kinds
    with bpk.backpack(E.DiagHessian(), E.BatchGrad()):
        loss.backward()
    for p, diagonal in zip(model.parameters(), diagonals, strict=True):
        torch.testing.assert_close(p.diag_h.flatten(), diagonal)
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
