"""Connectionist temporal classification: the sum over all alignments as a formula that can be differentiated twice.

torch differentiates its own only once, and its gradient is that of `loss + sum exp(log_probs)`: behind a log-softmax
the second term is the constant `T`. The formula contains this term (with value 0), so that gradient and Hessian
belong together (Graves et al., 2006, equations 6 to 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import case
from bpk.jacobians.losses.loss import AutodiffLoss
from bpk.jacobians.losses.loss_call import reduced
from bpk.jacobians.losses.targets import both

IMPOSSIBLE = -1e30
"""The logarithm of zero, in numbers that can be subtracted."""


def ctc(module: nn.CTCLoss, log_p: Tensor, target: Tensor, in_lengths: Tensor, out_lengths: Tensor) -> Tensor:
    """`-log sum_alignments prod_t p_t`, for `log_p` `[N, T, C]`, `target` `[N, S]` and the lengths `[N]` of both."""
    likelihood = alignments(log_p, target, in_lengths, out_lengths, module.blank)
    steps = torch.arange(log_p.shape[1], device=log_p.device) < in_lengths[:, None]
    mass = (log_p.exp().sum(2) * steps).sum(1)
    of_sample = mass - mass.detach() - likelihood
    impossible = likelihood < IMPOSSIBLE / 2
    of_sample = torch.where(impossible, 0.0 if module.zero_infinity else torch.inf, of_sample)
    if module.reduction == "mean":
        of_sample = of_sample / out_lengths.clamp(min=1)
    return reduced(of_sample, module.reduction)


def alignments(log_p: Tensor, target: Tensor, in_lengths: Tensor, out_lengths: Tensor, blank: int) -> Tensor:
    """The logarithm `[N]` of the summed probability of all alignments, by the forward recursion."""
    n, steps, _ = log_p.shape
    labels = target.new_full((n, 2 * target.shape[1] + 1), blank)  # blanks in between
    labels[:, 1::2] = target
    place = torch.arange(labels.shape[1], device=log_p.device)
    may_skip = (labels != blank) & (labels != labels.roll(2, 1)) & (place >= 2)
    emitted = log_p.gather(2, labels[:, None].expand(n, steps, -1))  # [N, T, 2S + 1]
    nothing = torch.full_like(emitted[:, 0], IMPOSSIBLE)
    first = torch.where(in_lengths[:, None] > 0, emitted[:, 0], 0.0)  # without steps, it is sure that there is no label
    alpha = torch.where(place < in_lengths[:, None].clamp(max=1) + 1, first, nothing)
    for t in range(1, steps):
        one, two = (torch.cat([nothing[:, :k], alpha[:, :-k]], 1)[:, : len(place)] for k in (1, 2))
        ways = torch.stack([alpha, one, torch.where(may_skip, two, nothing)])
        alpha = torch.where((t < in_lengths)[:, None], (ways.logsumexp(0) + emitted[:, t]).clamp(IMPOSSIBLE), alpha)
    last = 2 * out_lengths[:, None]
    before = torch.where(last > 0, alpha.gather(1, (last - 1).clamp(min=0)), nothing[:, :1])
    return torch.cat([alpha.gather(1, last), before], 1).logsumexp(1)


class CTC(AutodiffLoss):
    """`nn.CTCLoss`: log-probabilities `[T, N, C]`; targets padded `[N, S]`, or one behind the other."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        log_p, target, in_lengths, out_lengths = named(*args, **kwargs)
        if log_p.dim() < 3:
            return Binding(module, (log_p,), problem="its log-probabilities have no batch axis.", do="write [T, 1, C].")
        ins, outs = (torch.as_tensor(k, device=log_p.device).long() for k in (in_lengths, out_lengths))
        padded = target.to(log_p.device).long()
        if target.dim() == 1:
            padded = nn.utils.rnn.pad_sequence(list(padded.split(outs.tolist())), batch_first=True)
        behind = torch.arange(padded.shape[1], device=log_p.device) >= outs[:, None]  # may hold any number, such as -1
        padded = padded.masked_fill(behind, 0)
        return Binding(module, (log_p, padded, ins, outs), axes=(1, 0, 0, 0))

    def divides_by(self, call: Call) -> int | None:
        """The mean is that of the samples' terms, each divided by the length of its target."""
        return None if call.options.reduction == "sum" else call.batch_size


def named(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any) -> tuple[Any, Any, Any, Any]:
    """The arguments of the forward call, in order."""
    return log_probs, targets, input_lengths, target_lengths


LOG_PROBABILITIES = partial(torch.log_softmax, dim=-1)


def sentences(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Labels `1 .. C - 1` with a repetition, and lengths of inputs and labels."""
    steps, n, classes = shape
    target = torch.randint(1, classes, (n, 2))
    target[0] = target[0, 0]
    return target, torch.tensor([steps] + [steps - 1] * (n - 1)), torch.tensor([2, 1, 0, 2])[:n]


RULES = (
    CTC(
        nn.CTCLoss,
        formula=ctc,
        not_convex="it is not convex in its prediction, so the GGN is not positive semi-definite",
        least_axes=3,
        examples=[
            *both(nn.CTCLoss, (5, 3, 3), sentences, domain=LOG_PROBABILITIES),
            case(nn.CTCLoss, zero_infinity=True, shape=(2, 4, 3), target=sentences, domain=LOG_PROBABILITIES),
        ],
    ),
)
