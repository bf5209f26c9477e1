"""Fields are overwritten in place only where nobody can see it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.dataset.totals import Totals
from bpk.fields import spare_memory
from tests.helpers import backward, data, extended

pytestmark = pytest.mark.processor("memory is used again there only")


def from_storage(storage: Any) -> Tensor:
    """A copy of what a storage of doubles holds."""
    return torch.tensor([], dtype=torch.float64).set_(getattr(storage, "_untyped_storage", storage)).clone()


def sent(t: Tensor) -> Any:
    """A tensor on its way to another process."""
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(t)
    while not t.is_shared():  # a thread of the queue moves it
        time.sleep(0.01)
    return queue


def shared(t: Tensor) -> Any:
    """What another process gets of a tensor: an open file."""
    file, size = t.share_memory_().untyped_storage()._share_fd_cpu_()
    return os.dup(file), size


def found_in_file(handle: Any) -> Tensor:
    return from_storage(torch.UntypedStorage._new_shared_fd_cpu(*handle))


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, all memory is worth being used again."""
    monkeypatch.setattr(spare_memory, "WORTH", 0)


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda t: t, lambda t: t),
    "view": (lambda t: t[1:], lambda t: t._base if t._base is not None else t),
    "detached": (Tensor.detach, lambda t: t),
    "list": (lambda t: [t], lambda held: held[0]),
    "storage": (Tensor.untyped_storage, from_storage),
    "typed storage": (Tensor.storage, from_storage),
    "array": (Tensor.numpy, torch.from_numpy),
    "memoryview": (lambda t: memoryview(t.numpy()), lambda m: torch.from_numpy(np.asarray(m))),
    "dlpack": (torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack),
    "array by dlpack": (np.from_dlpack, lambda a: torch.from_numpy(a.copy())),
    "lazy copy": (torch._lazy_clone, lambda t: t),
    "shared": (shared, found_in_file),
    "queue": (sent, lambda queue: queue.get(timeout=60)),
}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.filterwarnings("ignore:.*not writable")
@pytest.mark.parametrize("name", HOLDERS)
def test_a_field_that_is_held_keeps_its_numbers(name: str) -> None:
    hold, look = HOLDERS[name]
    model, loss_fn = extended()
    p = model[0].weight
    backward(model, loss_fn, *data(), E.BatchGrad())
    before = p.grad_batch.clone()
    held = hold(p.grad_batch)
    for _ in range(2):
        backward(model, loss_fn, *data(), E.BatchGrad())
    found = look(held).flatten()
    torch.testing.assert_close(found, before.flatten()[-found.numel() :], rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [torch.from_numpy, torch.from_dlpack], ids=lambda f: f.__name__)
def test_memory_of_an_array_in_place_of_a_field(wrap: Callable[..., Tensor]) -> None:
    """A hook puts a tensor into a field whose memory belongs to somebody else."""
    model, loss_fn = extended()
    p = model[0].weight
    array = np.full((5, *p.shape), 7.0)
    backward(model, loss_fn, *data(), E.BatchGrad())
    p.grad_batch = wrap(array)
    for _ in range(2):
        backward(model, loss_fn, *data(), E.BatchGrad())
        assert (array == 7).all()


def test_memory_that_nothing_refers_to_is_found() -> None:
    alone, held = torch.zeros(3), torch.zeros(3)
    other = held
    assert spare_memory.spare_memory(alone) is not None
    assert spare_memory.spare_memory(held) is None
    assert other is held
    assert spare_memory.spare_memory(torch.zeros(4)[1:]) is None
    assert spare_memory.spare_memory(torch.zeros(3, requires_grad=True)) is None
    assert spare_memory.spare_memory(torch.zeros(3).to_sparse()) is None


@pytest.mark.parametrize("quantity", [E.BatchGrad, E.BatchDiagGGNExact, E.BatchDiagHessian])
def test_a_field_that_nobody_holds_is_used_again(quantity: type[E.BatchGrad]) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(300, 200))), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(8, 300), torch.randint(200, (8,))
    places = set()
    for _ in range(6):
        backward(model, loss_fn, x, y, quantity())
        places.add(getattr(model[0].weight, quantity().savefield).data_ptr())
        ballast = [torch.empty(8, 200, 300) for _ in range(3)]
    assert len(places) == 1
    del ballast


@pytest.mark.parametrize("quantity", [E.KFAC, E.KFLR])
@pytest.mark.parametrize("held", ["the list", "a factor", "a view", "nothing"])
def test_factors(quantity: type[E.KFAC], held: str) -> None:
    """Their memory is used again, unless somebody has the list, or one of them."""
    torch.manual_seed(0)
    model, loss_fn = extended()
    weight, bias = model[0].weight, model[0].bias
    places, kept, copies = set[tuple[int, ...]](), list[Any](), list[list[Tensor]]()
    for step in range(4):
        x, y = data()
        torch.manual_seed(step)
        backward(model, loss_fn, x + step, y, quantity())
        found = getattr(weight, quantity().savefield)
        torch.manual_seed(step)
        fresh = copy.deepcopy(model)
        backward(fresh, loss_fn, x + step, y, quantity())
        for a, b in zip(found, getattr(fresh[0].weight, quantity().savefield), strict=True):
            torch.testing.assert_close(a, b)
        g, other = found[0], getattr(bias, quantity().savefield)[0]
        torch.testing.assert_close(g, other)  # of the same layer, and each has its own
        assert g.data_ptr() != other.data_ptr()
        places.add((found[0].data_ptr(), found[1].data_ptr()))
        copies.append([a.clone() for a in found])
        kept.append({"the list": found, "a factor": found[0], "a view": found[1][1:], "nothing": None}[held])
        del g, other, found, a, b, fresh
    assert (len(places) == 1) == (held == "nothing")
    for before, now in zip(copies, kept, strict=True):
        if held == "the list":
            assert len(now) == 2
            assert all(map(torch.equal, now, before))
        elif held == "a factor":
            assert torch.equal(now, before[0])
        elif held == "a view":
            assert torch.equal(now, before[1][1:])


@pytest.mark.parametrize("held", ["the dictionary", "a factor", "nothing"])
def test_factors_that_add_up_over_batches(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is with what a pass over a data set takes from each batch, unless somebody has it."""
    torch.manual_seed(0)
    model, loss_fn = extended()
    batches = [(x + step, y) for step, (x, y) in enumerate(data() for _ in range(4))]
    expected = [(x.mT @ x) / len(x) for x, _ in batches]
    places, kept, ballast, add = set[int](), list[Any](), list[Tensor](), Totals.add

    def seen(totals: Totals, found: Any, size: Any, loss: float) -> None:
        parts = found["kfac"]["0.weight"]
        places.add(parts["A"].data_ptr())
        kept.append({"the dictionary": parts, "a factor": parts["A"], "nothing": None}[held])
        add(totals, found, size, loss)
        ballast.extend(torch.empty_like(x) for x in parts.values() for _ in range(3))

    monkeypatch.setattr(Totals, "add", seen)
    result = bpk.accumulate(model, loss_fn, batches, E.KFAC())
    torch.testing.assert_close(result["0.weight"]["kfac"][1], sum(expected) / len(expected))
    assert (len(places) == 1) == (held == "nothing")
    for now, before in zip(kept, expected, strict=True) if held != "nothing" else ():
        torch.testing.assert_close(now["A"] if held == "the dictionary" else now, before)


TENSORS = (
    E.BatchGrad,
    E.SumGradSquared,
    E.SqrtGGNExact,
    E.SqrtGGNMC,
    E.BatchDiagGGNExact,
    E.BatchDiagGGNMC,
    E.DiagGGNMC,
)


@pytest.mark.parametrize("first", TENSORS)
@pytest.mark.parametrize("n", [1, 3])
def test_memory_of_one_field_is_not_that_of_another(first: type[E.BatchGrad], n: int) -> None:
    """A quantity that joins in the second pass is as large as the field of the first: for one sample, or one draw."""
    torch.manual_seed(0)
    (model, loss_fn), x, y = extended(), torch.randn(n, 4, dtype=torch.float64), torch.arange(n) % 3

    def fresh() -> None:
        for p in model.parameters():
            vars(p).clear()

    def passed(*kinds: type[Any]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        extensions = [kind() for kind in kinds]
        backward(model, loss_fn, x, y, *extensions)
        fields = [(name, p, e) for name, p in model.named_parameters() for e in extensions]
        return {f"{name} {e.savefield}": vars(p)[e.savefield] for name, p, e in fields}

    for other in set(TENSORS) - {first}:
        for kinds in ((first, other), (other, first)):
            fresh()
            expected = {key: x.clone() for key, x in passed(*kinds).items()}
            fresh()
            passed(first)
            for key, value in passed(*kinds).items():
                torch.testing.assert_close(value, expected[key], msg=lambda text, key=key: f"{key}: {text}")
