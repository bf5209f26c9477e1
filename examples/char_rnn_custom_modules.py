"""A character-level recurrent network as a container of modules: `ReduceTuple` and `Permute` in place of functions.

`nn.LSTM` returns a tuple; `ReduceTuple(index=0)` passes its output on and leaves the states. `Permute(0, 2, 1)`
moves the classes to axis 1. Two LSTMs of one layer each, with dropout in between, are what `nn.LSTM(num_layers=2)`
computes.

Prints the shapes of individual gradients and of the GGN diagonal. Checks that the forward pass is that of the
network written by hand, ten entries of the diagonal against autograd, and one sample's gradient against its own
backward pass.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bpk
from _char_rnn import BATCH, HIDDEN, VOCABULARY, CharRNN, text, without_input_biases
from _check import agree, compare_diag_ggn, shapes
from bpk.custom_module.permute import Permute
from bpk.custom_module.reduce_tuple import ReduceTuple
from bpk.extensions import BatchGrad, DiagGGNExact


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    x, y = text()
    torch.manual_seed(1)
    by_hand = without_input_biases(CharRNN()).eval()  # without dropout, results can be compared
    torch.manual_seed(1)  # the same weights: layers draw them in the same order
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, HIDDEN),
        nn.Dropout(0.2),
        nn.LSTM(HIDDEN, HIDDEN, batch_first=True),
        ReduceTuple(index=0),
        nn.Dropout(0.36),
        nn.LSTM(HIDDEN, HIDDEN, batch_first=True),
        ReduceTuple(index=0),
        nn.Dropout(0.2),
        nn.Linear(HIDDEN, VOCABULARY),
        Permute(0, 2, 1),
    ).eval()
    without_input_biases(model)
    print(model)
    agree("forward pass of the modules, against the one by hand", model(x), by_hand(x))

    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(x), y)
    with bpk.backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    shapes(model, "grad_batch", "diag_ggn_exact")
    compare_diag_ggn(x, y, model, loss_fn)

    sample, trainable = 3, {name: p for name, p in model.named_parameters() if p.requires_grad}
    own = cross_entropy(model(x[[sample]]), y[[sample]]) / BATCH
    for (name, p), want in zip(trainable.items(), torch.autograd.grad(own, list(trainable.values())), strict=True):
        agree(f"grad_batch[{sample}] of {name}", p.grad_batch[sample], want)


if __name__ == "__main__":
    main()
