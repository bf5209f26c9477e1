"""A Transformer language model by hand: merged heads, a causal mask, and a table shared by embedding and output layer.

The shared table gets one field of each kind. Both of its uses are in there, and so is what couples them: its
individual gradients are those of the tied parameter, not of two.

Prints the norm of each line's gradient (the one without sense is hardest) and the curvature of each part; verifies both
against plain autograd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from _blocks import curvature, gradient_norms, verified
from bpk.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian
from bpk.progress import followed

LINES = (
    "the cat sat on the mat",
    "the dog sat on the log",
    "a cat ran to the house",
    "a dog ran to the woods",
    "the hen hid in the hay",
    "tca hse o hmtt at enta",  # nothing to learn here
)
LETTERS = sorted(set("".join(LINES)))
STEPS = 100


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("later", torch.ones(length, length).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        N, T, D = x.shape
        q, k, v = (part.view(N, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(D // self.heads)
        scores = scores.masked_fill(self.later[:T, :T], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(N, T, D))


class Block(nn.Module):
    """Attention and a perceptron, each behind a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, length)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """`[N, T]` letters -> `[N T, letters]` scores of the next one."""

    def __init__(self, vocabulary: int, length: int, width: int = 8, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.2)
        self.head.weight = self.token.weight

    def forward(self, letters: Tensor) -> Tensor:
        x = self.token(letters) + self.position(torch.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits.view(-1, logits.shape[-1])


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    text = torch.tensor([[LETTERS.index(letter) for letter in line] for line in LINES])
    x, y = text[:, :-1], text[:, 1:]
    model = bpk.extend(LanguageModel(len(LETTERS), x.shape[1]))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in followed("step", range(STEPS)):
        optimizer.zero_grad()
        loss_fn(model(x), y.flatten()).backward()
        optimizer.step()

    with bpk.backpack(BatchGrad()):
        loss_fn(model(x), y.flatten()).backward()
    print("the norm of each line's gradient:")
    for line, norm in zip(LINES, gradient_norms(model).tolist(), strict=True):
        print(f"  {line}  {norm:.3f}")

    x, y = x[:, :6], y[:, :6].flatten()  # exact Hessian diagonals cost a column for every nonlinear entry
    with bpk.backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), KFAC(mc_samples=10)):
        loss_fn(model(x), y).backward()
    print("curvature for the first six letters of each line:")
    curvature("a Transformer", model, lambda name: name.rpartition(".")[0])
    verified(model, loss_fn, x, y)


if __name__ == "__main__":
    main()
