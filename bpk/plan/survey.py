"""Look at the whole graph behind a loss before anything is computed, and refuse what would go wrong silently."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from bpk.jacobians.core.errors import UnsupportedLayer, runtime_error
from bpk.jacobians.core.function_module import Plain
from bpk.plan.quantity import Quantity, is_of_batch
from bpk.plan.samples.hypotheses import mixed
from bpk.plan.sources import Sources
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.data import GIVEN
from bpk.recording.membership import around, parameters_in
from bpk.recording.parameters import has_parameter
from bpk.recording.record import Record


def mixes(record: Record) -> bool:
    """Whether a call's outputs depend on several samples each."""
    rule = record.rule
    if rule is None or not rule.may_mix or rule.is_loss or record.problem:
        return False
    return rule.mixing(record.call()) is not None


def require_own(records: Iterable[Record]) -> None:
    """Refuse parameters of a call that are none of the model's: nobody would find their fields."""
    for record in records:
        for name, param in () if isinstance(record.module, Plain) else record.params.items():
            if record.module._parameters.get(name) is param:
                continue
            if has_parameter(record.module, name, param) or name not in record.trained():
                continue
            if any(id(param) in parameters_in(model) for model in around([record.module])[1]):
                continue
            raise runtime_error(
                f"{record.where} was called with another '{name}' than it has.",
                "the parameter was replaced after the forward pass, or lent by torch.func.functional_call; fields "
                "on it would be on no entry of model.parameters().",
                "change values in place (with torch.no_grad(): p.copy_(...)), and call the model itself.",
            )


def require_layers(
    loss: Record, records: list[Record], left: bool, sources: Sources, extensions: Iterable[Quantity], told: bool
) -> None:
    """Refuse a loss with parameters but no recorded call behind it, where nobody knows the model, or its samples.

    That calls were `left` to autograd shows that the model was extended, and so do the shapes that an extended model
    has left on the nodes of its results: functions use all of its parameters then.
    """
    behind = list(sources[loss].values())
    unseen = [leaf for source in behind for leaf in source.leaves if isinstance(leaf, nn.Parameter)]
    if records or not unseen:
        return
    given = [shapes for source in behind for node in source.nodes if (shapes := engine.belongings(node).get(GIVEN))]
    if not given and not left:
        CTX.check_transforms(False)
        raise runtime_error(
            f"No extended layer feeds the loss {loss.where}.",
            "the model was not extended when its forward pass ran, or ran under bpk.disable(), or its layers were "
            "called by layer.forward(x) or by compiled code, which nobody sees.",
            "call bpk.extend(model) before the forward pass, run it outside of disable(), and write layer(x).",
        )
    first = {shape[:2] for shapes in given for shape in shapes[:1]}
    needed = not told and not all(e.second_order and is_of_batch(e) for e in extensions)
    if needed and any(shape and loss.batch_size not in shape for shape in first):
        raise mixed(f"no layer between the model and '{loss.path}' tells whose its {loss.batch_size} rows are")


def require_whole_batch(extensions: Iterable[Quantity], loss: Record) -> None:
    """Refuse sub-sampling where rows are not samples."""
    for extension in extensions:
        if extension.subsampling is not None:
            index = ", ".join([":"] * (extension.sample_axis or 0) + [str(list(extension.subsampling))])
            take = f", and take the chosen samples of all: p.{extension.savefield}[{index}]"
            raise UnsupportedLayer(
                f"{extension} cannot look at some samples only behind {loss.where}.",
                "the rows of a layer are not the samples in order: the model merges the batch axis with another, "
                "picks rows, or puts them into another order.",
                f"leave out subsampling={'' if extension.sample_axis is None else take}.",
            )


def computes_again(extensions: Iterable[Quantity]) -> bool:
    """Whether calls inside of checkpoints, of which only autograd knows, are computed again to be written down.

    So it is where functions are differentiated twice, as fused kernels cannot be, and for all but sums of columns:
    functions have no Kronecker factors.
    """
    second = [(e, e.sweep()) for e in extensions if e.second_order]
    twice = [e for e, sweep in second if not e.linear_in_terms or (sweep is not None and sweep.differentiates_twice)]
    return torch.is_grad_enabled() or bool(twice)
