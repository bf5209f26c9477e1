"""torchvision's `resnet18` through the converter: `bpk.extend(model, use_converter=True)`.

The converter turns the additions, the flattening and the activations that are used twice into modules of their own,
with the model's own parameters inside. In evaluation mode, since batch normalisation in training mode mixes
samples, and second order is a sum over separate samples. `bpk` takes `resnet18` without the converter, too, which
is checked at the end.

Prints the table of the graph and the shapes of the GGN diagonal; checks that the graph consists of modules only,
its forward pass, and ten entries of the diagonal against autograd.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import bpk
from _check import agree, compare_diag_ggn, needs, shapes
from _torchvision import import_torchvision
from bpk.custom_module.graph_utils import BackpackTracer
from bpk.extensions import DiagGGNExact


def main() -> None:
    needs("torchvision", "tabulate")
    import_torchvision()
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    from torchvision.models import resnet18

    torch.manual_seed(0)
    original = resnet18(num_classes=5).eval()
    loss_fn = bpk.extend(nn.MSELoss())
    model = bpk.extend(copy.deepcopy(original), use_converter=True)

    graph = BackpackTracer().trace(model)
    graph.print_tabular()
    assert {node.op for node in graph.nodes} == {"placeholder", "call_module", "output"}, "modules only"
    print(model.conversion_report)

    x = torch.rand(4, 3, 64, 64)
    y = torch.rand(4, 5)
    agree("forward pass of the converted network", model(x), original(x))
    loss = loss_fn(model(x), y)
    with bpk.backpack(DiagGGNExact()):
        loss.backward()
    shapes(model, "diag_ggn_exact")
    compare_diag_ggn(x, y, model, loss_fn)

    bpk.extend(original)
    loss = loss_fn(original(x), y)
    with bpk.backpack(DiagGGNExact()):
        loss.backward()
    diagonals = [torch.cat([p.diag_ggn_exact.flatten() for p in m.parameters()]) for m in (original, model)]
    agree(f"without the converter: all {len(diagonals[0])} entries", *diagonals)


if __name__ == "__main__":
    main()
