"""Recurrent layers for the tests: written out step by step from linear maps, and small networks around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.random_state import RandomState

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
Maps = dict[str, nn.Linear]


def maps_of(module: nn.Module) -> Maps:
    """For every weight of a recurrent layer a linear layer that holds the same parameter, with a bias of zeros."""
    maps = {}
    for name, p in module.named_parameters():
        if name.startswith("weight"):
            maps[name] = nn.Linear(p.shape[1], p.shape[0], dtype=p.dtype)
            maps[name].weight = p
            nn.init.zeros_(maps[name].bias)
    return maps


def step(kind: str, relu: bool, a: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The new hidden state (before a projection) and the new cell state."""
    if kind == "LSTM":
        i, f, g, o = (a + b).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if kind == "GRU":
        (ar, au, an), (br, bu, bn) = a.chunk(3, -1), b.chunk(3, -1)
        update = (au + bu).sigmoid()
        return (1 - update) * (an + (ar + br).sigmoid() * bn).tanh() + update * h, c
    return (a + b).relu() if relu else (a + b).tanh(), c


def unrolled(module: Any, maps: Maps, x: Tensor, states: Any = None) -> Any:
    """A recurrent layer in a loop; every product with a weight is a call of one of `maps`.

    Between layers, the same numbers are drawn as in torch's own forward pass.
    """
    single = isinstance(module, nn.RNNCellBase)
    kind = type(module).__name__.removesuffix("Cell").upper()
    relu = getattr(module, "nonlinearity", "tanh") == "relu"
    before = RandomState.now()
    expected = type(module).forward(module, x, states)
    before.restore()
    steps = x[None] if single else x.transpose(0, 1) if module.batch_first else x
    layers, ways = (1, 1) if single else (module.num_layers, 1 + module.bidirectional)
    given = states if isinstance(states, tuple) else (states, None)
    hs, cs = [], []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            suffix = "" if single else f"_l{layer}{'_reverse' if way else ''}"
            start = [s if s is None or single else s[layer * ways + way] for s in given]
            weight = maps["weight_hh" + suffix].weight
            h = steps.new_zeros(steps.shape[1], weight.shape[1]) if start[0] is None else start[0]
            c = steps.new_zeros(steps.shape[1], module.hidden_size) if start[1] is None else start[1]
            seen: list[Tensor] = []
            for t in reversed(range(len(steps))) if way else range(len(steps)):
                a, b = maps["weight_ih" + suffix](steps[t]), maps["weight_hh" + suffix](h)
                if module.bias:
                    a, b = a + getattr(module, "bias_ih" + suffix), b + getattr(module, "bias_hh" + suffix)
                h, c = step(kind, relu, a, b, h, c)
                h = maps["weight_hr" + suffix](h) if "weight_hr" + suffix in maps else h
                seen.insert(0, h) if way else seen.append(h)
            outputs.append(torch.stack(seen))
            hs.append(h)
            cs.append(c)
        steps = torch.cat(outputs, -1)
        if layer < layers - 1:
            steps = nn.functional.dropout(steps, module.dropout, module.training)
    if single:
        found: Any = (hs[0], cs[0]) if kind == "LSTM" else hs[0]
    else:
        y = steps.transpose(0, 1) if module.batch_first else steps
        found = (y, (torch.stack(hs), torch.stack(cs)) if kind == "LSTM" else torch.stack(hs))
    torch.testing.assert_close(found, expected)
    return found


# ---- networks ----------------------------------------------------------------------------------------
class LastState(nn.Module):
    """A classifier of sequences: the last hidden states of all layers and directions."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(2, 2), layer, nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(self.first(x))[1]
        h = states[0] if isinstance(states, tuple) else states
        return self.last(h.transpose(0, 1).flatten(1))


class Everything(nn.Module):
    """An LSTM all results of which are used, with initial states that another layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(2, 4)
        self.layer = nn.LSTM(2, 2, batch_first=True)
        self.last = nn.Linear(6, 3)
        for p in self.last.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.start(x[:, 0]).tanh().chunk(2, 1)
        y, (h, c) = self.layer(x, (h[None].contiguous(), c[None].contiguous()))
        return self.last(torch.cat([y.mean(1), h[0], c[0]], 1))


class TimeFirst(nn.Module):
    """Time first between the layers, a prediction for every step; one layer starts from the state of another."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper, self.last = nn.GRU(2, 2), nn.RNN(2, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.lower(x.transpose(0, 1))
        y, _ = self.upper(y, h)
        return self.last(y.transpose(0, 1)).transpose(1, 2)


class Loop(nn.Module):
    """A cell called once for every step."""

    def __init__(self, cell: nn.Module, features: int) -> None:
        super().__init__()
        self.cell, self.last = cell, nn.Linear(features, 3)
        for p in self.last.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for part in x.unbind(1):
            state = self.cell(part, state)
        return self.last(torch.cat(state, 1) if isinstance(state, tuple) else state)


def networks() -> list[tuple[Any, ...]]:
    """Names, models, shapes of an input without the batch axis, and further axes of the target."""

    def last_of_lstm() -> nn.Module:
        return LastState(nn.LSTM(2, 2, num_layers=2, batch_first=True), 4)

    def last_of_gru() -> nn.Module:
        return LastState(nn.GRU(2, 2, bidirectional=True, batch_first=True), 4)

    def dropping_lstm() -> nn.Module:
        return LastState(nn.LSTM(2, 2, num_layers=2, dropout=0.4, batch_first=True), 4)

    def dropping_gru() -> nn.Module:
        return LastState(nn.GRU(2, 1, num_layers=2, dropout=0.4, bidirectional=True, batch_first=True), 4)

    def lstm_loop() -> nn.Module:
        return Loop(nn.LSTMCell(2, 2), 4)

    def gru_loop() -> nn.Module:
        return Loop(nn.GRUCell(2, 2), 2)

    def elman_loop() -> nn.Module:
        return Loop(nn.RNNCell(2, 2), 2)

    return [
        ("lstm-last-state", last_of_lstm, (3, 2)),
        ("gru-last-state", last_of_gru, (2, 2)),
        ("lstm-dropout", dropping_lstm, (2, 2)),
        ("gru-dropout", dropping_gru, (2, 2)),
        ("lstm-everything", Everything, (2, 2)),
        ("time-first", TimeFirst, (2, 2), 2),
        ("lstm-cell-loop", lstm_loop, (2, 2)),
        ("gru-cell-loop", gru_loop, (2, 2)),
        ("rnn-cell-loop", elman_loop, (3, 2)),
    ]
