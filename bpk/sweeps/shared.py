"""Which extension listens to which sweep: those that ask for equal ones share one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from bpk.plan.quantity import Quantity
from bpk.sweeps.hand import Hand
from bpk.sweeps.positions import ByPosition
from bpk.sweeps.sweep import Observer, Player, Sweep


class SharedSweeps:
    """The sweeps of one backward pass.

    `listens` has for each extension the key of its sweep (`None`: it works through module extensions only). `players`
    start at losses, `observers` follow autograd. Values of `combining` sweeps may be taken from some columns after the
    others.
    """

    def __init__(self, extensions: Sequence[Quantity]) -> None:
        self.extensions = extensions
        self.listens: list[Hashable] = []
        sweeps: dict[Hashable, Sweep] = {}
        for extension in extensions:
            sweep: Sweep | None = extension.sweep()
            shared = sweep is not None and not extension.has_module_extensions
            key = None if sweep is None else sweep.key if shared else (sweep.key, id(extension))
            self.listens.append(key)
            if sweep is not None:
                sweeps.setdefault(key, sweep)
        self.combining: set[Hashable] = set()
        for key, sweep in sweeps.items():
            mine = [e for e, listens in zip(extensions, self.listens, strict=True) if listens == key]
            if isinstance(sweep, Player):
                sweep.fields_are_rows = any(e.needs_rows or e.needs_samples for e in mine)
            if all(e.combines and not e.has_module_extensions for e in mine):
                self.combining.add(key)
                if all(e.sums_rows for e in mine):
                    sweeps[key] = ByPosition(None, sweep.samples)
        self.players = {key: sweep for key, sweep in sweeps.items() if isinstance(sweep, Player)}
        self.observers = {key: sweep for key, sweep in sweeps.items() if isinstance(sweep, Observer)}
        self.second_order = any(e.second_order for e in extensions)

    def hands(self, save: Callable[[Tensor, str, Any], None]) -> list[tuple[Hashable, Hand]]:
        """What users wrote by hand for layers, by the key of the extension's sweep; `save` keeps a value."""
        pairs = zip(self.listens, self.extensions, strict=True)
        return [(key, Hand(e, save)) for key, e in pairs if e.has_module_extensions]

    def clear(self) -> None:
        """Let go of what travels."""
        for player in self.players.values():
            player.end()
        self.players, self.observers = {}, {}
