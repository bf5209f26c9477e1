"""Losses of several predictions (outputs of one encoder), and margins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.losses.flat import ZeroCurvature
from bpk.jacobians.losses.loss import AutodiffLoss
from bpk.jacobians.losses.loss_call import reduced
from bpk.jacobians.losses.targets import LABELS, both, real_numbers, signs, weights

DISTANCE = (
    "it is not convex in its predictions (a distance enters with a negative sign), so the GGN is not positive "
    "semi-definite"
)
COSINE = "it is not convex in its predictions (a cosine is not), so the GGN is not positive semi-definite"
MARGIN = "is piecewise linear: its Hessian, and with it every GGN quantity, is zero."


def multi_margin(module: nn.MultiMarginLoss, x: Tensor, target: Tensor) -> Tensor:
    """`sum_i max(0, margin - x_y + x_i)^p w_y / C` over `i != y`: torch differentiates its own only once."""
    own = x.gather(1, target[:, None])
    terms = (module.margin - own + x).clamp(min=0) ** module.p
    if module.weight is not None:
        terms = terms * module.weight.to(x)[target][:, None]
    of_sample = terms.scatter(1, target[:, None], 0.0).mean(1)
    return reduced(of_sample, module.reduction)


def two_predictions(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A second prediction, and a sign for each sample."""
    return real_numbers(shape), signs(shape[:1])


def two_scores(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A second prediction, and a sign for each of its entries."""
    return real_numbers(shape), signs(shape)


def two_more(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A positive and a negative example."""
    return real_numbers(shape), real_numbers(shape)


def some_classes(shape: tuple[int, ...]) -> Tensor:
    """Class indices of each sample, ended by -1."""
    first = torch.stack([torch.randperm(shape[1]) for _ in range(shape[0])])
    first[:, 1 + shape[1] // 2 :] = -1
    return first


class HeadInside(AutodiffLoss):
    """`nn.LinearCrossEntropyLoss`: the last layer of a model and its loss in one module."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        binding = super().bind(module, args, kwargs)
        return dataclasses.replace(binding, do="write the same as nn.Linear and nn.CrossEntropyLoss, or freeze it.")


def frozen_linear_loss(*args: Any, **kwargs: Any) -> nn.Module:
    """The loss as a function of features alone."""
    return nn.LinearCrossEntropyLoss(*args, **kwargs).requires_grad_(False)


def head_inside() -> tuple[AutodiffLoss, ...]:
    """The rule of a loss that torch has had since 2.13."""
    if torch.__version__ < "2.13":
        return ()
    examples = [
        case(frozen_linear_loss, 3, 4, shape=(4, 3), target=LABELS),
        case(frozen_linear_loss, 3, 4, bias=True, reduction="sum", label_smoothing=0.1, shape=(4, 3), target=LABELS),
    ]
    return (HeadInside(nn.LinearCrossEntropyLoss, examples=examples),)


COSINES, MARGINS = nn.CosineEmbeddingLoss, nn.MultiMarginLoss
TRIPLET, TRIPLET_WITH = nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss


def triplets() -> tuple[Example, ...]:
    """Cases of both triplet losses."""
    return (
        case(TRIPLET, shape=(4, 3), target=two_more, margin=2.0),
        case(TRIPLET, shape=(4, 3), target=two_more, swap=True, p=3.0, margin=2.0, reduction="sum"),
        case(TRIPLET, shape=(2, 3, 2), target=two_more, margin=2.0),
        case(TRIPLET_WITH, distance_function=nn.CosineSimilarity(), shape=(4, 3), target=two_more, swap=True),
    )


RULES = (
    AutodiffLoss(TRIPLET, TRIPLET_WITH, predictions=(0, 1, 2), not_convex=DISTANCE, examples=triplets()),
    AutodiffLoss(
        COSINES,
        predictions=(0, 1),
        not_convex=COSINE,
        least_axes=2,
        examples=both(COSINES, (4, 3), two_predictions, margin=-0.5),
    ),
    AutodiffLoss(
        MARGINS,
        formula=multi_margin,
        least_axes=2,
        examples=[
            case(MARGINS, shape=(4, 3), target=LABELS),
            *both(MARGINS, (4, 3), LABELS, p=2, margin=0.7, weight=weights(0.5, 1.0, 2.0)),
        ],
    ),
    *head_inside(),
    ZeroCurvature(
        f"MultiLabelMarginLoss {MARGIN} Use MultiLabelSoftMarginLoss.",
        nn.MultiLabelMarginLoss,
        least_axes=2,
        examples=both(nn.MultiLabelMarginLoss, (4, 3), some_classes),
    ),
    ZeroCurvature(
        f"MarginRankingLoss {MARGIN} Use SoftMarginLoss on the difference of the predictions.",
        nn.MarginRankingLoss,
        predictions=(0, 1),
        examples=both(nn.MarginRankingLoss, (4,), two_scores),
    ),
    ZeroCurvature(
        f"HingeEmbeddingLoss {MARGIN} Use SoftMarginLoss.",
        nn.HingeEmbeddingLoss,
        examples=both(nn.HingeEmbeddingLoss, (4, 3), signs, margin=0.5),
    ),
)
