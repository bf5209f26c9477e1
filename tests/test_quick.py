"""What saves time in tests finds what the slow way finds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.networks import all_networks
from tests.quick import CAREFUL, Copies, assert_close

NAN, INF = math.nan, math.inf


def test_it_is_what_tests_call() -> None:
    assert torch.testing.assert_close is assert_close is not CAREFUL


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tolerances", [{}, {"rtol": 1e-3, "atol": 0.0}, {"rtol": 0.0, "atol": 0.1}])
@pytest.mark.parametrize("equal_nan", [False, True])
def test_same_verdicts(dtype: torch.dtype, tolerances: dict[str, float], equal_nan: bool) -> None:
    """Of all pairs of numbers, near and far, large and small."""
    listed = [1.0, 1 + 9e-8, 1 + 2e-7, 1 + 2e-6, 1.0009, 1.002, 1.09, -1e3, 0.0, 1e-8, INF, -INF, NAN]
    numbers = torch.tensor(listed, dtype=torch.float64).to(dtype)
    for a in numbers:
        for b in numbers:
            verdicts = [raises(f, a, b, equal_nan=equal_nan, **tolerances) for f in (assert_close, CAREFUL)]
            assert verdicts[0] == verdicts[1], f"{a} {b}"


def raises(function: Callable[..., None], a: object, b: object, **options: object) -> str | None:
    """What it says, if it raises."""
    try:
        function(a, b, **options)
    except (AssertionError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


UNLIKE = {
    "shape": (torch.ones(2), torch.ones(1)),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "layout": (torch.ones(2, 2), torch.ones(2, 2).to_sparse()),
    "device": (torch.ones(2, device="cpu"), torch.ones(2, device="meta")),
    "a number": (torch.ones(2), 1.0),
    "a list": ([torch.ones(2)], [torch.zeros(2)]),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_is_not_alike_is_refused(what: str) -> None:
    assert raises(assert_close, *UNLIKE[what]) == raises(CAREFUL, *UNLIKE[what]) is not None


def test_options_and_messages() -> None:
    a = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="stride"):
        assert_close(a, torch.ones(3, 2).T, check_stride=True)
    with pytest.raises(ValueError, match="rtol"):
        assert_close(a, a, rtol=1e-3)
    with pytest.raises(AssertionError, match=r"here: .*not close"):
        assert_close(a, a + 1, msg=lambda m: f"here: {m}")
    assert_close(nn.Parameter(a), a)
    assert_close(torch.empty(0), torch.empty(0))


def test_copies_are_those_of_deepcopy() -> None:
    """Of all networks: the same modules, tensors that are shared where they were, and nothing shared with others."""
    for net in all_networks()[::40]:
        original = net.make()
        slow, first, second = copy.deepcopy(original), Copies(original).new(), net.build()
        for parts in zip(slow[0].modules(), first[0].modules(), second[0].modules(), strict=True):
            assert len({type(m) for m in parts}) == 1 and len({id(m) for m in parts}) == 3
            assert len({tuple(vars(m)) for m in parts}) == 1
        tensors = [list(places(model)) for model in (original[0], slow[0], first[0])]
        for trio in zip(*tensors, strict=True):
            assert torch.equal(trio[0], trio[2]) and len({(x.requires_grad, x.stride()) for x in trio}) == 1
            assert len({x.data_ptr() for x in trio}) == 3 or not trio[0].numel()
        assert len({tuple([id(x) for x in found].index(id(x)) for x in found) for found in tensors}) == 1


def places(model: nn.Module) -> list[Tensor]:
    """Tensors of a model, as often as it has them."""
    return [x for m in model.modules() for x in (*m._parameters.values(), *m._buffers.values()) if x is not None]


def test_copies_of_what_has_no_name() -> None:
    class Local(nn.Module):
        pass

    make: Any = Local
    model = make()
    model.function = lambda x: 2 * x
    model.part, model.method, model.itself = partial(model.function, 3), model.extra_repr, [model]
    copied: Any = Copies(model).new()
    assert type(copied) is Local and copied.itself[0] is copied and copied is not model
    assert copied.function is model.function and copied.part() == 6
    assert copied.method.__self__ is copied
