"""Models for tests on a GPU, and their quantities there and on the processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from tests.helpers import backward, numbers

GPU = torch.device("cuda")
N, T = 5, 6
ELSEWHERE = (E.KFRA, E.PCHMP, E.EKFLR)
"""What is defined for chains of layers only; and eigenvectors, some of which may be any (`test_matrix.py` has them)."""


class Recurrent(nn.Module):
    """The last step of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


class Residual(nn.Module):
    """Convolutions with a shortcut, and functions between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner, self.head = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = x + torch.tanh(self.inner(x))
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return out


class Encoder(nn.Module):
    """A table, an encoder layer, and the mean over steps."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.table(tokens)).mean(1))
        return out


class Tied(nn.Module):
    """A language model whose table is the last layer's weight, with causal attention by the fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed, self.norm = nn.Embedding(7, 8), nn.Linear(8, 24), nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.mixed(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = self.head(x).transpose(1, 2)
        return out


def images() -> Tensor:
    return torch.randn(N, 2, 6, 6)


def series() -> Tensor:
    return torch.randn(N, T, 3)


def tokens() -> Tensor:
    return torch.randint(7, (N, T))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(3, 4, 2), nn.GroupNorm(2, 4), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), lambda: torch.randn(N, 3)),
    "convolutions": (convolutions, images),
    "residual": (lambda: Residual().eval(), images),
    "LSTM": (lambda: Recurrent(nn.LSTM(3, 4, 2, batch_first=True)), series),
    "GRU": (lambda: Recurrent(nn.GRU(3, 2, bidirectional=True, batch_first=True)), series),
    "encoder": (Encoder, tokens),
    "tied": (Tied, tokens),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in double precision on the processor, data, and labels."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make().double(), inputs()
    y = torch.randint(3, (N, T) if name == "tied" else (N,))
    return model, x.double() if x.is_floating_point() else x, y


def fields(
    model: nn.Module, x: Tensor, y: Tensor, extensions: list[BackpropExtension], passes: int = 2, **options: Any
) -> dict[str, dict[str, Tensor]]:
    """Numbers of fields on the processor, by parameter and field, of the last of so many passes; also gradients."""
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(passes):
        model.zero_grad()
        backward(model, loss_fn, x, y, *extensions, **options)
    found: dict[str, dict[str, Tensor]] = {}
    for name, p in model.named_parameters():
        vectors = torch.linspace(-1, 1, 2 * p.numel(), device=p.device, dtype=p.dtype).reshape(2, *p.shape)
        found[name] = {e.savefield: numbers(getattr(p, e.savefield), vectors).cpu() for e in extensions}
        assert p.grad is not None
        found[name]["grad"] = p.grad.cpu()
    return found


def exact() -> list[BackpropExtension]:
    """All quantities that draw nothing."""
    return [e for e in every_extension() if e.get_num_mc_samples() is None and type(e) not in ELSEWHERE]


def same(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]], tolerance: float) -> None:
    for name, values in expected.items():
        for field, value in values.items():
            error, size = (found[name][field].double() - value).norm(), value.norm()
            assert error <= tolerance * (size + 1e-3), f"{name}.{field}: {error:.1e} of {size:.1e}"


def on_gpu(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """The same problem on the GPU."""
    model, x, y = problem(name)
    x = x.to(dtype) if x.is_floating_point() else x
    return model.to(GPU, dtype), x.to(GPU), y.to(GPU)
