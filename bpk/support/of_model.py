"""`bpk.support`: what is computed by rule, generically, or not, before any backward pass.

All answers are those of the function that the dispatcher asks, too.
"""

from __future__ import annotations

from typing import Any, overload

from torch import nn

from bpk.context import check_extension
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.call import Call
from bpk.jacobians.rule import Rule
from bpk.plan.support import Support
from bpk.plan.support import support as answer
from bpk.recording.membership import parts_of
from bpk.support.of_forward import recorded
from bpk.support.of_layers import layers, of_layer
from bpk.support.table import SupportTable


@overload
def support(subject: nn.Module, /, *extensions: BackpropExtension, inputs: Any = None) -> SupportTable: ...
@overload
def support(
    subject: BackpropExtension, rule: Rule | None, call: Call | None = None, name: str = "it", /
) -> Support: ...
def support(subject: Any, /, *rest: Any, inputs: Any = None, **named: Any) -> SupportTable | Support:
    """Which layer of a model gets which quantity: by rule, generically, or not, with the reason and what to do.

    Without `inputs`, reasons are those that the layers' options tell (BatchNorm in training mode). With them, one
    forward pass of a copy is recorded, and its real calls decide; what lies between layers as plain functions, and
    parameters that such functions use, have rows of their own.

    Args:
        subject: The model, in the mode (training, evaluation) that is meant. If only a part of it is extended, the
            answer is about that part; if nothing is, about all of it.
        *rest: Which extensions (all by default).
        inputs: What the model is called with: a tensor, a tuple of arguments, or a mapping of named ones.

    With an extension instead of a model this is the question that the dispatcher asks,
    `support(extension, rule, call=None, name="it") -> Support`.

    >>> import torch, bpk
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())
    >>> print(bpk.support(model, bpk.extensions.KFAC(), bpk.extensions.DiagGGNExact()))
    where  layer        KFAC         DiagGGNExact
    -----  -----------  -----------  ------------
    0      Linear       rule         rule
    1      BatchNorm1d  refused [1]  generic [2]
    2      ReLU         rule         rule
    [1] BatchNorm in training mode mixes samples: it standardises with the statistics of the batch. Do: ...
    [2] BatchNorm in training mode mixes samples: ... The quantity is that of the whole batch, ...
    >>> bpk.support(model.eval()).refused
    ()
    """
    if isinstance(subject, BackpropExtension):
        return answer(subject, *rest, **named)
    if not isinstance(subject, nn.Module):
        raise ValueError(f"support(...) takes a model (nn.Module), got {type(subject).__name__}.")
    for extension in rest:
        check_extension(extension)
    extensions = rest or every_extension()
    if inputs is not None:
        return recorded(subject, extensions, inputs)
    return SupportTable(
        tuple(
            cell
            for start, part in parts_of(subject).items()
            for path, module in layers(part, start)
            for cell in of_layer(path, module, extensions)
        )
    )
