"""Options that are of another kind than asked for are refused in words; whole numbers of numpy's are whole numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bpk
from bpk import extensions as E
from bpk import operators
from bpk import preconditioners as P
from bpk.extensions.firstorder.grad_axes import AxisGram
from bpk.extensions.firstorder.projected_grad import ProjectedGrad
from bpk.extensions.secondorder.batch_kfac import BatchKFLR

LOSS = nn.CrossEntropyLoss()


def words(x: object) -> str:
    """What a test is called by; functions have an address in their name, which differs between workers."""
    return re.sub(" at 0x[0-9a-f]+", "", str(x))[:30]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 5), torch.arange(4) % 3), (torch.randn(2, 5), torch.arange(2) % 3)]


ACCUMULATE: list[tuple[dict[str, Any], str]] = [
    ({"autocast": "bfloat16"}, r"autocast='bfloat16'(?s:.*)pass autocast=torch\.bfloat16"),
    ({"autocast": True}, "autocast=True(?s:.*)the type to compute in"),
    ({"autocast": torch.int32}, r"autocast=torch\.int32"),
    ({"device": "foo"}, "device='foo'(?s:.*)batches are moved there"),
    ({"device": 3.5}, "device=3.5(?s:.*)batches are moved there"),
    ({"step": 3}, "step=3(?s:.*)pass step=lambda"),
    ({"callback": 3}, "callback=3(?s:.*)pass callback=lambda"),
    ({"per_sample": 3}, "per_sample=3(?s:.*)or into a folder"),
    ({"checkpoint": 3}, "checkpoint=3(?s:.*)is a file"),
    ({"timeout": "a"}, "timeout='a'(?s:.*)seconds"),
    ({"divisor": lambda batch: None}, "returned None for batch 0(?s:.*)return a number"),
    ({"divisor": lambda batch: "a"}, "returned 'a' for batch 0"),
]


@pytest.mark.parametrize(("options", "message"), ACCUMULATE, ids=words)
def test_options_of_accumulate(options: dict[str, Any], message: str) -> None:
    """Errors of torch's and of Python's, or none."""
    with pytest.raises((TypeError, ValueError), match=message):
        bpk.accumulate(nn.Linear(5, 3), LOSS, batches(), E.KFAC(), **options)


def test_a_loader_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"NoneType as loader(?s:.*)a single one as"):
        bpk.accumulate(nn.Linear(5, 3), LOSS, None, E.KFAC())  # type: ignore[arg-type]


NUMBER = np.int64(4)
WHOLE: dict[str, Callable[[], Any]] = {
    "chunk_size": lambda: bpk.backpack(chunk_size=NUMBER, memory=NUMBER),
    "mc_samples": lambda: E.KFAC(mc_samples=NUMBER),
    "max_size": lambda: AxisGram(max_size=NUMBER),
    "k": lambda: ProjectedGrad(k=NUMBER, kind="factored"),
    "pair": lambda: ProjectedGrad(k=(NUMBER, NUMBER), kind="factored"),
    "every": lambda: bpk.accumulate(nn.Linear(5, 3), LOSS, batches(), every=NUMBER, chunk_size=NUMBER),
    "operator": lambda: bpk.operators.Fisher(nn.Linear(5, 3), LOSS, batches(), NUMBER, NUMBER, chunk_size=NUMBER),
    "taylor": lambda: bpk.taylor(nn.Tanh(), torch.ones(2, 3), torch.ones(2, 3), order=NUMBER),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_whole_numbers_of_numpy(make: Callable[[], Any]) -> None:
    make()


def test_seeds_of_numpy_are_the_same_seeds() -> None:
    """Another matrix, without a word: the key of its generator was written with the type of the number."""
    model, loss_fn = bpk.extend(nn.Linear(5, 3)), bpk.extend(nn.CrossEntropyLoss())
    found = []
    for seed, k in ((3, 4), (np.int64(3), NUMBER)):
        for kind in ("gaussian", "factored"):
            with bpk.backpack(ProjectedGrad(k=k, kind=kind, seed=seed)):
                loss_fn(model(torch.ones(2, 5)), torch.tensor([0, 1])).backward()
            found.append(bpk.fields_of(model.weight).projected_grad.clone())
        loss = loss_fn(model(torch.ones(2, 5)), torch.tensor([0, 1]))
        found.append(bpk.projected_gradients(model, loss, k=k, kind="gaussian", seed=seed))
    for one, other in zip(found[:3], found[3:], strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 0\.5"):
        ProjectedGrad(seed=0.5)  # type: ignore[arg-type]


def test_what_was_given_is_shown_in_few_words() -> None:
    """A whole tensor was."""
    with pytest.raises(ValueError, match="k must be a whole number") as found:
        bpk.eigenpairs(nn.Linear(5, 3), torch.ones(()), k=torch.ones(1000, 1000))  # type: ignore[arg-type]
    assert len(str(found.value)) < 200


class Sum(nn.Module):
    """One number for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


def of_numbers() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, torch.tensor(1.0)) for x, _ in batches()]


MODEL, MSE = nn.Linear(5, 3), nn.MSELoss()
OPERATORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: operators.GGN(None, LOSS, batches()), r"NoneType as model.*\n.*\n.*pass an nn\.Module"),  # type: ignore[arg-type]
    "a class": (lambda: operators.KFAC(nn.Linear, LOSS, batches()), "the class Linear as model"),  # type: ignore[arg-type]
    "no loss": (lambda: operators.Hessian(MODEL, None, batches()), "got no loss"),  # type: ignore[arg-type]
    "no loader": (lambda: operators.Fisher(MODEL, LOSS, None), "NoneType as loader"),  # type: ignore[arg-type]
    "a tuple": (
        lambda: operators.Jacobian(nn.LSTM(5, 3), None, batches(), check_deterministic=False),
        r"a model that returns tuple\.(?s:.*)forward=",
    ),
    "a number": (
        lambda: operators.GGN(Sum(), MSE, of_numbers()[0]) @ torch.ones(5),
        "no batch axis(?s:.*)Hessian",
    ),
    "a number, empirical": (
        lambda: operators.EmpiricalFisher(Sum(), MSE, of_numbers()[0]) @ torch.ones(5),
        "no batch axis",
    ),
    "numbers": (lambda: operators.GGN(Sum(), MSE, of_numbers()), "no batch axis(?s:.*)one number per sample"),
}


@pytest.mark.parametrize(("make", "message"), OPERATORS.values(), ids=OPERATORS)
def test_operators(make: Callable[[], Any], message: str) -> None:
    """Errors of Python's and of torch's."""
    with pytest.raises((ValueError, NotImplementedError), match=message):
        make()


def test_the_hessian_of_a_number() -> None:
    assert (operators.Hessian(Sum(), MSE, of_numbers()[0]) @ torch.ones(5)).shape == (5,)


OPTIONS: list[tuple[type[P.Preconditioner], dict[str, Any], str]] = [
    (P.KFAC, {"decay": "a"}, "decay='a' is no weight"),
    (P.KFAC, {"decay": None}, "decay=None is no weight"),
    (P.KFAC, {"intervals": "ab"}, "intervals='ab' are not two"),
    (P.KFAC, {"intervals": (0, 1)}, "interval of 0 steps(?s:.*)at least 1"),
    (P.EKFAC, {"intervals": (1, None)}, "interval of None steps"),
    (P.EKFAC, {"intervals": ("a", 1)}, "interval of 'a' steps"),
    (P.EKFAC, {"mc_samples": 1.5}, r"mc_samples must be .*, got 1\.5"),
    (P.EKFAC, {"mc_samples": 0}, "mc_samples must be .*, got 0"),
    (P.DiagonalGGN, {"interval": float("nan")}, "interval of nan steps"),
    (P.DiagonalGGN, {"kl_clip": 1e-3, "lr": "a"}, "lr='a' is no learning rate"),
    (P.DiagonalGGN, {"kl_clip": "a", "lr": 0.1}, "kl_clip='a' is no limit"),
]


@pytest.mark.parametrize(("kind", "options", "message"), OPTIONS, ids=words)
def test_options_of_preconditioners(kind: Any, options: dict[str, Any], message: str) -> None:
    """Errors of Python's, some of them after many steps."""
    with pytest.raises(ValueError, match=message):
        kind(nn.Linear(5, 3), **options)


@pytest.mark.parametrize("kind", [P.KFAC, P.EKFAC, P.DiagonalGGN])
def test_states_that_lack_something(kind: Any) -> None:
    """`KeyError`, with a half of the state taken over."""
    model, loss_fn = nn.Linear(5, 3), bpk.extend(nn.CrossEntropyLoss())
    preconditioner, (x, y) = kind(model), batches()[0]
    with preconditioner:
        loss_fn(model(x), y).backward()
    preconditioner.step()
    state, fresh = preconditioner.state_dict(), kind(model)
    for part in set(state) - {"of", "shapes"}:
        for broken in ({k: v for k, v in state.items() if k != part}, state | {part: None}):
            with pytest.raises(ValueError, match=f"The state lacks {part}"):
                fresh.load_state_dict(broken)
            assert not fresh.means and not fresh.steps
    for part in set(state) & {"inverses", "bases"}:
        with pytest.raises(ValueError, match=f"The state lacks {part} of 'weight'"):
            fresh.load_state_dict(state | {part: {"bias": state[part]["bias"]}})
    with pytest.raises(TypeError, match="The state is NoneType"):
        fresh.load_state_dict(None)
    fresh.load_state_dict(state)


def test_a_context_inside_of_a_preconditioner() -> None:
    """Contexts do not add up; the advice was what had been done."""
    model, loss_fn = nn.Linear(5, 3), bpk.extend(nn.CrossEntropyLoss())
    preconditioner, (x, y) = P.KFAC(model), batches()[0]
    with preconditioner, bpk.backpack(E.Variance()):
        loss_fn(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"no other context inside; .* bpk\.backpack\(\*preconditioner\.extensions"):
        preconditioner.step()


EXTENSIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: E.HBP(loss_hessian_strategy="draws"), r"must be one of LossHessianStrategy\.EXACT, .*, got 'draws'"),  # type: ignore[arg-type]
    (lambda: E.HBP(backprop_strategy=None), "backprop_strategy must be one of"),  # type: ignore[arg-type]
    (lambda: E.HBP(curv_type="fisher"), "curv_type must be one of"),  # type: ignore[arg-type]
    (lambda: E.HBP(ea_strategy=3), "ea_strategy must be one of"),  # type: ignore[arg-type]
    (lambda: E.EKFLR(bases=[]), r"bases=\[\] says nothing of parameters"),  # type: ignore[arg-type]
    (lambda: BatchKFLR(groups=2), "groups must list the samples"),  # type: ignore[arg-type]
    (lambda: E.WeightedGrad("x"), "weights must be numbers, .*, got 'x'"),  # type: ignore[arg-type]
    (lambda: E.WeightedGrad(torch.ones(2) * 1j), "weights must be real numbers"),
    (lambda: E.HMP(savefield=torch.ones(2)), "savefield must be the name"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), EXTENSIONS, ids=words)
def test_options_of_extensions(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_options_that_change_later() -> None:
    """`unhashable type: 'list'` in the next pass, or that no loss is extended."""
    model, loss_fn, (x, y) = bpk.extend(nn.Linear(5, 3)), bpk.extend(nn.CrossEntropyLoss()), batches()[0]
    rows, factors = E.BatchGrad(), E.KFAC()
    rows.subsampling = [0, 2]  # type: ignore[assignment]
    with bpk.backpack(rows, factors):
        loss_fn(model(x), y).backward()
    assert bpk.fields_of(model.weight).grad_batch.shape == (2, 3, 5)
    assert repr(rows) == "BatchGrad(subsampling=(0, 2))"
    with pytest.raises(ValueError, match="subsampling=3 is not a list"):
        rows.subsampling = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="mc_samples must be"):
        factors.mc_samples = 0
    with pytest.raises(ValueError, match="mc_samples must be"):  # without a number, it would be KFLR
        factors.mc_samples = None


def test_strategies_by_their_values() -> None:
    """`"sampling"` was taken for exact, and `"sqrt"` for an average over the batch."""
    assert E.HBP(loss_hessian_strategy="sampling").get_num_mc_samples() == 1  # type: ignore[arg-type]
    model, loss_fn = bpk.extend(nn.Linear(5, 3)), bpk.extend(nn.CrossEntropyLoss())
    (x, y), found = batches()[0], []
    for extension in (E.KFLR(), E.HBP(loss_hessian_strategy="exact", backprop_strategy="sqrt", savefield="kflr")):  # type: ignore[arg-type]
        with bpk.backpack(extension):
            loss_fn(model(x), y).backward()
        found.append([factor.clone() for factor in bpk.fields_of(model.weight).kflr])
    torch.testing.assert_close(*found)


def test_a_field_in_the_place_of_a_parameter() -> None:
    result = bpk.accumulate(nn.Linear(5, 3), LOSS, batches(), E.KFAC())
    with pytest.raises(KeyError, match=r"no parameter 'kfac'(?s:.*)result\.field\('kfac'\)"):
        result["kfac"]
    assert result.get("kfac") is None and "kfac" not in result and "weight" in result


def of(function: Callable[..., Any], *more: Any, **options: Any) -> Callable[[], Any]:
    x, y = batches()[0]
    return lambda: function(nn.Linear(5, 3), LOSS, x, y, E.KFAC(), *more, **options)


CHECKS: list[tuple[Callable[[], Any], str]] = [
    (of(bpk.verify, entries=0), "entries must be .*, got 0"),
    (of(bpk.verify, samples=-1), "samples must be .*, got -1"),
    (of(bpk.verify, passes="a"), "passes must be .*, got 'a'"),
    (of(bpk.verify, memory="4GB"), "memory must be .*, got '4GB'"),
    (of(bpk.verify, rtol=-1), "rtol must be .*, got -1"),
    (of(bpk.verify, atol="a"), "atol must be .*, got 'a'"),
    (of(bpk.verify, seed="a"), "seed must be .*, got 'a'"),
    (of(bpk.verify, dtype="float64"), "dtype must be .*, got 'float64'"),
    (of(bpk.verify, dtype=torch.int32), r"dtype must be .*, got torch\.int32"),
    (of(bpk.verify, batch_axis="a"), "batch_axis must be .*, got 'a'"),
    (of(bpk.cost, clock=3), "clock must be a function"),
    (lambda: bpk.memory_cleanup(None), r"memory_cleanup\(\.\.\.\) got NoneType"),  # type: ignore[arg-type]
    (lambda: bpk.distributed.all_reduce(nn.Linear(5, 3), E.KFAC), "is no extension(?s:.*)instances"),  # type: ignore[arg-type]
    (lambda: bpk.distributed.gather(nn.Linear(5, 3), E.BatchGrad), "is no extension"),  # type: ignore[arg-type]
    (lambda: bpk.verify(nn.Linear(5, 3), LOSS, torch.ones(0, 5), torch.ones(0)), "The batch is empty"),
    (lambda: bpk.cost(nn.Linear(5, 3), LOSS, torch.ones(64, 5), None), "pass of the batch fails(?s:.*)its targets"),
    (
        lambda: bpk.cost(nn.Linear(5, 3).requires_grad_(False), LOSS, torch.ones(64, 5), torch.ones(64).long()),
        "pass of the batch fails(?s:.*)parameters that are trained",
    ),
]


@pytest.mark.parametrize(("call", "message"), CHECKS, ids=words)
def test_options_of_checks(call: Callable[[], Any], message: str) -> None:
    """Errors of Python's; with no entries, and negative tolerances, there was a result."""
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_numbers_of_numpy_in_checks() -> None:
    x, y = batches()[0]
    one = np.int64(1)
    found = bpk.verify(nn.Linear(5, 3), LOSS, x, y, E.BatchGrad(), entries=one, samples=one, seed=one, passes=one)
    assert found
