"""Networks as they are written around `F.scaled_dot_product_attention`: a ViT, and a GPT with tied embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each behind a normalisation and beside the identity."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Images `[N, C, H, W] -> [N, classes]`: patches, a token for the class, positions (Dosovitskiy et al., 2021)."""

    def __init__(
        self,
        side: int = 32,
        patch: int = 4,
        channels: int = 3,
        width: int = 64,
        heads: int = 4,
        layers: int = 4,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class GPT(nn.Module):
    """Words `[N, T]` to predictions of the next `[N, V, T]`; embedding and last layer share their weight."""

    def __init__(
        self, vocabulary: int = 256, steps: int = 64, width: int = 64, heads: int = 4, layers: int = 4
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(steps, width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.2)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def tiny_vit() -> ViT:
    """Five tokens of width 4."""
    return ViT(side=4, patch=2, channels=2, width=4, heads=2, layers=1, classes=3)


def tiny_gpt() -> GPT:
    """Four words of a vocabulary of five, of width 4."""
    return GPT(vocabulary=5, steps=4, width=4, heads=2, layers=1)
