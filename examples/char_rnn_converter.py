"""The character-level recurrent network through the converter: `bpk.extend(model, use_converter=True)`.

The converter rewrites a forward pass written by hand as a graph made of modules, which shares the model's
parameters. An LSTM of two layers becomes two of one layer with dropout in between; unpacking and `permute` become
modules. `bpk` takes the network as it is, too; the converter is for those who want to see, or work with, a graph of
modules.

Prints the table of the graph and what was renamed. Checks that it consists of modules only, its forward pass, ten
entries of the GGN diagonal against autograd, and that the network itself, not converted, has the same diagonal.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import bpk
from _char_rnn import CharRNN, text, without_input_biases
from _check import agree, compare_diag_ggn, shapes
from bpk.custom_module.graph_utils import BackpackTracer
from bpk.extensions import DiagGGNExact


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(1)
    by_hand = without_input_biases(CharRNN()).eval()
    torch.manual_seed(0)
    x, y = text()
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    model = bpk.extend(copy.deepcopy(by_hand), use_converter=True)

    graph = BackpackTracer().trace(model)
    graph.print_tabular()
    assert {node.op for node in graph.nodes} == {"placeholder", "call_module", "output"}, "modules only"
    print(model.conversion_report)
    agree("forward pass of the converted network", model(x), by_hand(x))

    loss = loss_fn(model(x), y)
    with bpk.backpack(DiagGGNExact()):
        loss.backward()
    shapes(model, "diag_ggn_exact")
    compare_diag_ggn(x, y, model, loss_fn)

    original = bpk.extend(by_hand)
    loss = loss_fn(original(x), y)
    with bpk.backpack(DiagGGNExact()):
        loss.backward()
    pairs = zip(original.named_parameters(), model.parameters(), strict=True)
    for (name, p), q in pairs:
        if p.requires_grad:
            agree(f"without the converter: {name}", p.diag_ggn_exact, q.diag_ggn_exact)


if __name__ == "__main__":
    main()
