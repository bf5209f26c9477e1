"""Losses with `reduction="none"`, whose terms the user's functions add up with weights.

The gradient of an objective in the terms of a loss is their weights, if it is linear in them (a pass asks,
`plan/objective.py`). So when a backward pass comes to such a loss, what arrives says which sum the objective is.
"""

from __future__ import annotations

from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.losses.terms import sum_of_terms
from bpk.recording.record import Record


def has_terms(record: Record) -> bool:
    """Whether a loss has returned its terms, those of each sample in a row of their own, and not their sum."""
    if record.terms is not None:
        return True
    usable = isinstance(record.rule, Loss) and not record.problem and record.recomputed is None
    return usable and record.output.dim() > 0 and record.output.shape[0] == record.batch_size


def weigh(record: Record, weights: Tensor) -> Tensor:
    """Take a loss for the sum of its terms times these weights, if it has terms; returns its gradient, which is 1 then.

    In autograd's graph, the terms stay where they are.
    """
    if not has_terms(record):
        return weights
    if weights.requires_grad:
        raise UnsupportedLayer(
            f"The weights of the terms of {record.where} depend on tensors that require grad.",
            "with create_graph=True, fields would have derivatives in these, which are not computed.",
            "detach the weights, or let a loss module that is given them return the weighted sum.",
        )
    assert isinstance(record.rule, Loss)
    record.add_up(sum_of_terms(record.rule, record.inputs, weights) if record.terms is None else record.rule, weights)
    return weights.new_ones(())
