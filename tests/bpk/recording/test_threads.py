"""Contexts belong to threads: what one of them does is nothing to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.context import CTX
from bpk.jacobians.second_order import graph
from bpk.recording import engine
from tests.helpers import data, extended, mlp, saved
from tests.references.reference import Reference

pytestmark = pytest.mark.processor("the default device is a thread's own")


def in_threads(*tasks: Callable[[], None]) -> None:
    """Run tasks at the same time; the first error of any of them is raised here."""
    errors: list[BaseException] = []

    def caught(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


class Problem:
    """A model with its data and what autograd says about it."""

    def __init__(self) -> None:
        self.x, self.y = data()
        self.model = mlp()
        loss_fn = nn.CrossEntropyLoss()
        self.ref = Reference(self.model, (self.x,), lambda pred: loss_fn(pred, self.y))
        self.grads = torch.autograd.grad(loss_fn(self.model(self.x), self.y), list(self.model.parameters()))
        extended(self.model, loss_fn)
        self.loss_fn = loss_fn

    def plainly(self) -> None:
        """A step without a context."""
        self.model.zero_grad()
        self.loss_fn(self.model(self.x), self.y).backward()
        for p, grad in zip(self.model.parameters(), self.grads, strict=True):
            torch.testing.assert_close(p.grad, grad)
        assert saved(self.model) == set()

    def packed(self, wait: Callable[[], object] = lambda: None) -> None:
        """A step in a context; `wait` is called inside of it."""
        self.model.zero_grad()
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
            wait()
            loss = self.loss_fn(self.model(self.x), self.y)
            wait()
            loss.backward()
            wait()
        for (name, p), grad in zip(self.model.named_parameters(), self.grads, strict=True):
            torch.testing.assert_close(p.grad, grad)
            torch.testing.assert_close(p.grad_batch, self.ref.grad_batch(name))
            torch.testing.assert_close(p.diag_ggn_exact, self.ref.diag_ggn(name))
            torch.testing.assert_close(p.diag_h, self.ref.diag_h(name))


def test_training_plainly_while_another_thread_is_in_a_context() -> None:
    one, other = Problem(), Problem()
    with bpk.backpack(E.BatchGrad()):
        in_threads(other.plainly)
        one.loss_fn(one.model(one.x), one.y).backward()
    assert saved(one.model) == {"grad_batch"}
    other.packed()


def test_two_threads_in_contexts_of_their_own() -> None:
    problems, barrier = [Problem(), Problem()], threading.Barrier(2, timeout=60)
    in_threads(*[lambda p=p: [p.packed(barrier.wait) for _ in range(5)] for p in problems])


def test_a_context_and_plain_steps_at_the_same_time() -> None:
    one, other, barrier = Problem(), Problem(), threading.Barrier(2, timeout=60)

    def plain() -> None:
        for _ in range(3):
            barrier.wait()
            other.plainly()

    in_threads(lambda: one.packed(barrier.wait), plain)


def test_one_context_object_in_two_threads() -> None:
    context, problems, barrier = bpk.backpack(E.BatchGrad()), [Problem(), Problem()], threading.Barrier(2, timeout=60)

    def step(p: Problem) -> None:
        with context:
            barrier.wait()
            p.loss_fn(p.model(p.x), p.y).backward()
            barrier.wait()
        for name, q in p.model.named_parameters():
            torch.testing.assert_close(q.grad_batch, p.ref.grad_batch(name))

    in_threads(*[lambda p=p: step(p) for p in problems])


def test_disabling_is_the_threads_own() -> None:
    one, other = Problem(), Problem()
    with bpk.disable():
        in_threads(other.packed)
        one.model(one.x)
        assert "input0" not in vars(one.model[0])


def test_backward_stays_in_the_thread_of_the_context() -> None:
    assert engine.multithreaded()
    with bpk.backpack(E.BatchGrad()):
        assert not engine.multithreaded()
        with bpk.backpack(E.Variance()):
            assert not engine.multithreaded()
        assert not engine.multithreaded()
    assert engine.multithreaded()
    with pytest.raises(KeyError), bpk.backpack(E.BatchGrad()):
        raise KeyError
    assert engine.multithreaded()
    with torch.autograd.set_multithreading_enabled(False):
        with bpk.backpack(E.BatchGrad()):
            assert not engine.multithreaded()
        assert not engine.multithreaded()


def test_products_outside_of_contexts_stay_in_their_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = graph.pull_back

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(engine.multithreaded())
        return plain(*args, **kwargs)

    monkeypatch.setattr(graph, "pull_back", watched)

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x).sin())

    model, loss_fn = extended(Net(nn.Linear(4, 3), nn.Linear(3, 3)).double())
    x, y = data()
    with bpk.backpack(E.GGNMP()):
        loss_fn(model(x), y).backward()
    seen.clear()
    p = model[0].weight
    p.ggnmp(torch.ones_like(p)[None])
    assert seen
    assert not any(seen)


def test_first_use_in_many_threads() -> None:
    """Rules are collected at the first look-up: nobody sees half of them."""
    from bpk.jacobians.registry import Registry
    from bpk.rules import REGISTRY

    rules = list(REGISTRY)
    for _ in range(20):
        registry, barrier = Registry(lambda: iter(rules)), threading.Barrier(4, timeout=60)

        def look(registry: Registry = registry, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            assert registry.find(nn.SmoothL1Loss) is not None
            assert registry.find(nn.Linear) is not None

        in_threads(*[look] * 4)


# ---- what is told -----------------------------------------------------------------------------------
def test_backward_in_another_thread_than_the_context() -> None:
    model, loss_fn = extended()
    x, y = data()
    with pytest.raises(RuntimeError, match=r"(?s)another thread.*Why:.*Do:"), bpk.backpack(E.BatchGrad()):
        loss = loss_fn(model(x), y)
        in_threads(loss.backward)
    assert saved(model) == set()
    assert CTX.get_active_exts() == ()


def test_nothing_is_claimed_about_passes_of_other_threads() -> None:
    """A context without a pass, while another thread trains a model that was not extended."""
    x, y = data()
    plain = mlp()

    def train() -> None:
        nn.CrossEntropyLoss()(plain(x), y).backward()
        done.set()
        left.wait(60)

    done, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=train)
    with pytest.warns(UserWarning, match="reached no extended module"), bpk.backpack(E.BatchGrad()):
        thread.start()
        done.wait(60)
    left.set()
    thread.join()


def test_threads_that_load_data_do_not_hide_a_mistake() -> None:
    left = threading.Event()
    thread = threading.Thread(target=left.wait, args=(60,), daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="reached no extended module"), bpk.backpack(E.BatchGrad()):
        mlp()(data()[0]).sum().backward()
    left.set()
    thread.join()


def test_left_by_another_thread() -> None:
    context = bpk.backpack(E.BatchGrad())
    context.__enter__()
    with pytest.raises(RuntimeError, match=r"(?s)another thread.*Do:"):
        in_threads(lambda: context.__exit__(None, None, None))
    CTX.leave(CTX.entered[-1])
    assert CTX.get_active_exts() == ()
