"""Curvature of a data set: learn new digits without forgetting the old ones, and merge two models by what each knows.

`bpk.accumulate` passes over a loader once and gives the diagonal of the GGN (for cross-entropy: of the Fisher
information) of all its samples, as one large batch would. Elastic weight consolidation (Kirkpatrick et al., 2017) holds
each weight back in proportion to it: after the digits 0 to 4, the digits 5 to 9 are learnt with the penalty
`strength / 2 * sum_i F_i (w_i - w_i*)^2`, and by plain SGD. Fisher merging (Matena and Raffel, 2022) averages the
weights of two models, one tuned to each half of the digits, in proportion to each model's own diagonal.

Prints accuracies on held-out digits of both halves, with and without; checks the diagonal against one large batch, and
a run that is stopped in the middle against one that is not.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bpk
from _check import agree
from _digits import load_digits
from bpk.extensions import DiagGGNExact

STEPS, BATCH, STRENGTH = 150, 64, 2e4
Diagonal = dict[str, Tensor]


def network() -> nn.Sequential:
    """A small network for images of digits."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 10))


def train(
    model: nn.Module, data: TensorDataset, steps: int, penalty: Callable[[nn.Module], Tensor] | None = None
) -> nn.Module:
    """Some steps of SGD with momentum."""
    loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer, done = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss if penalty is None else loss + penalty(model)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
    return model


def fisher(model: nn.Module, data: TensorDataset, checkpoint: Path | None = None, limit: int | None = None) -> Diagonal:
    """The diagonal of the GGN of a data set; `limit` stops in the middle, after so many batches."""

    def step(model: nn.Module, loss_fn: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal limit
        if limit == 0:
            raise KeyboardInterrupt
        limit = None if limit is None else limit - 1
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    loader = DataLoader(data, BATCH)
    found = bpk.accumulate(
        model, nn.CrossEntropyLoss(), loader, DiagGGNExact(), step=step, checkpoint=checkpoint, every=3
    )
    return found.field("diag_ggn_exact")


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of digits that are recognised."""
    x, y = data.tensors
    return (model(x).argmax(1) == y).double().mean().item()


def report(what: str, model: nn.Module, *halves: TensorDataset) -> None:
    """Print accuracies on both halves."""
    first, second = (accuracy(model, half) for half in halves)
    print(f"  {what:<44} digits 0-4: {first:4.0%}   digits 5-9: {second:4.0%}   mean {(first + second) / 2:4.0%}")


def merged(models: list[nn.Module], diagonals: list[Diagonal]) -> nn.Module:
    """`w_i = sum_m F_mi w_mi / sum_m F_mi`."""
    result = copy.deepcopy(models[0])
    with torch.no_grad():
        for name, p in result.named_parameters():
            weights = torch.stack([diagonal[name] + 1e-6 for diagonal in diagonals])
            values = torch.stack([model.get_parameter(name) for model in models])
            p.copy_((weights * values).sum(0) / weights.sum(0))
    return result


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    print(f"{digits.name}: {len(digits.train_x)} images to train on")

    def half(x: Tensor, y: Tensor, first: bool) -> TensorDataset:
        chosen = (y < 5) == first
        return TensorDataset(x[chosen], y[chosen])

    old, new = (half(digits.train_x, digits.train_y, first) for first in (True, False))
    held_out = [half(digits.test_x, digits.test_y, first) for first in (True, False)]

    print("Elastic weight consolidation: digits 0-4 first, then 5-9")
    model = network()
    model(digits.train_x[:1])
    train(model, old, STEPS)
    report("after the digits 0-4", model, *held_out)
    curvature, start = fisher(model, old), {name: p.detach().clone() for name, p in model.named_parameters()}

    def stay(model: nn.Module) -> Tensor:
        away = [(curvature[name] * (p - start[name]).square()).sum() for name, p in model.named_parameters()]
        return STRENGTH / 2 * torch.stack(away).sum()

    report("then 5-9 by plain SGD", train(copy.deepcopy(model), new, STEPS), *held_out)
    report("then 5-9 with the penalty", train(copy.deepcopy(model), new, STEPS, stay), *held_out)

    print("Fisher merging: a common start, tuned to 0-4 and to 5-9")
    common = train(network_like(model), TensorDataset(digits.train_x, digits.train_y), 20)
    tuned = [train(copy.deepcopy(common), data, 60) for data in (old, new)]
    for name, one in zip(("tuned to 0-4", "tuned to 5-9"), tuned, strict=True):
        report(name, one, *held_out)
    same = {name: torch.ones_like(p) for name, p in common.named_parameters()}
    report("mean of the weights", merged(tuned, [same, same]), *held_out)
    diagonals = [fisher(one, data) for one, data in zip(tuned, (old, new), strict=True)]
    report("weighted by the diagonals", merged(tuned, diagonals), *held_out)

    print("The data set's diagonal")
    large = bpk.extend(copy.deepcopy(model))
    with bpk.backpack(DiagGGNExact()):
        bpk.extend(nn.CrossEntropyLoss())(large(old.tensors[0]), old.tensors[1]).backward()
    agree("of all batches, against one large batch", curvature["1.weight"], large[1].weight.diag_ggn_exact)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fisher.ckpt")
        try:
            fisher(model, old, path, limit=7)
        except KeyboardInterrupt:
            print(f"  stopped in the middle; {path.name} has {path.stat().st_size // 1024} KiB")
        agree("of a run that was stopped, and went on", fisher(model, old, path)["1.weight"], curvature["1.weight"], 0)


def network_like(model: nn.Module) -> nn.Module:
    """The same network with weights of its own."""
    fresh = copy.deepcopy(model)
    for layer in fresh.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return fresh


if __name__ == "__main__":
    main()
