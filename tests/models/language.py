"""Language models as people write them: see `test_any_model.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.handwritten import Case


def tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(vocabulary, shape)


class CausalSelfAttention(nn.Module):
    """One linear layer for queries, keys and values; heads by `view`; a mask in a buffer, or the fused function."""

    def __init__(self, width: int, heads: int, length: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    """Normalisation before or after attention and the perceptron."""

    def __init__(self, width: int, heads: int, length: int, fused: bool, first: bool) -> None:
        super().__init__()
        self.first = first
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, length, fused)
        self.c_fc, self.c_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def mlp(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks in a loop, and the token embedding as the output layer."""

    def __init__(self, vocabulary: int = 5, length: int = 3, width: int = 4, fused: bool = False, first: bool = True):
        super().__init__()
        self.length = length
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(length, width),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([Block(width, 2, length, fused, first) for _ in range(1)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        assert t <= self.length, "the sequence is too long"
        position = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](position))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits.view(-1, logits.size(-1))


def gpt() -> Case:
    return Case(GPT(), nn.CrossEntropyLoss(), (tokens(5, 3, 3),), (tokens(5, 9),))


def gpt_fused_post_norm() -> Case:
    loss = nn.CrossEntropyLoss(ignore_index=0)
    return Case(GPT(fused=True, first=False), loss, (tokens(5, 3, 3),), (tokens(5, 9),))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of `[N, heads, T, D]`."""
    T, D = x.shape[-2:]
    frequency = 1.0 / (100 ** (torch.arange(0, D, 2, dtype=x.dtype) / D))
    angle = torch.outer(torch.arange(T, dtype=x.dtype), frequency)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Llama(nn.Module):
    """RMSNorm, rotary positions, attention by einsum, SwiGLU, tied embeddings."""

    def __init__(self, vocabulary: int = 5, width: int = 4, heads: int = 2, hidden: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.n1, self.n2, self.norm = RMSNorm(width), RMSNorm(width), RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        B, T, D = x.shape
        h = self.n1(x)
        q, k, v = (w(h).reshape(B, T, self.heads, -1).permute(0, 2, 1, 3) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q), rotated(k)
        att = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(D // self.heads)
        att = att + torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1)
        y = torch.einsum("bhij,bhjd->bhid", att.softmax(-1), v).permute(0, 2, 1, 3).reshape(B, T, D)
        x = x + self.wo(y)
        h = self.n2(x)
        x = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return self.head(self.norm(x))


class NextToken(nn.Module):
    """A loss of its own that flattens the predictions."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def llama() -> Case:
    return Case(Llama(), NextToken(), (tokens(5, 3, 3),), (tokens(5, 3, 3),))


class Alibi(nn.Module):
    """Positions by a linear bias, and as a parameter; the last position classifies."""

    def __init__(self, width: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(5, width), heads
        self.pos = nn.Parameter(0.1 * torch.randn(1, 6, width))
        self.q, self.kv, self.head = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, 3)
        self.register_buffer("slopes", torch.tensor([2.0 ** -(i + 1) for i in range(heads)]))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx) + self.pos[:, : idx.shape[1]]
        T = x.shape[1]
        k, v = self.kv(x).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), k, v))
        distance = torch.arange(T)[None, :] - torch.arange(T)[:, None]
        bias = self.slopes[:, None, None] * distance.to(x.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(distance > 0, -1e9))
        return self.head((x + y.transpose(1, 2).flatten(2))[:, -1])


def alibi() -> Case:
    return Case(Alibi(), nn.CrossEntropyLoss(), (tokens(5, 3, 4),), (tokens(3, 3),))


class PaddedText(nn.Module):
    """A class token, padding that is masked in attention, and a mean over what is no padding."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed, self.cls = nn.Embedding(6, width, padding_idx=0), nn.Parameter(torch.randn(1, 1, width))
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(2 * width, 3)

    def forward(self, idx: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(idx), -1, -1), self.embed(idx)], 1)
        keep = torch.cat([torch.ones(len(idx), 1, dtype=torch.bool), idx != 0], 1)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.bmm(q, k.mT).masked_fill(~keep[:, None], float("-inf"))
        y = torch.bmm(scores.softmax(-1), v)
        words = keep[:, 1:, None].to(y.dtype)
        return self.head(torch.cat([y[:, 0], (y[:, 1:] * words).sum(1) / words.sum(1)], -1))


def padded_text() -> Case:
    idx = torch.tensor([[1, 2, 0], [3, 0, 0], [1, 4, 5]])
    return Case(PaddedText(), nn.CrossEntropyLoss(label_smoothing=0.1), (idx,), (tokens(3, 3),))


class Translator(nn.Module):
    """An encoder and a decoder that attends to it step by step; three places share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.encode, self.update, self.out = nn.Linear(2, 2), nn.Linear(6, 2), nn.Linear(2, 4)
        self.out.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = torch.tanh(self.encode(self.embed(source)))
        h = memory.mean(1)
        logits = []
        for t in range(target.shape[1]):
            weights = F.softmax(torch.bmm(memory, h.unsqueeze(2)).squeeze(2), 1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            h = torch.tanh(self.update(torch.cat((self.embed(target[:, t]), context, h), 1)))
            logits.append(self.out(h))
        return torch.stack(logits, dim=2)


def translator() -> Case:
    return Case(Translator(), nn.CrossEntropyLoss(), (tokens(4, 3, 3), tokens(4, 3, 2)), (tokens(4, 3, 2),))


CASES: tuple[Callable[[], Case], ...] = (gpt, gpt_fused_post_norm, llama, alibi, padded_text, translator)
