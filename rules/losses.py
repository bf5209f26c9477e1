"""Losses: pointwise ones as one expression in prediction `x` and target `t`, cross-entropy, and flat ones."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import case
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.losses.flat import ZeroCurvature
from bpk.jacobians.losses.pointwise import PointwiseLoss, before_features, standard_normal
from bpk.jacobians.losses.softmax import SoftmaxCrossEntropy, behind_classes
from bpk.jacobians.losses.targets import (
    LABELS,
    ClassTargets,
    WithVariance,
    both,
    class_probabilities,
    fractions,
    labels,
    numbers_of_events,
    real_numbers,
    signs,
    weights,
)

# ---- weights of terms ---------------------------------------------------------------------------


def class_mean_weight(call: Call) -> Tensor | float:
    """`MultiLabelSoftMarginLoss` divides by the number of classes, also where it sums."""
    weight = 1.0 if call.options.weight is None else call.options.weight
    return weight / call.inputs[0].shape[-1] if call.options.reduction == "sum" else weight


def precision(call: Call) -> Tensor:
    """The inverse of the clamped variance, with the trailing axis that it may lack."""
    x, _, variance = call.inputs
    lacks_axis = variance.shape != x.shape and variance.shape == x.shape[:-1]
    return 1 / wide(variance[..., None] if lacks_axis else variance).clamp(min=call.options.eps)


# ---- standardised scores of predictive distributions --------------------------------------------


def bernoulli_score(call: Call, mc_samples: int) -> Tensor:
    """`(s(x) - y) / sqrt(s(x) s(-x))` for `y` drawn with probability `s(x)`: `exp(x/2)` or `-exp(-x/2)`."""
    x = wide(call.inputs[0])
    ones = torch.rand(mc_samples, *x.shape, dtype=x.dtype, device=x.device) < x.sigmoid()
    sign = 1 - 2 * ones.to(x.dtype)
    return sign * (sign * x / 2).exp()


def poisson_score(call: Call, mc_samples: int) -> Tensor:
    """`(rate - y) / sqrt(rate)` for `y` drawn with `rate = exp(x)`; its normal limit where that is rounded away."""
    normal = standard_normal(call, mc_samples)
    if not call.options.log_input:  # the Fisher is 1/x there, not the Hessian
        return normal
    x = wide(call.inputs[0])
    large = x > 10
    rate = torch.where(large, 0.0, x).exp()
    with torch.no_grad():
        drawn = torch.poisson(torch.where(rate.isnan(), 0.0, rate).expand_as(normal))
    return torch.where(large, normal, (rate - drawn) * (-x.clamp(-100, 10) / 2).exp())


SOME_IGNORED = ClassTargets(ignored=1)
ALL_SHAPES: tuple[tuple[int, ...], ...] = ((3,), (3, 2), (2, 3, 2))
CE, BCE, NLL, GAUSS = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.NLLLoss, nn.GaussianNLLLoss

RULES = (
    PointwiseLoss(
        "(x - t)**2",
        nn.MSELoss,
        convex=True,
        examples=[e for shape in ALL_SHAPES for e in both(nn.MSELoss, shape, real_numbers)],
    ),
    PointwiseLoss(
        "where(abs(x - t) < delta, (x - t)**2 / 2, delta * (abs(x - t) - delta / 2))",
        nn.HuberLoss,
        convex=True,
        examples=[*both(nn.HuberLoss, (3, 4), real_numbers), *both(nn.HuberLoss, (3, 4), real_numbers, delta=0.5)],
    ),
    PointwiseLoss(
        "where(abs(x - t) < beta, (x - t)**2 / (2 * beta), abs(x - t) - beta / 2)",
        nn.SmoothL1Loss,
        convex=True,
        examples=[e for beta in (1.0, 0.5, 0.0) for e in both(nn.SmoothL1Loss, (3, 4), real_numbers, beta=beta)],
    ),
    PointwiseLoss(
        "(1 - t) * x + (1 + (pos_weight - 1) * t) * softplus(-x)",
        nn.BCEWithLogitsLoss,
        weight=attrgetter("options.weight"),
        draw=bernoulli_score,
        examples=[
            *both(BCE, (4,), labels),
            *both(BCE, (3, 2), fractions),
            *both(BCE, (2, 3, 2), labels, weight=weights(0.5, 2.0), pos_weight=weights(1.0, 3.0, 0.5)[:, None]),
        ],
    ),
    PointwiseLoss(
        "(1 - t) * x + softplus(-x)",
        nn.MultiLabelSoftMarginLoss,
        weight=class_mean_weight,
        draw=bernoulli_score,
        examples=[
            *both(nn.MultiLabelSoftMarginLoss, (3, 2), labels),
            *both(nn.MultiLabelSoftMarginLoss, (2, 3, 2), labels, weight=weights(0.5, 2.0)),
        ],
    ),
    PointwiseLoss(
        "-t * log(x + 1e-12) - (1 - t) * log(abs(1 - x) + 1e-12)",  # as torch has it; `abs` keeps the numbers apart
        nn.BCELoss,
        weight=attrgetter("options.weight"),
        examples=[
            case(nn.BCELoss, shape=(3, 2), target=labels, domain=torch.sigmoid),
            case(
                nn.BCELoss,
                weight=weights(0.5, 2.0),
                reduction="sum",
                shape=(3, 2),
                target=fractions,
                domain=torch.sigmoid,
            ),
        ],
    ),
    PointwiseLoss(
        "softplus(-t * x)",
        nn.SoftMarginLoss,
        draw=bernoulli_score,
        convex=True,
        examples=both(nn.SoftMarginLoss, (3, 2), signs),
    ),
    PointwiseLoss(
        {True: "exp(x) - t * x", False: "x - t * log(x + eps)"},
        nn.PoissonNLLLoss,
        choose="log_input",
        draw=poisson_score,
        examples=[
            *both(nn.PoissonNLLLoss, (3, 2), numbers_of_events),
            *both(nn.PoissonNLLLoss, (3, 2), numbers_of_events, full=True),
            case(nn.PoissonNLLLoss, log_input=False, eps=0.1, shape=(3, 2), target=numbers_of_events, domain=torch.exp),
        ],
    ),
    PointwiseLoss(
        "(x - t)**2 / 2",
        nn.GaussianNLLLoss,
        weight=precision,
        convex=True,
        examples=[
            *both(GAUSS, (3, 2), WithVariance()),
            *both(GAUSS, (3, 2), WithVariance(along=1), eps=0.9),
            *both(GAUSS, (3, 2), WithVariance(lacks=1), full=True),
            *both(GAUSS, (2, 3, 2), WithVariance(along=1)),
        ],
    ),
    SoftmaxCrossEntropy(
        nn.CrossEntropyLoss,
        examples=[
            *both(CE, (4, 3), LABELS),
            *both(CE, (4, 3), SOME_IGNORED, weight=weights(0.5, 1.0, 2.0), ignore_index=1),
            *both(CE, (4, 3), SOME_IGNORED, weight=weights(0.5, 1.0, 2.0), ignore_index=1, label_smoothing=0.2),
            *both(CE, (4, 3), class_probabilities),
            *both(CE, (4, 3), class_probabilities, weight=weights(0.5, 1.0, 2.0), label_smoothing=0.2),
            *both(CE, (3, 2, 4), LABELS, label_smoothing=0.1),
            *both(CE, (3, 3, 2, 2), SOME_IGNORED, weight=weights(0.5, 1.0, 2.0), ignore_index=1),
            *both(CE, (3, 2, 2), class_probabilities, weight=weights(0.5, 2.0), label_smoothing=0.2),
        ],
    ),
    ZeroCurvature(
        "NLLLoss is linear in its input: its Hessian, and with it every GGN quantity, is zero. Remove LogSoftmax from "
        "the end of the model and use CrossEntropyLoss on the logits.",
        nn.NLLLoss,
        least_axes=2,
        adds_up=behind_classes,
        examples=[
            *both(NLL, (4, 3), LABELS),
            *both(NLL, (3, 2, 4), SOME_IGNORED, weight=weights(0.5, 2.0), ignore_index=1),
        ],
    ),
    ZeroCurvature(
        "KLDivLoss is linear in its input: its Hessian, and with it every GGN quantity, is zero. Remove LogSoftmax "
        "from the end of the model and use CrossEntropyLoss with probability targets on the logits.",
        nn.KLDivLoss,
        adds_up=before_features,
        examples=[
            case(nn.KLDivLoss, reduction="batchmean", shape=(3, 2), target=class_probabilities),
            case(nn.KLDivLoss, reduction="sum", log_target=True, shape=(3, 2), target=real_numbers),
        ],
    ),
    ZeroCurvature(
        "L1Loss is piecewise linear: its Hessian, and with it every GGN quantity, is zero. Use MSELoss or HuberLoss.",
        nn.L1Loss,
        adds_up=before_features,
        examples=both(nn.L1Loss, (3, 2), real_numbers),
    ),
)
