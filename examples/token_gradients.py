"""Which characters of a text surprise a language model: the norm of the gradient of each character's loss.

The loss of a text adds up a term for each character. `TokenL2Grad` gives the squared norm of the gradient of every
term, `[N, T]`, from one backward pass: a character that the model could foresee asks for no step, one that breaks a
pattern for a large one. Gradients of single characters are not formed.

Prints which character of a text with a misspelt word has the largest gradient, for a GRU that was trained on words in a
fixed order, and compares norms with autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _plots import COLOURS, plot
from bpk.extensions import TokenL2Grad

WORDS = "the rain in spain stays mainly in the plain and "
TEXT = "the rain in spain stays mainxy in the plain"
LETTERS = sorted(set(WORDS + TEXT))


class Speller(nn.Module):
    """Characters `[N, T]` to predictions of the next ones `[N, C, T]`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(len(LETTERS), width), nn.GRU(width, width, batch_first=True)
        self.last = nn.Linear(width, len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gru(self.embedding(x))[0]).transpose(1, 2)


def numbers(text: str) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text]])


def norms(model: nn.Module, loss_fn: nn.Module, text: str) -> Tensor:
    """Of the gradient of each character's loss, from the second one on `[T]`."""
    x = numbers(text)
    total = bpk.Summed("token_l2")
    with bpk.backpack(TokenL2Grad(), extension_hook=total):
        loss_fn(model(x[:, :-1]), x[:, 1:]).backward()
    return total["token_l2"][0].sqrt()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Speller()), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        start = int(torch.randint(len(WORDS), ()))
        x = numbers((WORDS * 2)[start : start + len(WORDS)])
        optimizer.zero_grad()
        with bpk.disable():
            (loss_fn(model(x[:, :-1]), x[:, 1:]) / x.numel()).backward()
        optimizer.step()
    found = norms(model, loss_fn, TEXT)
    letter = int(found[3:].argmax()) + 4  # the first ones cannot be foreseen
    print(f"largest gradient: '{TEXT[letter]}' in '{TEXT[: letter + 1].split()[-1]}...', {found[letter - 1]:.1f}")
    print(f"median over all characters: {found.median():.2f}")

    def draw(axes: Any) -> None:
        colours = [COLOURS[1] if k == letter else COLOURS[0] for k in range(1, len(TEXT))]
        axes.bar(range(1, len(TEXT)), found.numpy(), color=colours)
        axes.set(xticks=range(1, len(TEXT)), xticklabels=TEXT[1:], ylabel="norm of its gradient")
        axes.tick_params(axis="x", labelsize=8, length=0)

    plot("What surprises the model", draw, (4.6, 2.6))

    x, rows = numbers(TEXT), []
    for place in (2, letter):
        term = nn.functional.cross_entropy(model(x[:, :-1])[0, :, place - 1], x[0, place])
        grads = torch.autograd.grad(term, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]).norm())
    agree("norms of two characters' gradients", found[[1, letter - 1]], torch.stack(rows))
    assert TEXT[letter - 1 : letter + 2].strip() in "mainxy in"


if __name__ == "__main__":
    main()
