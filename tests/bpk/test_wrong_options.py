"""Options that are of another kind than asked for are refused in words; whole numbers of numpy's are whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bpk
from bpk import extensions as E
from bpk.extensions import AxisGram, ProjectedGrad

LOSS = nn.CrossEntropyLoss()


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


@pytest.mark.parametrize(("options", "message"), ACCUMULATE, ids=lambda x: str(x)[:30])
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
