"""Look at the whole graph behind a loss before anything is computed, and refuse what would go wrong silently."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bpk.graph import Source
from bpk.jacobians.errors import UnsupportedLayer, explain
from bpk.records import Record

if TYPE_CHECKING:
    from bpk.extensions.backprop_extension import BackpropExtension

SourcesOf = Callable[[Record], dict[int, Source]]


def upstream(record: Record, sources_of: SourcesOf) -> list[Record]:
    """All recorded calls from which `record` descends."""
    found: dict[int, Record] = {}
    waiting = [record]
    while waiting:
        for source in sources_of(waiting.pop()).values():
            for producer, _ in source.targets:
                if id(producer) not in found:
                    found[id(producer)] = producer
                    waiting.append(producer)
    return list(found.values())


def require_layers(loss: Record, records: list[Record], sources_of: SourcesOf) -> None:
    """Refuse a loss with parameters but no recorded layer behind it: the model was not extended in time."""
    leaves = [leaf for source in sources_of(loss).values() for leaf in source.leaves]
    if not records and any(isinstance(leaf, nn.Parameter) for leaf in leaves):
        raise RuntimeError(
            explain(
                f"No extended layer feeds the loss '{loss.path}' ({type(loss.module).__name__}).",
                "the model was not extended when its forward pass ran, or ran under bpk.disable().",
                "call bpk.extend(model) before the forward pass, and run it outside of disable().",
            )
        )


def require_own_use(records: Iterable[Record], sources_of: SourcesOf) -> None:
    """Refuse parameters of layers that plain functions use as well: those uses are in `.grad`, but have no rule.

    A parameter that only plain functions use gets no field; the user is told.
    """
    known = {id(p): (r, name) for r in records for name, p in r.params.items()}
    for record in records:
        for leaf in (leaf for source in sources_of(record).values() for leaf in source.leaves):
            if id(leaf) in known:
                owner, name = known[id(leaf)]
                raise UnsupportedLayer(
                    explain(
                        f"Parameter '{name}' of '{owner.path}' is also used by a plain function, before "
                        f"'{record.path}' ({type(record.module).__name__}).",
                        "that use contributes to its gradient, but no layer stands for it.",
                        "replace the function by a module that holds the same parameter (other.weight = layer.weight).",
                    )
                )
            if isinstance(leaf, nn.Parameter):
                warnings.warn(
                    explain(
                        f"A parameter of shape {list(leaf.shape)} gets no field.",
                        f"a plain function uses it, before '{record.path}' ({type(record.module).__name__}), and no "
                        "layer stands for it.",
                        "put the operation and its parameter into a module of its own and register a rule for it.",
                    ),
                    UserWarning,
                    stacklevel=2,
                )


VERIFIED: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()
"""By loss module: the forms of graphs behind it whose samples were found to be apart."""


class Batch(Enum):
    """How the rows of the layers relate to those of the loss."""

    SAMPLES = "the same number everywhere"
    LOSS_MERGED = "the loss alone has another number of rows, and only the gradient travels"
    MERGED = "different numbers"


def batch_axis(loss: Record, records: Iterable[Record], second_order: bool) -> Batch:
    """Compare the lengths of the batch axis throughout the graph."""
    sizes = {r.batch_size for r in records if second_order or r.params}
    if sizes <= {loss.batch_size}:
        return Batch.SAMPLES
    if len(sizes) == 1 and not second_order and loss.batch_size > next(iter(sizes)):
        return Batch.LOSS_MERGED
    return Batch.MERGED


def require_whole_batch(extensions: Iterable[BackpropExtension], loss: Record) -> None:
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


def require_separate_samples(records: Iterable[Record], sources_of: SourcesOf) -> None:
    """Refuse functions between layers that mix samples: what reaches one sample must come from that sample."""
    for record in records:
        for index, source in sources_of(record).items():
            at_input = record.inputs[index]
            same = all(target.batch_size == at_input.shape[0] for target, _ in source.targets)
            if source.stretch is not None and source.targets and same and mixes_samples(at_input, source):
                raise UnsupportedLayer(
                    explain(
                        f"A function before '{record.path}' ({type(record.module).__name__}) mixes samples.",
                        "second-order quantities are sums over samples that the model treats separately.",
                        "compute statistics per sample, or use a first-order extension.",
                    )
                )


def mixes_samples(at_input: Tensor, source: Source) -> bool:
    """Whether a gradient at some samples of the end of a stretch reaches other samples at its beginning.

    Samples are told apart by the binary digits of their numbers: for each digit, a gradient at all samples that have
    it, and one at all that do not, must stay there.
    """
    n = at_input.shape[0]
    numbers = torch.arange(n, device=at_input.device)
    digits = torch.stack([(numbers >> k) & 1 for k in range(max(1, (n - 1).bit_length()))]).bool()
    here = torch.cat([digits, ~digits])
    probe = torch.arange(at_input.numel(), device=at_input.device).add(1.0).cos().add(1.5).to(at_input.dtype)
    mask = here.reshape(*here.shape, *[1] * (at_input.dim() - 1))
    with torch.no_grad():
        pulled = source.pull(probe.reshape(at_input.shape) * mask)
    return any(bool((part.flatten(2)[~here].nan_to_num(0.0) != 0).any()) for _, part in pulled)
