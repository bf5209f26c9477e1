"""Work that is split to save memory gives what is computed at once: with limits so low that everything is split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.fields import rows
from bpk.jacobians.attention import layer as attention_layer
from bpk.jacobians.attention.weights import LinearInside
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.convolution import moments
from bpk.jacobians.core import cost, numeric, squares
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.families import autodiff, linear_map, standardize
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.recurrent import columns as recurrent_columns
from bpk.jacobians.recurrent.recurrent import Recurrent
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order import structure
from bpk.rules import REGISTRY
from bpk.sweeps.columns import run
from tests.models.networks import Network, all_networks
from tests.rules.test_rules import readable

LIMITS = (
    (attention_layer, "PIECE"),
    (attention_layer, "KEPT"),
    (autodiff, "BLOCK"),
    (cost, "CACHE"),
    (linear_map, "BLOCK"),
    (moments, "LARGEST"),
    (numeric, "CACHE"),
    (squares, "CACHE"),
    (recurrent_columns, "COLUMNS"),
    (recurrent_columns, "KEEP"),
    (standardize, "BLOCK"),
    (structure, "AT_ONCE"),
)
"""How many numbers families of rules hold at a time."""

LAYERS = [(rule, example) for rule in REGISTRY if not isinstance(rule, Loss) for example in rule.examples]
GENERIC = [(r, e) for r, e in LAYERS if r.params and not e.train and not isinstance(r, LinearInside | Recurrent)]
"""Layers with parameters, whose first axis is that of samples."""


def named(pairs: list[tuple[Rule, Example]]) -> list[object]:
    return [pytest.param(rule, example, id=readable(f"{rule.name}-{example}")) for rule, example in pairs]


def results(rule: Rule, example: Example) -> Iterator[tuple[str, Tensor]]:
    """All products and shortcuts of a call."""
    torch.manual_seed(0)
    call = Call.of(example.build().double(), *example.inputs(), params=rule.params_of(example.build()), rule=rule)
    rule.capture(call)
    n, out = call.batch_size, call.output
    mat, weights = rand(5, *out.shape), rand(5, n)
    wrts = [k for k, x in enumerate(call.inputs) if x.is_floating_point()]
    for wrt in (*wrts, *call.params):
        yield f"J^T M of {wrt}", rule.jac_t_mat_prod(call, mat, wrt)
        yield f"J M of {wrt}", rule.jac_mat_prod(call, rand(3, *call.shape_of(wrt)), wrt)
    for name in call.params:
        yield f"rows of {name}", rule.jac_t_mat_prod(call, mat, name, sum_batch=False)
        yield f"norms of {name}", rule.norm_squared(call, mat[0], name)
        for per_sample in (False, True):
            yield f"squares of {name}", rule.squared_sum(call, mat, name, weights, per_sample)
            together = rule.squared_sum_of_blocks(call, mat.split(2), name, weights, per_sample)
            if together is not None:
                yield f"squares of blocks of {name}", together
    if rule.obstacle(call) is not None:
        return
    for name in call.params:
        yield f"G of {name}", rule.kron_output(call, mat, name)
        factor = rule.kron_input(call, name)
        if factor is not None:
            yield f"A of {name}", factor.to_dense() if factor.is_sparse else factor
    matrix = rand(out[0].numel(), out[0].numel())
    for wrt in (*wrts[:1], *call.params):
        yield f"congruence of {wrt}", rule.congruence(call, matrix + matrix.T, wrt)
        mats = {wrt: rand(3, *call.shape_of(wrt))}
        yield f"residual of {wrt}", rule.residual_mat_prod(call, mat[0], mats)[wrt]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(("rule", "example"), named(LAYERS))
@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_families(rule: Rule, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(results(rule, example))
    for numbers in (1, 100):  # one thing at a time, or a few and a smaller rest
        with monkeypatch.context() as low:
            for module, name in LIMITS:
                low.setattr(module, name, numbers)
            found = list(results(rule, example))
        for (what, value), (_, wanted) in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize(("rule", "example"), named(GENERIC))
@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_generic_way(rule: Rule, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's rows lie in memory in one order or another, depending on how many columns it was given."""
    torch.manual_seed(0)
    module = example.build().double()
    generic = Autodiff(type(module), params=tuple(rule.params_of(module)))
    call = Call.of(module, *example.inputs(), params=generic.params, rule=generic)
    mat, weights = rand(5, *call.output.shape), rand(5, call.batch_size)
    for name, p in call.params.items():
        for per_sample in (False, True):
            expected = Rule.squared_sum(generic, call, mat, name, weights, per_sample)
            for step in (1, 2, 3):  # five columns: the last block has one, one or two
                monkeypatch.setattr(autodiff, "BLOCK", 4 * step * call.batch_size * p.numel())
                found = generic.squared_sum(call, mat, name, weights, per_sample)
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv3d(4, 2, 3, padding=1), (4, 6, 5)),
        (nn.Conv3d(4, 2, (2, 3, 3), stride=(1, 2, 3), dilation=(2, 1, 1), padding=(0, 1, 2)), (6, 7, 8)),
        (nn.Conv2d(12, 2, (2, 3), stride=2, dilation=(1, 2), padding=1), (5, 9)),
        (nn.Conv2d(12, 2, 3, padding="same", padding_mode="reflect"), (5, 6)),
    ],
    ids=str,
)
@torch.no_grad()
def test_factors_in_strips(layer: nn.Module, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that is too large is looked at in strips of positions, which together see each position once."""
    torch.manual_seed(0)
    layer, rule = layer.double(), REGISTRY.find(layer)
    assert rule is not None
    call = Call.of(layer, rand(2, layer.in_channels, *size), params=("weight",), rule=rule)
    patches = rule.patches(call)[:, 0].transpose(1, 2).flatten(0, 1)
    expected = patches.T @ patches / 2
    cuts: list[int] = []
    lines = moments._lines
    monkeypatch.setattr(moments, "ASSEMBLING", -1 << 40)
    monkeypatch.setattr(moments, "_lines", lambda x, *rest: cuts.append(x.shape[3]) or lines(x, *rest))
    for largest in (1, 3000, 1 << 24):
        cuts.clear()
        monkeypatch.setattr(moments, "LARGEST", largest)
        torch.testing.assert_close(rule.kron_input(call, "weight"), expected)
        assert (len(cuts) > 2) is (largest < 1 << 24) or largest == 3000


SUMS = (E.DiagGGNExact, E.BatchDiagGGNExact, E.KFLR)


def fields(net: Network, **limits: int) -> dict[str, Tensor]:
    """What sums over columns give, for a network."""
    model, lossfunc, x, targets = net.build()
    model, lossfunc = bpk.extend(model), bpk.extend(lossfunc)
    torch.manual_seed(0)
    loss = net.loss_of(lossfunc, targets)(model(x))
    with bpk.backpack(*[e() for e in SUMS], **limits):
        loss.backward()
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found |= {f"{name}.{field}": getattr(p, field) for field in ("diag_ggn_exact", "diag_ggn_exact_batch")}
            found |= {f"{name}.kflr.{k}": factor for k, factor in enumerate(p.kflr)}
    return found


@pytest.mark.parametrize("net", all_networks(), ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rounds(net: Network) -> None:
    try:
        expected = fields(net)
    except NotImplementedError:
        return  # refused: `test_matrix.py` says where
    for size in (1, 2):
        found = fields(net, chunk_size=size)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


class OneOrder(Autodiff):
    """Takes the first block's order in memory for that of all."""

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        squares = super().squared_sum(call, mat, param, weights, per_sample)
        return squares.mT if squares.dim() == 2 and not mat.is_contiguous() and not per_sample else squares


def test_check_rule_gives_columns_in_blocks() -> None:
    with pytest.raises(RuleError, match="all columns at once"):
        check_rule(OneOrder(nn.Linear, params=("weight", "bias")), [case(nn.Linear, 3, 3, shape=(2, 3))])


def test_rows_of_several_blocks_can_be_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bpk.extend(nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 4)).double())
    x, targets = rand(3, 6).requires_grad_(), torch.tensor([0, 3, 1])

    def slopes() -> list[Tensor]:
        with bpk.backpack(E.SqrtGGNExact()):
            bpk.extend(nn.CrossEntropyLoss())(model(x), targets).backward(create_graph=True)
        total = sum(p.sqrt_ggn_exact.square().square().sum() for p in model.parameters())
        return list(torch.autograd.grad(total, (x, *model.parameters()), allow_unused=True))

    expected = slopes()
    for module in (rows, run):
        monkeypatch.setattr(module, "PIECE", 1)
    torch.testing.assert_close(slopes(), expected)


class Same(E.DiagGGNExact):  # type: ignore[misc]
    """The same quantity in a field of its own: both are made of one tensor."""

    field = "same"


@pytest.mark.parametrize("layers", ([nn.Linear(6, 4)], [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)]))
def test_two_quantities_of_one_tensor_are_summed_apart(layers: list[nn.Module]) -> None:
    """Sums over runs of columns overwrite their first term, which nobody else may hold."""
    model, lossfunc = bpk.extend(nn.Sequential(*layers).double()), bpk.extend(nn.CrossEntropyLoss())
    x, targets = rand(3, 6), torch.tensor([0, 3, 1])
    with bpk.backpack(E.DiagGGNExact()):
        lossfunc(model(x), targets).backward()
    expected = [p.diag_ggn_exact.clone() for p in model.parameters()]
    with bpk.backpack(E.DiagGGNExact(), Same(), chunk_size=1):
        lossfunc(model(x), targets).backward()
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, value)
        torch.testing.assert_close(p.same, value)
