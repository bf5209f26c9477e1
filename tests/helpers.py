"""What several test files share: a small problem, one backward pass, all extensions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.nested import tensors_in
from bpk.plan.step import Step
from bpk.sweeps.columns.lazy import Chunk
from bpk.sweeps.columns.run import Run
from bpk.utils.ekfac import Eigenbasis, ekfac_to_mat

FIELDS: dict[Callable[[], BackpropExtension], str] = {type(e): e.savefield for e in every_extension()}
"""All quantities: extension class and field."""

FIRST_ORDER = tuple(type(e) for e in every_extension() if not e.second_order)
SECOND_ORDER = tuple(type(e) for e in every_extension() if e.second_order)


@contextmanager
def registered(*rules: Any) -> Iterator[None]:
    """Rules for the time of a test."""
    for rule in rules:
        bpk.register(rule)
    try:
        yield
    finally:
        for rule in rules:
            bpk.unregister(rule)


def mlp(dtype: torch.dtype = torch.float64, act: type[nn.Module] = nn.Sigmoid) -> nn.Sequential:
    """Two linear layers with a nonlinearity in between."""
    return nn.Sequential(nn.Linear(4, 3), act(), nn.Linear(3, 3)).to(dtype)


def data(dtype: torch.dtype = torch.float64, n: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs `[n, 4]` and class labels `[n]`."""
    return torch.randn(n, 4, dtype=dtype), torch.randint(3, (n,))


def extended(model: nn.Module | None = None, loss: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    """An extended model and loss."""
    return bpk.extend(mlp() if model is None else model), bpk.extend(nn.CrossEntropyLoss() if loss is None else loss)


def backward(
    model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, *exts: BackpropExtension, **options: Any
) -> None:
    """Forward, then backward under the extensions."""
    loss = loss_fn(model(x), y)
    with bpk.backpack(*exts, **options):
        loss.backward()


def saved(model: nn.Module) -> set[str]:
    """All names of fields that extensions have left on the parameters."""
    return {f for p in model.parameters() for f in FIELDS.values() if hasattr(p, f)}


def numbers(value: Any, vectors: Tensor) -> Tensor:
    """A field's entries in one row: of functions their products with vectors, of eigenbases the matrix."""
    if isinstance(value, Eigenbasis):  # eigenvectors are not unique
        value = ekfac_to_mat(value)
    elif callable(value) and not isinstance(value, Tensor):
        value = value(vectors)
    return torch.cat([part.flatten() for part in tensors_in(value)])


def values(model: nn.Module, field: str) -> list[Tensor]:
    """A field of all parameters as tensors (functions are applied to ones)."""
    found: list[Tensor] = []
    for p in model.parameters():
        value = getattr(p, field)
        if callable(value) and not isinstance(value, Tensor):
            value = value(torch.ones_like(p)[None])
        value = ekfac_to_mat(value) if isinstance(value, Eigenbasis) else value
        found.extend(value if isinstance(value, list) else [value])
    return found


def told(kind: type[Exception], *parts: str) -> Any:
    """The block raises `kind`, and its message has all parts, a reason, and what to do."""
    return pytest.raises(kind, match="(?s)^" + "".join(f"(?=.*{part})" for part in (*parts, "Why:", "Do:")))


def columns_begun(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many columns begin from now on at layers, by the name of the layer."""
    found, start = Counter[str](), Run.start

    def noted(self: Run, step: Step, key: Hashable, chunk: Chunk, *args: Any) -> None:
        found[type(step.record.module).__name__] += sum(map(len, chunk[0].values()))
        start(self, step, key, chunk, *args)

    monkeypatch.setattr(Run, "start", noted)
    return found
