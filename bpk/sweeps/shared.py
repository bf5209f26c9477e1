"""Which extension listens to which sweep: those that ask for equal ones share one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from bpk.plan.quantity import Quantity
from bpk.sweeps.starts.positions import ByPosition
from bpk.sweeps.sweep import Observer, Player, Sweep


class SharedSweeps:
    """The sweeps of one backward pass.

    `listens` has for each extension the key of its sweep (`None`: it works through module extensions only). `players`
    start at losses, `observers` follow autograd. Values of `combining` sweeps may be taken from some columns after the
    others. `by_hand` are the extensions for which users wrote something by hand, with these keys.
    """

    def __init__(self, extensions: Sequence[Quantity]) -> None:
        self.extensions = extensions
        self.listens: list[Hashable] = []
        self.by_hand: list[tuple[Hashable, Quantity]] = []
        sweeps: dict[Hashable, Sweep] = {}
        for extension in extensions:
            sweep: Sweep | None = extension.sweep()
            key: Hashable = None if sweep is None else sweep.key
            if extension.has_module_extensions:
                key = None if sweep is None else (key, id(extension))
                self.by_hand.append((key, extension))
            self.listens.append(key)
            if sweep is not None:
                sweeps.setdefault(key, sweep)
        self.combining: set[Hashable] = set()
        self.players: dict[Hashable, Player] = {}
        self.observers = {key: sweep for key, sweep in sweeps.items() if isinstance(sweep, Observer)}
        for key, sweep in sweeps.items():
            if not isinstance(sweep, Player):
                continue
            mine = [e for e, listens in zip(extensions, self.listens, strict=True) if listens == key]
            if all(e.combines and not e.has_module_extensions for e in mine):
                self.combining.add(key)
                if all(e.sums_rows for e in mine):
                    sweep = ByPosition(None, sweep.samples)
            sweep.takes = frozenset("columns" if e.has_module_extensions else e.takes for e in mine)
            sweep.fields_are_rows = any(e.needs_rows or e.needs_samples for e in mine)
            self.players[key] = sweep
        self.second_order = any(e.second_order for e in extensions)

    def clear(self) -> None:
        """Let go of what travels."""
        for player in self.players.values():
            player.end()
        self.players, self.observers = {}, {}
