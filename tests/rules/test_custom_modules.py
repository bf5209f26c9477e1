"""Custom modules: generated classes are ordinary modules, and branches made of them work in every extension."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.custom_module.branching import Parallel, SumModule
from bpk.custom_module.concat import Concat
from bpk.custom_module.matmul import MatMul
from bpk.custom_module.pad import Pad
from bpk.custom_module.permute import Permute
from bpk.custom_module.product import Maximum, Minimum, Product, Quotient
from bpk.custom_module.reduce_tuple import ReduceTuple
from bpk.custom_module.reduction import Mean
from bpk.custom_module.scale_module import ScaleModule, Shift
from bpk.custom_module.shape import Unsqueeze
from bpk.custom_module.slicing import Slicing
from bpk.custom_module.split import Chunk, Unbind
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.generated import HOME, Generated
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.families.elementwise import Elementwise
from bpk.rules import REGISTRY
from tests.bpk.test_matrix import ROWS, SEED, Row, close, refused_or_finite, run
from tests.models.networks import CLASSES, N, Network
from tests.references.reference import Reference


# ---- generated classes ---------------------------------------------------------------------------------
def generated() -> Iterator[Any]:
    for rule in REGISTRY:
        for module in rule.modules:
            if issubclass(module, Generated):
                yield pytest.param(module, rule.examples, id=module.__name__)


CLASSES_AND_EXAMPLES = list(generated())


@pytest.mark.parametrize(("module", "examples"), CLASSES_AND_EXAMPLES)
def test_generated_class_is_ordinary(module: type[nn.Module], examples: tuple[Example, ...]) -> None:
    assert getattr(importlib.import_module(module.__module__), module.__name__) is module
    assert module.__module__.startswith(HOME) and module.__doc__
    assert "args" not in inspect.signature(module).parameters
    for example in examples:
        layer = example.build().double()
        if not isinstance(layer, module):
            continue
        inputs = example.inputs()
        expected = tensors_in(layer(*inputs))
        for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            assert type(twin) is module and repr(twin) == repr(layer)
            for found, value in zip(tensors_in(twin(*inputs)), expected, strict=True):
                assert torch.equal(found, value)
        assert layer.state_dict() == {}
        extended = bpk.extend(copy.deepcopy(layer))
        extended(*inputs)
        pickle.loads(pickle.dumps(extended))


def test_signatures_and_representations() -> None:
    assert str(inspect.signature(Permute)) == "(*dims: 'int', init_transpose: 'bool' = False)"
    assert str(inspect.signature(ScaleModule)).startswith("(weight: 'float | Tensor' = 1.0)")
    shown = [ReduceTuple(), ReduceTuple(1), Permute(0, 2, 1), SumModule(), ScaleModule(2.0), Pad((1, 2), value=3.0)]
    assert [repr(m) for m in shown] == [
        "ReduceTuple()",
        "ReduceTuple(index=1)",
        "Permute(0, 2, 1)",
        "SumModule()",
        "ScaleModule(weight=2.0)",
        "Pad((1, 2), value=3.0)",
    ]
    with pytest.raises(TypeError, match="unexpected keyword"):
        ReduceTuple(number=1)
    with pytest.raises(TypeError, match="missing"):
        Slicing()


def test_constants_move_with_the_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), ScaleModule(torch.tensor([1.0, 2.0])), Shift(torch.ones(2)))
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    model.double()
    assert model(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64


def test_a_rule_from_outside_gets_its_module() -> None:
    def softer(x: Tensor) -> Tensor:
        return x / (1 + x.abs())

    rule = Elementwise("x/(1 + abs(x))", functions=(softer,))
    bpk.register(rule)
    try:
        assert bpk.check_rule(rule).checks
        module = importlib.import_module("bpk.custom_module.elementwise").Softer()
        assert torch.equal(pickle.loads(pickle.dumps(module))(torch.ones(2)), torch.full((2,), 0.5))
    finally:
        bpk.unregister(rule)


# ---- what they do ----------------------------------------------------------------------------------------
def test_values() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(Permute(0, 2, 1)(x), x.permute(0, 2, 1))
    assert torch.equal(Permute(1, 2, init_transpose=True)(x), x.transpose(1, 2))
    assert torch.equal(Slicing((slice(None), -1))(x), x[:, -1])
    assert torch.equal(ReduceTuple(1)((x, 2 * x)), 2 * x)
    assert torch.equal(ScaleModule(0.5)(x), x / 2)
    assert torch.equal(SumModule()(x, x, x), x + x + x)
    assert torch.equal(Pad((1, 1), value=2.0)(x), nn.functional.pad(x, (1, 1), value=2.0))


@pytest.mark.parametrize(
    "move",
    [lambda: Permute(1, 0, 2), lambda: Permute(0, 1, init_transpose=True), lambda: Permute(-3, 1, init_transpose=True)],
)
def test_permute_leaves_the_batch_axis(move: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"(?s)moves the batch axis.*Why:.*Do:"):
        move()(torch.randn(2, 3, 4))


EVERY = slice(None)
MOVED = [(EVERY, [0, 1], EVERY, [0, 1]), (..., [0, 1], EVERY, torch.tensor([0, 1])), (EVERY, [0], None, [0, 1])]


@pytest.mark.parametrize("index", [0, slice(1, 2), (None, EVERY), ([0, 1],), *MOVED], ids=str)
def test_slicing_leaves_the_batch_axis(index: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)does not leave the batch axis whole.*Why:.*Do:"):
        Slicing(index)(torch.randn(2, 3, 4, 4))


@pytest.mark.parametrize("row", [0, torch.tensor(0)], ids=str)
def test_slicing_with_lists_beside_numbers(row: Any) -> None:
    """Numbers pick first, so that they keep no lists apart."""
    x = torch.randn(5, 3, 4, 4)
    for index in ((EVERY, row, EVERY, [0, 1]), (EVERY, [0, 1], row, [2, 3]), (..., [0, 1], [2, 3])):
        assert torch.equal(Slicing(index)(x), x[index])
        assert len(x[index]) == len(x)


class Gated(nn.Module):
    """Branches that add numbers of no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(3, 2), SumModule()
        self.first, self.second = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.add(self.first.sin(), self.second)


@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_numbers_without_axes_are_added() -> None:
    torch.manual_seed(0)
    model, lossfunc = bpk.extend(Gated()), bpk.extend(nn.MSELoss())
    extensions = bpk.extensions.BatchGrad(), bpk.extensions.DiagGGNExact()
    assert bpk.verify(model, lossfunc, torch.randn(4, 3), torch.randn(4, 2), *extensions).ok


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_a_sample_that_is_not_finite_is_no_mixture(bad: float) -> None:
    """A converted function of a parameter is compared with what the first sample alone gives."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.shift)

    model, lossfunc = bpk.extend(Shifted(), use_converter=True), bpk.extend(nn.MSELoss())
    x = torch.randn(4, 3)
    x[0] = bad
    with bpk.backpack(bpk.extensions.BatchGrad()):
        lossfunc(model(x), torch.randn(4, 2)).backward()
    assert all(param.grad_batch[1:].isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(("module", "swapped"), [(Maximum, False), (Minimum, True)])
def test_extrema_of_what_is_no_number(module: type[nn.Module], swapped: bool) -> None:
    x, y = torch.tensor([[torch.nan, 1.0, 2.0, 3.0]]), torch.tensor([[0.0, torch.nan, 2.0, 4.0]])
    call, mat = Call.of(module(), x, y), torch.ones(1, 1, 4)
    of_x, of_y = (REGISTRY.find(module).jac_t_mat_prod(call, mat, wrt).tolist() for wrt in (0, 1))  # type: ignore[union-attr]
    expected = [[[1.0, 1.0, 0.5, 0.0]]], [[[1.0, 1.0, 0.5, 1.0]]]
    assert (of_y, of_x) == expected if swapped else (of_x, of_y) == expected


def test_parallel() -> None:
    model = nn.Sequential(
        nn.Linear(3, 2),
        nn.ReLU(),
        Parallel(nn.Identity(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), merge_module=SumModule()),
    )
    names = [name for name, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias", "2.branch.1.0.weight", "2.branch.1.0.bias"]
    x = torch.randn(4, 3)
    h = model[1](model[0](x))
    assert torch.equal(model(x), h + model[2].branch[1](h))
    assert torch.equal(Parallel(nn.Identity(), nn.Identity())(x), 2 * x)
    assert repr(pickle.loads(pickle.dumps(model))) == repr(model)


# ---- branches in every extension -------------------------------------------------------------------------
class Attention(nn.Module):
    """`softmax(q k^T) v` from custom modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.chunk, self.pick = (
            nn.Linear(2, 6),
            Chunk(3, dim=-1),
            nn.ModuleList(ReduceTuple(k) for k in range(3)),
        )
        self.turn, self.scores, self.scale = Permute(0, 2, 1), MatMul(), ScaleModule(0.7)
        self.softmax, self.mix, self.mean, self.last = nn.Softmax(-1), MatMul(), Mean(1), nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.chunk(self.embed(x))
        q, k, v = (pick(parts) for pick in self.pick)
        weights = self.softmax(self.scale(self.scores(q, self.turn(k))))
        return self.last(self.mean(self.mix(weights, v)))


class Gate(nn.Module):
    """Two halves of a hidden layer, one of which gates the other; a residual connection with broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.halves = nn.Linear(3, 4), Unbind(1)
        self.reshape = nn.Unflatten(1, (2, 2))
        self.left, self.right, self.sigmoid = ReduceTuple(0), ReduceTuple(-1), nn.Sigmoid()
        self.product, self.sum, self.last = Product(), SumModule((1.0, -2.0)), nn.Linear(2, CLASSES)
        self.narrow = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.halves(self.reshape(self.first(x)))
        left, right = self.left(parts), self.right(parts)
        gated = self.product(left, self.sigmoid(right))
        return self.last(self.sum(gated, self.narrow(left)))


class Scalars(nn.Module):
    """Several results of one number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unbind, self.product = nn.Linear(3, 2), Unbind(1), Product()
        self.left, self.right, self.column = ReduceTuple(0), ReduceTuple(1), Unsqueeze(1)
        self.last = nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.unbind(self.first(x))
        return self.last(self.column(self.product(self.left(parts), self.right(parts))))


class Shared(nn.Module):
    """Operands that all samples share: positions that are added, a mask that multiplies, keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.add, self.mask, self.scores = nn.Linear(2, 2), SumModule(), Product(), MatMul()
        self.register_buffer("fixed", torch.tensor([[0.5, -1.0], [1.0, 2.0], [0.0, 1.0]]))
        self.mean, self.last = Mean(1), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mask(self.add(self.first(x), self.fixed), self.fixed[None])
        return self.last(self.mean(self.scores(h, self.fixed.T)))


def branches(merge: Callable[[], nn.Module], width: int = 3) -> Callable[[], nn.Module]:
    """Two branches and how they meet."""

    def make() -> nn.Module:
        left = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        right = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Softplus())
        return nn.Sequential(nn.Linear(3, 3), Parallel(left, right, merge_module=merge()), nn.Linear(width, CLASSES))

    return make


def residual() -> nn.Module:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    block = Parallel(nn.Identity(), inner, ScaleModule(0.3), merge_module=SumModule())
    return nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), block, nn.Linear(3, CLASSES))


def network(name: str, model: Callable[[], nn.Module], *shape: int) -> Network:
    def make() -> tuple[nn.Module, nn.Module, Tensor, tuple[Tensor, ...]]:
        built = model().double()
        x = torch.randn(N, *shape, dtype=torch.float64)
        return built, nn.CrossEntropyLoss(), x, (torch.randint(CLASSES, (N,)),)

    return Network(name, make, sequential=False)


BRANCHES = [
    network("residual", residual, 3),
    network("sum", branches(SumModule), 3),
    network("difference", branches(lambda: SumModule((1.0, -0.5))), 3),
    network("concat", branches(Concat, 6), 3),
    network("product", branches(Product), 3),
    network("quotient", branches(Quotient), 3),
    network("maximum", branches(Maximum), 3),
    network("gate", Gate, 3),
    network("scalars", Scalars, 3),
    network("attention", Attention, 3, 2),
    network("shared", Shared, 3, 2),
]


@lru_cache(maxsize=2)
def reference(name: str) -> Reference:
    net = next(n for n in BRANCHES if n.name == name)
    model, lossfunc, x, targets = net.build()
    return Reference(model, (x,), net.loss_of(lossfunc, targets), seed=SEED)


@pytest.mark.parametrize(("net", "row"), [pytest.param(n, r, id=f"{n}-{r.title}") for n in BRANCHES for r in ROWS])
def test_branches(net: Network, row: Row) -> None:
    if row.by_layers:
        refused_or_finite(net, row)
        return
    model = run(net, row.make())
    if row.chain_only:  # compared on chains; here it has to be a symmetric, finite product
        for param in model.parameters():
            assert torch.isfinite(getattr(param, row.field)(torch.ones_like(param)[None])).all()
        return
    for name, param in model.named_parameters():
        row.check(reference(net.name), name, getattr(param, row.field))
        assert param.grad is not None
        close(param.grad, reference(net.name).grad(name), f"{name}.grad")
