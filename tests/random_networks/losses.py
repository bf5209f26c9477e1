"""The losses of random networks: those of the registry with the options of its examples, and those without a rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bpk.jacobians.losses.loss import AutodiffLoss
from tests.random_networks.modules import Coupled, LogCosh
from tests.random_networks.program import EXAMPLES, LOSSES, Writer

MOST = 12
"""Entries of a prediction per sample."""
REGISTERED = (AutodiffLoss(LogCosh), AutodiffLoss(Coupled))
"""Rules of losses that are registered while a network is examined."""


@dataclass
class Term:
    """`factor * module(*predictions, *targets)`, the predictions being results of the model by number."""

    module: nn.Module
    targets: tuple[Tensor, ...]
    factor: float = 1.0
    predictions: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in self.targets]
        return f"{self.factor} * {self.module}(results {self.predictions}, targets {shapes})"


Head = Callable[[str, int, int], None]
"""`head(x, size, out)` writes a last linear layer."""


def sequence_loss(w: Writer, r: random.Random, head: Head, positions: bool) -> Term:
    """Cross-entropy over positions, as an extra axis or with positions among the rows."""
    head("x", w.sizes[-1], 3)
    target = torch.randint(3, (len(w.x), w.sizes[0]))
    if r.random() < 0.3:
        target[0, 0] = -100
    weight = torch.tensor([0.5, 1.0, 2.0]).double() if r.random() < 0.3 else None
    smoothing = r.choice([0.0, 0.0, 0.1])
    loss_fn = nn.CrossEntropyLoss(reduction=r.choice(["mean", "sum"]), weight=weight, label_smoothing=smoothing)
    if positions:
        w.tag("loss over an extra axis")
        w.line("x = x.transpose(1, 2)")
        return Term(loss_fn, (target,))
    w.kronecker = False
    w.tag("loss on rows of all positions")
    w.line(r.choice(["x = x.reshape(-1, 3)", "x = x.flatten(0, 1)"]))
    return Term(loss_fn, (target.flatten(),))


def of_example(w: Writer, r: random.Random, head: Head, number: int) -> Term:
    """A loss with a rule, with the options, shapes and targets of an example."""
    example = EXAMPLES[number]
    pred, *targets = example.inputs(batch=len(w.x))
    if w.sizes != tuple(pred.shape[1:]) or r.random() < 0.5:
        head("x.flatten(1)", w.x[0].numel(), pred[0].numel())
        if pred.dim() == 1:
            w.line("x = x.squeeze(1)")
        elif pred.dim() > 2:
            w.line(f"x = x.reshape(-1, {', '.join(map(str, pred.shape[1:]))})")
    if example.domain is not None:
        w.line("x = torch.sigmoid(x) * 0.9 + 0.05")
    return Term(example.build().double(), tuple(targets))


def of_one_tensor(w: Writer, r: random.Random, head: Head) -> Term:
    """A loss without a rule, or one whose rule differentiates by itself."""
    if w.x[0].numel() > MOST or w.x.dim() != 2 or r.random() < 0.5:
        head("x.flatten(1)", w.x[0].numel(), 3)
    reduction, n, c = r.choice(["mean", "sum"]), len(w.x), w.sizes[0]
    kind = r.choice(["LogCosh", "Coupled", "Multi", "MultiLabel", "Hinge", "CTC", "Mean"])
    if kind == "LogCosh":
        return Term(LogCosh(reduction), (torch.randn(n, c).double(),))
    if kind == "Coupled":
        return Term(Coupled(reduction), (torch.randn(n, c).double(),))
    if kind == "Multi":
        return Term(nn.MultiMarginLoss(p=r.choice([1, 2]), reduction=reduction), (torch.randint(c, (n,)),))
    if kind == "MultiLabel":
        target = torch.full((n, c), -1)
        target[:, 0] = torch.randint(c, (n,))
        return Term(nn.MultiLabelMarginLoss(reduction=reduction), (target,))
    if kind == "Hinge":
        return Term(nn.HingeEmbeddingLoss(reduction=reduction), (2.0 * torch.randint(2, (n, c)).double() - 1,))
    if kind == "CTC":
        head("x", c, 9)
        w.kronecker = False
        w.line("x = x.reshape(-1, 3, 3).transpose(0, 1).log_softmax(2)")
        w.time_first = True
        lengths = torch.full((n,), 3), torch.full((n,), 2)
        return Term(nn.CTCLoss(reduction=reduction), (torch.randint(1, 3, (n, 2)), *lengths))
    return Term(nn.MSELoss(reduction=reduction), (torch.randn(w.x.shape).double(),))


def of_several_tensors(w: Writer, r: random.Random) -> Term:
    """A loss that compares results of the model with each other."""
    reduction, n = r.choice(["mean", "sum"]), len(w.x)
    name = w.layer("nn.Linear(2, 2)")
    w.line("x = x.flatten(1)[:, :2]")
    w.line(f"y = {name}(x)")
    w.line(f"z = {name}(y.tanh())")
    w.outputs[:] = ["x", "y", "z"]
    w.kronecker = False  # the reference counts uses that feed any result, read by the loss or not
    w.tag("loss of several results")
    signs = 2.0 * torch.randint(2, (n,)).double() - 1
    losses = (
        Term(nn.CosineEmbeddingLoss(reduction=reduction), (signs,), predictions=(0, 1)),
        Term(nn.MarginRankingLoss(reduction=reduction), (signs[:, None],), predictions=(0, 1)),
        Term(nn.TripletMarginLoss(reduction=reduction), (), predictions=(0, 1, 2)),
        Term(nn.TripletMarginWithDistanceLoss(reduction=reduction), (), predictions=(0, 1, 2)),
        Term(nn.MSELoss(reduction=reduction), (), predictions=(0, 1)),
    )
    return r.choice(losses)


def add_terms(kind: int | str, w: Writer, r: random.Random, head: Head, also: bool) -> list[Term]:
    """Bring the model's results into the shape of predictions, and give the losses of them."""
    n, reduction = len(w.inputs[0]), r.choice(["mean", "sum"])
    if kind == "several" and w.x[0].numel() >= 2 and len(w.outputs) == 1:
        return [of_several_tensors(w, r)]
    if kind in ("flat", "positions") and w.x.dim() == 3 and w.sizes[0] <= MOST // 3:
        terms = [sequence_loss(w, r, head, kind == "positions")]
    elif kind == "other":
        terms = [of_one_tensor(w, r, head)]
    elif isinstance(kind, str):
        if w.x[0].numel() > MOST or r.random() < 0.5:
            head("x.flatten(1)", w.x[0].numel(), 3)
        terms = [Term(nn.MSELoss(reduction=reduction), (torch.randn(w.x.shape).double(),))]
    else:
        terms = [of_example(w, r, head, kind)]
    if also:
        w.tag("sum of two losses")
        terms.append(Term(nn.MSELoss(reduction=reduction), (torch.randn(w.x.shape).double(),), 0.7))
    if len(w.outputs) > 1:
        size = tuple(w.space["aux"].shape[1:])
        if r.random() < 0.6:
            w.tag("losses of several results")
            terms.append(Term(nn.MSELoss(reduction=reduction), (torch.randn(n, *size).double(),), 0.5, (1,)))
        else:
            w.tag("one of several results unused")
    return terms


__all__ = ["LOSSES", "MOST", "REGISTERED", "Head", "Term", "add_terms"]
