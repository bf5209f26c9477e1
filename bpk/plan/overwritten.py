"""Layers inside of `torch.utils.checkpoint` whose output was changed in place: is autograd's gradient right?"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.errors import runtime_error
from bpk.plan.graph import connected
from bpk.recording import engine
from bpk.recording.record import Record

OUTPUTS = {"result", "self_or_result"}
"""Under which names nodes keep what their function has returned."""


def require_result(record: Record, grad: Tensor, node: Node) -> None:
    """Refuse a wrong gradient behind a layer in a checkpoint that autograd differentiates from its overwritten output.

    Outside of a checkpoint autograd refuses this; inside it compares no versions. Where what follows hides the
    difference (a ReLU), the gradient is right.
    """
    if record.output._version <= record.versions[len(record.inputs)] or record.rule is None or not grad.numel():
        return
    if engine.saved_names(type(node)).isdisjoint(OUTPUTS):
        return
    call = record.call()
    expected = record.rule.jac_t_mat_prod(call, grad[None])[0]
    with connected(record, call, node):
        assert call.pull is not None
        found = call.pull(grad)
    if (found - expected).abs().max() > 1e-3 * expected.abs().max():
        raise runtime_error(
            f"The output of {record.where} was changed in place inside of a checkpoint.",
            "autograd computes the layer's gradient from its output. Outside of a checkpoint it refuses this, "
            "inside it does not see it: '.grad' is wrong.",
            "set inplace=False in the layer that follows (or write 'x = x + y' for 'x += y').",
        )
