"""Results for people: a table, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bpk.jacobians.core.tabular import Table
from bpk.reading import shown
from bpk.recording.context.surroundings import is_sharded
from bpk.utils.ekfac import Eigenbasis


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a value (of EKFAC: moments); rows on disk are left where they are, and shards apart."""
    value = value.moments if isinstance(value, Eigenbasis) else value
    return [
        x.to_dense() if x.is_sparse else x
        for x in (value if isinstance(value, list) else [value])
        if isinstance(x, Tensor) and not is_sharded(x)
    ]


def root_mean_square(value: Any) -> float | None:
    """How large the entries are; of Kronecker factors, those of the product."""
    parts = tensors_of(value)
    if not parts:
        return None
    size = 1.0
    for x in parts:
        size *= float(x.double().square().mean().sqrt())
    return size


def table_of(fields: Mapping[str, Mapping[str, Any]], notes: Iterable[str]) -> Table:
    """A row for each field of each parameter."""
    rows = []
    for name, values in fields.items():
        for field, value in values.items():
            size = root_mean_square(value)
            words = shown(value)
            if size is None:
                parts = value if isinstance(value, list) else [value]
                arrays = " and ".join(f"array {list(x.shape)}" for x in parts)
                words = f"{words} in shards" if isinstance(parts[0], Tensor) else f"{arrays} on disk"
            rows.append([name, field, words, "" if size is None else f"{size:.2e}"])
    return Table(("parameter", "field", "value", "root mean square"), rows, [*notes], numbers=(3,))


def plot(fields: Mapping[str, Mapping[str, Any]], names: Iterable[str], title: str) -> Any:
    """Bars: how large the entries of each field are, parameter by parameter; the figure of matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots are drawn by matplotlib: pip install 'bpk[results]' (or matplotlib)") from error
    found = {
        name: {
            param: size
            for param, values in fields.items()
            if (size := root_mean_square(values.get(name, []))) is not None
        }
        for name in names
    }
    found = {name: bars for name, bars in found.items() if bars}
    rows = max((len(bars) for bars in found.values()), default=1)
    figure = Figure(figsize=(3.2 * max(1, len(found)) + 1.2, 0.25 * rows + 1.2), layout="constrained")
    axes = figure.subplots(1, max(1, len(found)), sharey=True, squeeze=False)[0]
    for axis, (name, bars) in zip(axes, found.items(), strict=False):
        axis.barh(list(bars), list(bars.values()), color="#4c78a8")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("root mean square of entries")
        if any(size > 0 for size in bars.values()):
            axis.set_xscale("log")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return figure
