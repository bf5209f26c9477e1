"""Which extension listens to which sweep: those that ask for equal ones share one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from bpk.plan.quantity import Quantity, Takes
from bpk.sweeps.starts.positions import ByPosition
from bpk.sweeps.sweep import Player, Sweep


class SharedSweeps:
    """The sweeps of one backward pass.

    `listens` has for each extension the key of its sweep (`None`: it works through module extensions only). `players`
    start at losses, `observers` follow autograd. Values of `combining` sweeps may be taken from some columns after the
    others. `with_module_extensions` are the extensions for which users wrote module extensions, with these keys.
    """

    def __init__(self, extensions: Sequence[Quantity]) -> None:
        self.extensions = extensions
        self.listens: list[Hashable] = []
        self.with_module_extensions: list[tuple[Hashable, Quantity]] = []
        self.combining: set[Hashable] = set()
        self.players: dict[Hashable, Player] = {}
        self.observers: dict[Hashable, Sweep] = {}
        self.second_order = self.needs_root = False
        sweeps: dict[Hashable, tuple[Sweep, list[Quantity]]] = {}
        for extension in extensions:
            sweep: Sweep | None = extension.sweep()
            key: Hashable = None if sweep is None else sweep.key
            if extension.has_module_extensions:
                key = None if sweep is None else (key, id(extension))
                self.with_module_extensions.append((key, extension))
            self.listens.append(key)
            self.second_order |= extension.second_order
            if sweep is not None:
                self.needs_root |= sweep.needs_root
                sweeps.setdefault(key, (sweep, []))[1].append(extension)
        for key, (sweep, listeners) in sweeps.items():
            if isinstance(sweep, Player):
                self.players[key] = self.prepared(key, sweep, listeners)
            else:
                self.observers[key] = sweep

    def prepared(self, key: Hashable, sweep: Player, listeners: Sequence[Quantity]) -> Player:
        """A sweep that is played at the loss, and knows what those who listen make of it."""
        takes, combine, sum_rows, are_rows = set[Takes](), True, True, False
        for e in listeners:
            written = e.has_module_extensions
            takes.add("columns" if written else e.takes)
            combine = combine and e.combines and not written
            sum_rows = sum_rows and e.sums_rows
            are_rows = are_rows or e.needs_rows or e.needs_samples
        if combine:
            self.combining.add(key)
            if sum_rows:
                sweep = ByPosition(None, sweep.samples)
        sweep.takes, sweep.fields_are_rows = frozenset(takes), are_rows
        return sweep

    def clear(self) -> None:
        """Let go of what travels."""
        for player in self.players.values():
            player.end()
        self.players, self.observers = {}, {}
