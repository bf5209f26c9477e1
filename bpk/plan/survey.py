"""Look at the whole graph behind a loss before anything is computed, and refuse what would go wrong silently."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.plan.quantity import Quantity
from bpk.plan.sources import Sources
from bpk.recording.context.state import CTX
from bpk.recording.record import Record


def upstream(record: Record, sources: Sources) -> list[Record]:
    """All recorded calls from which `record` descends."""
    found: dict[Record, None] = {}
    waiting = [record]
    while waiting:
        for source in sources[waiting.pop()].values():
            for producer, _ in source.targets:
                if producer not in found:
                    found[producer] = None
                    waiting.append(producer)
    return list(found)


def mixes(record: Record) -> bool:
    """Whether a call's outputs depend on several samples each."""
    rule = record.rule
    if rule is None or not rule.may_mix or rule.is_loss or record.problem:
        return False
    return rule.mixing(record.call()) is not None


def require_layers(loss: Record, records: list[Record], sources: Sources) -> None:
    """Refuse a loss with parameters but no recorded layer behind it: the model was not extended in time."""
    unseen = [leaf for source in sources[loss].values() for leaf in source.leaves if isinstance(leaf, nn.Parameter)]
    if not records and unseen:
        CTX.check_transforms(False)
        raise RuntimeError(
            explain(
                f"No extended layer feeds the loss '{loss.path}' ({type(loss.module).__name__}).",
                "the model was not extended when its forward pass ran, or ran under bpk.disable(), or its layers were "
                "called by layer.forward(x) or by compiled code, which nobody sees.",
                "call bpk.extend(model) before the forward pass, run it outside of disable(), and write layer(x).",
            )
        )


def require_whole_batch(extensions: Iterable[Quantity], loss: Record) -> None:
    """Refuse sub-sampling where rows are not samples."""
    for extension in extensions:
        if extension.subsampling is not None:
            raise UnsupportedLayer(
                explain(
                    f"{extension} cannot look at some samples only behind the loss '{loss.path}'.",
                    "the model merges the batch axis with another one.",
                    "leave out subsampling=.",
                )
            )
