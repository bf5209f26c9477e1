"""The character network of the recurrent examples, and synthetic text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH, TIME, VOCABULARY, HIDDEN = 8, 15, 25, 64


class CharRNN(nn.Module):
    """Predicts the next character: an embedding, an LSTM of two layers with dropout, and a linear layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, dropout=0.36, batch_first=True)
        self.dense = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, T]` characters -> `[N, C, T]` scores, with the classes where `CrossEntropyLoss` wants them."""
        h, _ = self.lstm(self.dropout(self.embedding(x)))
        return self.dense(self.dropout(h)).permute(0, 2, 1)


def text() -> tuple[Tensor, Tensor]:
    """Random characters `[N, T]`, and what is to be predicted at each position."""
    x = torch.randint(VOCABULARY, (BATCH, TIME))
    return x, torch.cat([torch.randint(VOCABULARY, (BATCH, 1)), x[:, :-1]], 1)


def without_input_biases(model: nn.Module) -> nn.Module:
    """Set the first of an LSTM's two biases, which only add up, to zero, and keep it out of training."""
    for name, p in model.named_parameters():
        if "bias_ih_l" in name:
            nn.init.zeros_(p)
            p.requires_grad = False
    return model
