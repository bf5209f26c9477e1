"""Small models that predict three numbers: each uses its parameters in another way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Direct(nn.Module):
    """Parameters that functions use."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.rand(4) + 0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(x @ self.matrix * self.scale))
        return out


class Twice(nn.Module):
    """A layer that is called twice, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.head = nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.act(self.layer(x))
        out: Tensor = self.head(self.act(self.layer(x)))
        return out


class TiedTable(nn.Module):
    """A weight that a layer uses, and functions, transposed; and a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.unused, self.head = nn.Linear(4, 2, bias=False), nn.Linear(2, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(torch.tanh(self.down(x)) @ self.down.weight))
        return out


class Rows(nn.Module):
    """Layers that see the halves of a sample as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(torch.tanh(self.layer(x.reshape(-1, 2)))).reshape(-1, 4))
        return out


class Recomputed(nn.Module):
    """A part whose forward pass is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.head = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.part, self.first(x), use_reentrant=False))
        return out


class Last(nn.Module):
    """A recurrent layer over the halves of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.reshape(-1, 2, 2))[0][:, -1])
        return out


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(3, 3))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


def convolution() -> nn.Module:
    layers = (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.BatchNorm1d(2).eval(), nn.Linear(2, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": tied,
    "convolution": convolution,
    "direct": Direct,
    "twice": Twice,
    "tied table": TiedTable,
    "rows": Rows,
    "recomputed": Recomputed,
    "last": Last,
}
