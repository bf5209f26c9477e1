"""Values that need what all parameters of a pass add up to: what they are made of is kept until that is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bpk.fields.kept_uses import KeptRows, Together, are_small, as_noted, lean, stamps_of
from bpk.fields.statistics import Uses
from bpk.fields.values import value_of
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.quantity import Quantity
from bpk.recording.changed import Stamp
from bpk.recording.context.state import CTX


class Totals:
    """What parameters have added so far, by the number of the extension, and their uses.

    Those whose values are still to come are `kept`, by the `id` of the parameter. Small rows of several parameters are
    taken `together`, where an extension makes the same of them.
    """

    def __init__(self, extensions: Sequence[Quantity]) -> None:
        self.extensions = extensions
        self.totals: dict[int, Tensor] = {}
        self.kept: dict[int, list[tuple[int, Uses, list[list[Stamp]]]]] = {}
        self.together: dict[tuple[int, torch.device, torch.dtype, torch.dtype, int], Together] = {}

    def keep(self, index: int, uses: Uses) -> None:
        """A parameter has all its uses: add its share, and keep what the value is made of."""
        known, kept = self.kept.setdefault(id(uses.parameter), []), lean(uses)
        if isinstance(kept, dict) and self.extensions[index].joins_parameters and are_small(kept):
            ((key, block),) = kept.items()
            alike = index, block.device, block.dtype, uses.param.dtype, block.shape[1]
            if alike not in self.together:
                self.together[alike] = Together(uses, key)
            self.together[alike].add(uses.parameter, block[0])
            return
        whole = KeptRows(uses, kept) if isinstance(kept, dict) else kept
        self.add(index, whole)
        known.append((index, whole, [] if isinstance(whole, KeptRows) else stamps_of(whole)))

    def add(self, index: int, kept: Uses) -> None:
        """Add the share of some uses."""
        extension = self.extensions[index]
        share, total = extension.share(kept), self.totals.get(index)
        if total is not None and share.shape != total.shape:
            raise UnsupportedLayer(
                f"{extension} met parameters of {len(total)} and of {len(share)} samples in one pass.",
                "what it adds up over parameters must be that of the same samples.",
                "use one backward pass for each batch.",
            )
        self.totals[index] = share if total is None else total + share.to(total.device)

    def values(self) -> Iterator[tuple[Tensor, str, Any]]:
        """The parameters, the names of the fields, and their values, now that nothing more will come."""
        by_device: dict[torch.device, list[tuple[int, Uses]]] = {}
        for index, uses, stamps in (each for kept in self.kept.values() for each in kept):
            seen = as_noted(uses, stamps) if stamps else uses
            by_device.setdefault(uses.param.device, []).append((index, seen))
        for (index, device, *_), joint in self.together.items():
            with CTX.quietly(device=device):
                joint.join()
                self.add(index, joint)
            by_device.setdefault(device, []).append((index, joint))
        self.kept, self.together = {}, {}
        for device, kept in by_device.items():
            kept.reverse()
            with CTX.quietly(device=device):
                totals: dict[int, Any] = {}
                while kept:  # what a value was made of is let go before the next one is made
                    index, uses = kept.pop()
                    extension = self.extensions[index]
                    if index not in totals:
                        totals[index] = extension.of_total(self.totals[index].to(device), uses.batch_size)
                    uses.total = totals[index]
                    value = value_of(extension, uses)
                    for param, part in uses.parted(value) if isinstance(uses, Together) else [(uses.parameter, value)]:
                        yield param, extension.savefield, part

    def clear(self) -> None:
        """Let go of everything."""
        self.totals, self.kept, self.together = {}, {}, {}
