"""What has arrived at the output of a call, columns or averaged matrices, and a use of a parameter there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.products import add_up
from bpk.jacobians.rule import Rule

PIECE = 1 << 22
"""How many numbers a block of columns holds at most on a processor (16 MiB in float32): larger allocations go back to
the operating system when freed, and getting new pages costs more than the arithmetic."""


@dataclass
class Columns:
    """Blocks `[V, N, *out]` of columns at the output of a call, each under a key: the place where its columns began.

    Blocks with the same key that arrive over several branches are added. `signs` (`[V, N]`, or `None` for all ones) are
    those of a key. `of_params` holds what a residual contributes to a parameter itself, `[V, N, *p]` by the parameter's
    name and by key. Blocks in `unshared` are in memory that nobody else looks at. `single` is the only column there is,
    without an axis in front.
    """

    blocks: dict[Hashable, Tensor] = field(default_factory=dict)
    of_params: dict[str, dict[Hashable, Tensor]] = field(default_factory=dict)
    signs: dict[Hashable, Tensor | None] = field(default_factory=dict)
    unshared: set[Hashable] = field(default_factory=set)
    single: Tensor | None = None

    def add(self, key: Hashable, mat: Tensor, signs: Tensor | None = None) -> None:
        """Add a block, or its share from another branch."""
        self.blocks[key] = self.blocks[key] + mat if key in self.blocks else mat
        self.signs[key] = signs if signs is None else signs.to(mat.device)  # a model may be on several

    def merged(self, other: Columns) -> Columns:
        """These columns and others."""
        result = Columns({**self.blocks, **other.blocks}, {}, {**self.signs, **other.signs})
        for part in (self, other):
            for name, rows in part.of_params.items():
                result.of_params.setdefault(name, {}).update(rows)
        return result

    def add_to_parameter(self, name: str, key: Hashable, rows: Tensor, signs: Tensor | None = None) -> None:
        """Add rows `[V, N, *p]` that belong to a parameter itself."""
        of_param = self.of_params.setdefault(name, {})
        of_param[key] = of_param[key] + rows if key in of_param else rows
        self.signs[key] = signs


@dataclass
class ClosedForm:
    """What columns add to a parameter, without them: `squares(per_sample)`, `[*p]` or `[N, *p]`, and `factor()`.

    The factor is the Kronecker factor `G` that goes with the input's (`None`: it is not known).
    """

    squares: Callable[[bool], Tensor]
    factor: Callable[[], Tensor] | None = None

    def merged(self, other: ClosedForm) -> ClosedForm:
        """The squares, with those of another loss."""
        return ClosedForm(lambda per_sample: self.squares(per_sample) + other.squares(per_sample))


@dataclass
class Averages:
    """`G_yy` `[D, D]` at a call, and by parameter the cross terms of this use with those before.

    Without a `matrix`, `shared` has all that belongs to a parameter.
    """

    matrix: Tensor | None
    shared: dict[str, Tensor] = field(default_factory=dict)

    def merged(self, other: Averages) -> Averages:
        """The sum with those of another loss."""
        names = self.shared.keys() | other.shared.keys()
        shared = {n: add_up([a.shared[n] for a in (self, other) if n in a.shared]) for n in names}
        found = [matrix for matrix in (self.matrix, other.matrix) if matrix is not None]
        return Averages(add_up(found) if found else None, shared)


@dataclass
class Use:
    """One call that uses the parameter, and what has arrived at its output.

    `samples` says which sample each row of the call belongs to, where rows are not the samples in order. `origin` tells
    calls from each other.
    """

    call: Call
    rule: Rule
    name: str
    arrived: Any
    samples: Tensor | None = None
    origin: Hashable = None

    @property
    def own(self) -> dict[Hashable, Tensor]:
        """Columns `[V, N, *p]` that have arrived at the parameter itself, not at the call's output."""
        found: dict[Hashable, Tensor] = self.arrived.of_params.get(self.name, {})
        return found


def different_matrices(param: Tensor) -> UnsupportedLayer:
    """The error where uses of a parameter have input factors, but none in common, and no whole block is known."""
    return UnsupportedLayer(
        f"KFRA cannot be computed for a parameter of shape {list(param.shape)}, of which its uses make different "
        "matrices.",
        "the recursion gives each of these uses Kronecker factors of its own.",
        "use KFLR or KFAC.",
    )
