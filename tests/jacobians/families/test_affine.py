"""The families "weight times patches" and einsum: sizes at which the fast paths are taken, and corner cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.convolution import moments
from bpk.jacobians.core import cost, gemm, norms, numeric, squares
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.multilinear import Multilinear
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY

PARAMS = ("weight", "bias")
LARGE = [
    (lambda: nn.Conv2d(16, 32, 3), (3, 16, 12, 12)),
    (lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1, padding_mode="circular"), (3, 16, 20, 20)),
    (lambda: nn.Conv2d(32, 64, 3, padding=1), (3, 32, 4, 4)),
    (lambda: nn.Conv1d(32, 64, 4, padding="same"), (3, 32, 40)),
    (lambda: nn.ConvTranspose2d(32, 16, 3, stride=2), (3, 32, 6, 6)),
    (lambda: nn.Linear(200, 100), (3, 40, 200)),
    (lambda: nn.Linear(64, 64), (64, 2, 64)),
    (lambda: nn.Linear(400, 300), (5, 400)),
]


def prepare(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Rule, Call]:
    layer = layer.to(dtype)
    rule = REGISTRY.find(layer)
    assert rule is not None
    return rule, Call.of(layer, torch.randn(shape, dtype=dtype), params=PARAMS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("layer", "shape"), LARGE)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_fast_paths_equal_definitions(layer, shape, dtype: torch.dtype) -> None:
    rule, call = prepare(layer(), shape, dtype)
    mat = torch.randn(3, *call.output.shape, dtype=dtype)
    weights = torch.randn(3, shape[0], dtype=dtype)
    close = {"rtol": 1e-3, "atol": 2e-2} if dtype == torch.float32 else {}
    rows = Autodiff.jac_t_mat_prod(rule, call, mat, "weight", sum_batch=False)  # type: ignore[arg-type]
    squares = rows.square()
    weighted = squares * weights.reshape(*weights.shape, *(1,) * (rows.dim() - 2))
    patches = rule.patches(call)  # type: ignore[attr-defined]
    with torch.no_grad():
        got = rule.jac_t_mat_prod(call, mat, "weight", sum_batch=False)
        torch.testing.assert_close(got, rows, **close)
        torch.testing.assert_close(rule.squared_sum(call, mat, "weight"), squares.sum((0, 1)), **close)
        torch.testing.assert_close(rule.squared_sum(call, mat[:1], "weight"), squares[0].sum(0), **close)
        torch.testing.assert_close(rule.squared_sum(call, mat, "weight", weights), weighted.sum((0, 1)), **close)
        torch.testing.assert_close(rule.squared_sum(call, mat, "weight", weights, True), weighted.sum(0), **close)
        torch.testing.assert_close(rule.norm_squared(call, mat[0], "weight"), squares[0].flatten(1).sum(1), **close)
        moment = torch.einsum("ngit,ngjt->ij", patches, patches) / patches.shape[0]
        torch.testing.assert_close(rule.kron_input(call, "weight"), moment, **close)
        back = Autodiff.jac_t_mat_prod(rule, call, mat, 0)  # type: ignore[arg-type]
        torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, 0), back, **close)


MOMENTS = [
    (nn.Conv2d(16, 3, (5, 3), stride=(3, 2), dilation=(2, 1), padding=(4, 0)), (3, 16, 9, 8)),
    (nn.Conv2d(16, 3, (5, 3), stride=(2, 1), dilation=(2, 3), padding=(4, 3)), (3, 16, 9, 8)),
    (nn.Conv2d(16, 3, (5, 3)), (3, 16, 6, 3)),
    (nn.Conv2d(32, 3, (4, 1), stride=(4, 1)), (3, 32, 9, 3)),
    (nn.Conv3d(16, 2, (3, 2, 2)), (3, 16, 4, 4, 3)),
    (nn.Conv1d(40, 3, 3, dilation=2, stride=3, padding=2, padding_mode="circular"), (2, 40, 13)),
]


@pytest.mark.parametrize("shared", (True, False))
@pytest.mark.parametrize(("layer", "shape"), MOMENTS, ids=[str(layer) for layer, _ in MOMENTS])
def test_moment_of_patches_with_shared_rows(
    layer: nn.Module, shape: tuple[int, ...], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "ASSEMBLING", (-1 if shared else 1) << 40)
    monkeypatch.setattr(numeric, "CACHE", 1 << 10)  # one sample at a time
    rule, call = prepare(layer, shape, torch.float64)
    patches = rule.patches(call)  # type: ignore[attr-defined]
    with torch.no_grad():
        moment = rule.kron_input(call, "weight")
    torch.testing.assert_close(moment, torch.einsum("ngit,ngjt->ij", patches, patches) / shape[0])
    rule, call = prepare(layer, shape, torch.bfloat16)
    with torch.no_grad():
        assert rule.kron_input(call, "weight").dtype is torch.bfloat16


@pytest.mark.parametrize("padding", [np.int64(1), (1,)], ids=["of numpy", "in a tuple"])
def test_padding_that_is_one_number(padding: object) -> None:
    layer = nn.Conv2d(2, 3, 3)
    layer.padding = padding  # type: ignore[assignment]
    rule, call = prepare(layer, (2, 2, 4, 5), torch.float64)
    mat = torch.randn(1, *call.output.shape, dtype=torch.float64)
    back = Autodiff.jac_t_mat_prod(rule, call, mat, 0)  # type: ignore[arg-type]
    torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, 0), back)


def test_transposed_convolution_with_chosen_output_size() -> None:
    layer = nn.ConvTranspose2d(2, 3, 3, stride=3, padding=1).double()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    out = layer(x, output_size=[9, 8])
    rule = REGISTRY.find(layer)
    assert rule is not None
    call = Call(layer, [x.detach()], dict(layer.named_parameters()), out.detach())
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, [x, layer.weight, layer.bias], grad_out)
    for wrt, grad in zip((0, *PARAMS), expected, strict=True):
        torch.testing.assert_close(rule.jac_t_mat_prod(call, grad_out[None], wrt)[0], grad)
    each = rule.jac_t_mat_prod(call, grad_out[None], "weight", sum_batch=False)[0]
    torch.testing.assert_close(each.sum(0), expected[1])


def test_quantities_behind_a_chosen_output_size() -> None:
    """By place or by name, it is no option that the rule lacks: the output has it."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.ConvTranspose1d(2, 2, 2, stride=3), nn.ConvTranspose1d(2, 1, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(input=self.first(x, [6]).sigmoid(), output_size=(13,))

    quantities = E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.HMP()
    found = bpk.verify(Decoder(), nn.MSELoss(), torch.randn(3, 2, 2), torch.randn(3, 1, 13), *quantities)
    assert found.summary() == "16 ok"


@pytest.mark.parametrize(
    ("size", "pairs"),
    [
        (cost.Size(v=1, n=64, g=1, o=64, i=64, t=8), False),
        (cost.Size(v=10, n=16, g=1, o=768, i=192, t=65), False),
        (cost.Size(v=100, n=16, g=1, o=192, i=192, t=4), True),
        (cost.Size(v=10, n=16, g=1, o=500, i=100, t=2), True),
        (cost.Size(v=320, n=16, g=1, o=512, i=512, t=8), True),
    ],
    ids=str,
)
def test_the_cheaper_way_to_squares(size: cost.Size, pairs: bool) -> None:
    """Where one way takes less than two thirds of the other's time, whatever else runs."""
    assert (cost.by_pairs(size) < cost.by_columns(size)) is pairs


@pytest.mark.parametrize("positions_first", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 1, 4, 5, 2), (5, 2, 3, 4, 6, 4), (3, 2, 1, 300, 150, 4), (3, 2, 2, 1, 1, 3)])
@torch.no_grad()
def test_both_ways_to_squares(shape: tuple[int, ...], positions_first: bool) -> None:
    v, n, g, o, i, t = shape
    m, a = torch.randn(v, n, g, o, t, dtype=torch.float64), torch.randn(n, g, i, t, dtype=torch.float64)
    if positions_first:
        m, a = (x.mT.contiguous().mT for x in (m, a))
    rows = torch.einsum("vngot,ngit->vngoi", m, a).square()
    signs = torch.randn(v, n, dtype=torch.float64)
    for way, weights, step in itertools.product((squares.by_columns, squares.by_pairs), (None, signs), (v, 2)):
        expected = rows if weights is None else rows * weights[..., None, None, None]
        for keep in (False, True):
            found = way(lambda part: a[part], m.split(step), i, weights, keep, lambda size, like: like.new_empty(size))
            torch.testing.assert_close(found, expected.sum(0) if keep else expected.sum((0, 1)))
    for norm in (norms.norm_by_rows, norms.norm_by_grams):
        torch.testing.assert_close(norm(a, m[0]), rows[0].sum((1, 2, 3)))


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_positions_that_cancel(groups: int) -> None:
    """Gradients that add up to zero over positions, as behind a normalisation, of inputs that hardly differ."""
    torch.manual_seed(0)
    m, a = torch.randn(3, 5, groups, 8, 4), torch.randn(5, groups, 6, 4) + 300
    m, a[2] = m - m.mean(-1, keepdim=True), 300.0
    rows = torch.einsum("vngot,ngit->vngoi", m.double(), a.double()).square()
    found = norms.norm_by_grams(a, m[0])
    torch.testing.assert_close(found, rows[0].sum((1, 2, 3)).float(), rtol=1e-4, atol=1e-3)
    assert bool((found >= 0).all())
    given = (lambda part: a[part], [m], 6, None)
    assert squares.by_pairs(*given, True, gemm.fresh) is None
    for keep in (False, True):
        total = squares.squared_sum(*given, keep, gemm.fresh)
        torch.testing.assert_close(total, rows.sum(0 if keep else (0, 1)).float(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("layer", "shape"), LARGE[:1] + LARGE[4:])
def test_nan_stays_in_its_sample(layer, shape) -> None:
    rule, call = prepare(layer(), shape, torch.float32)
    call.inputs[0][1] = torch.nan
    mat = torch.randn(2, *call.output.shape)
    with torch.no_grad():
        for rows in (
            rule.jac_t_mat_prod(call, mat, "weight", sum_batch=False)[0],
            rule.squared_sum(call, mat, "weight", None, True),
            rule.norm_squared(call, mat[0], "weight")[:, None],
        ):
            assert rows.flatten(1).isnan().any(1).tolist() == [n == 1 for n in range(shape[0])]


@pytest.mark.parametrize(("layer", "shape"), [LARGE[0], LARGE[4], LARGE[5]])
def test_products_are_differentiable(layer, shape) -> None:
    rule, call = prepare(layer(), (2, *shape[1:]), torch.float64)
    x = call.inputs[0].clone().requires_grad_()
    live = Call(call.options, [x], call.params, call.output)
    mat = torch.randn(1, *call.output.shape, dtype=torch.float64)
    got = torch.autograd.grad(rule.squared_sum(live, mat, "weight").sum(), x)[0]
    rows = Autodiff.jac_t_mat_prod(rule, live, mat, "weight", sum_batch=False)  # type: ignore[arg-type]
    torch.testing.assert_close(got, torch.autograd.grad(rows.square().sum(), x)[0])
    norms = rule.norm_squared(live, mat[0], "weight").sum()
    torch.testing.assert_close(torch.autograd.grad(norms, x)[0], got)


class Mixer(nn.Module):
    """A layer that torch lacks: `out[n, t, o] = sum_ai V[o, a] W[a, i] x[n, t, i] + b[o]`."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(5, 4))
        self.right = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nti,ai,oa->nto", x, self.right, self.left) + self.bias


def test_multilinear_follows_from_its_pattern() -> None:
    rule = Multilinear("n t i, a i, o a -> n t o", Mixer, params=("right", "left"), bias="bias")
    layer = Mixer().double()
    call = Call.of(layer, torch.randn(2, 6, 3, dtype=torch.float64), params=rule.params)
    generic = Autodiff(Mixer)
    mat = torch.randn(2, *call.output.shape, dtype=torch.float64)
    torch.testing.assert_close(rule.forward(layer, call.inputs, call.params), call.output)
    for wrt in (0, *rule.params):
        tangents = torch.randn(2, *call.shape_of(wrt), dtype=torch.float64)
        torch.testing.assert_close(rule.jac_mat_prod(call, tangents, wrt), generic.jac_mat_prod(call, tangents, wrt))
        torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, wrt), generic.jac_t_mat_prod(call, mat, wrt))
    for name in rule.params:
        expected = generic.squared_sum(call, mat, name, None, True)
        torch.testing.assert_close(rule.squared_sum(call, mat, name, None, True), expected)
    joint = {w: torch.randn(2, *call.shape_of(w), dtype=torch.float64) for w in (0, *rule.params)}
    expected_joint = generic.residual_mat_prod(call, mat[0], joint)
    for wrt, value in rule.residual_mat_prod(call, mat[0], joint).items():
        torch.testing.assert_close(value, expected_joint[wrt])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("n i o", "it needs '->'"),
        ("n i, n o i -> n o", "a parameter has the batch axis 'n'"),
        ("i n, o i -> n o", "the batch axis 'n' must come first"),
        ("n i i, o i -> n o", "repeats an axis"),
        ("n i, o i -> n q", "axis 'q' of the output is in no operand"),
    ],
)
def test_pattern_errors_say_why(pattern: str, reason: str) -> None:
    with pytest.raises(RuleError, match=reason):
        Multilinear(pattern, Mixer, params=("weight",))


def test_misfit_names_pattern_shapes_and_lengths() -> None:
    rule = Multilinear("n t i, o i -> n t o", Mixer, params=("weight",))
    with pytest.raises(RuleError) as error:
        rule.forward(None, [torch.ones(2, 3, 4)], {"weight": torch.ones(5, 6)})
    for part in (
        "'n t i, o i -> n t o'",
        "[2, 3, 4], [5, 6]",
        "'i' is 4 long in input 0 and 6 long in parameter 'weight'",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("param", ["weight", "bias"])
@torch.no_grad()
def test_no_columns_have_no_squares(param: str, per_sample: bool) -> None:
    for layer in (nn.Linear(3, 2), nn.LayerNorm(3)):
        rule, call = REGISTRY.find(layer), Call.of(layer, torch.randn(4, 3), params=("weight", "bias"))
        assert rule is not None
        found = rule.squared_sum(call, torch.zeros(0, *call.output.shape), param, per_sample=per_sample)
        assert torch.equal(found, torch.zeros(*[4] * per_sample, *call.shape_of(param)))


@torch.no_grad()
@pytest.mark.parametrize("views", [False, True])
def test_many_small_columns_are_multiplied_together(views: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "products", lambda *args, **options: pytest.fail("one after the other"))
    torch.manual_seed(0)
    m, patches = torch.randn(50, 6, 2, 4, 3).double(), torch.randn(6, 2, 5, 3).double()
    found = gemm.per_sample(lambda part: patches[part], m, 5, gemm.fresh, views)
    torch.testing.assert_close(found, torch.einsum("vngot,ngit->vngoi", m, patches))
