"""What tests of the converter have in common: converted models and what they must agree with."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.custom_module.graph_utils import BackpackTracer
from tests.helpers import backward
from tests.references.compare import ON_ANY_GRAPH, agrees
from tests.references.reference import Reference


class Renamed:
    """A reference that is asked by the names of the converted model."""

    def __init__(self, reference: Reference, names: dict[str, str]) -> None:
        self.reference = reference
        self.names = names

    def __getattr__(self, quantity: str) -> Any:
        return lambda name: getattr(self.reference, quantity)(self.names.get(name, name))


def convert(model: nn.Module) -> Any:
    return bpk.extend(model, use_converter=True)


def check(
    model: nn.Module, x: Tensor, target: Tensor | None = None, factors: bool = False, exts: Any = ON_ANY_GRAPH
) -> Any:
    """Converted, a model gives the same outputs, and every quantity agrees with plain autograd on the original."""
    loss_fn = nn.CrossEntropyLoss()
    y = torch.randint(3, (x.shape[0],)) if target is None else target
    model = model.double()
    expected = model(x.clone())
    original = copy.deepcopy(model)
    ref = Reference(original, (x,), lambda pred: loss_fn(pred, y))
    converted = convert(model)
    torch.testing.assert_close(converted(x.clone()), expected)
    backward(converted, bpk.extend(loss_fn), x.clone(), y, *[e() for e in exts])
    agrees(converted, Renamed(ref, converted.conversion_report.renamed), factors)  # type: ignore[arg-type]
    assert {id(p) for p in model.parameters()} == {id(p) for p in converted.parameters()}
    return converted


def targets(converted: nn.Module) -> list[str]:
    return [str(n.target) for n in BackpackTracer().trace(converted).nodes if n.op not in ("placeholder", "output")]


def only_modules(converted: nn.Module) -> bool:
    return {n.op for n in BackpackTracer().trace(converted).nodes} <= {"placeholder", "call_module", "output"}


def linear(i: int = 4, o: int = 4) -> nn.Linear:
    return nn.Linear(i, o)


# ---- the tables of the tutorials -----------------------------------------------------------------------
class CharRNN(nn.Module):
    """The recurrent network of the tutorial."""

    def __init__(self, hidden: int = 6, vocab: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, dropout=0.36, batch_first=True)
        self.dense = nn.Linear(hidden, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = self.dropout(x)
        x, _ = self.lstm(x)
        x = self.dropout(x)
        return self.dense(x).permute(0, 2, 1)


class Direct(nn.Module):
    """Parameters used directly."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 3, 4))
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(5, 4)
        self.register_buffer("numbers", torch.arange(3))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 1.0]))
        self.out = linear(12, 3)
        self.use = use
        kept = {"token": "t", "position": "p", "layer": "wb", "scaled": "wb", "table": "e", "attention": "tp"}[use]
        for k, name in {"t": "token", "p": "position", "w": "weight", "b": "bias", "e": "table"}.items():
            if k not in kept:
                delattr(self, name)
        if use == "attention":
            self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        if self.use == "token":
            x = torch.tanh(torch.cat([self.token.expand(n, -1, -1), x[:, 1:]], dim=1))
        if self.use == "position":
            x = torch.tanh(x + self.position[:, : x.shape[1]])
        if self.use == "layer":
            x = torch.tanh(F.linear(x, self.weight, self.bias))
        if self.use == "scaled":
            x = torch.tanh(F.linear(x, self.weight * self.mask, self.bias.exp()))
        if self.use == "table":
            x = torch.tanh(x * self.table(self.numbers) + self.mask)
        if self.use == "attention":
            q = self.token.expand(n, 3, -1)
            x = self.mha(q, x, x, need_weights=False)[0] + self.position
        return self.out(x.flatten(1))
