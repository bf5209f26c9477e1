"""Plots of the examples, drawn only where the command line asks for them, so that a script runs without matplotlib:

python examples/newton_cg.py --plot out/newton_cg.svg
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INK, PALE, COLOURS = "#22303c", "#9aa7b1", ("#30638e", "#d1495b", "#edae49", "#5f8f5a")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": PALE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small files
    "svg.hashsalt": "bpk",  # the same picture gives the same file
}


def plot(title: str, draw: Callable[[Any], None], size: tuple[float, float] = (4.8, 2.6)) -> None:
    """Let `draw(axes)` draw: into a file, where `--plot FILE` is on the command line, or into a notebook."""
    arguments, notebook = sys.argv[1:], "ipykernel" in sys.modules
    if "--plot" not in arguments and not notebook:
        return
    import matplotlib

    if not notebook:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        axes.set_title(title)
        axes.set_prop_cycle(color=COLOURS)
        draw(axes)
        if notebook:
            plt.show()
            return
        out = Path(arguments[arguments.index("--plot") + 1])
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, facecolor="white", metadata={"Date": None} if out.suffix == ".svg" else None)
        plt.close(figure)


def lines(
    title: str, x: str, y: str, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], log: bool = False
) -> None:
    """A line for each curve, `name: (places, values)`."""

    def draw(axes: Any) -> None:
        for name, (places, values) in curves.items():
            axes.plot(places, values, label=name, marker="o", markersize=3)
        axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
        if len(curves) > 1:
            axes.legend()

    plot(title, draw)


def bars(title: str, x: str, values: Mapping[str, float]) -> None:
    """A bar for each name, the first one on top."""

    def draw(axes: Any) -> None:
        drawn = axes.barh(list(values), list(values.values()), color=COLOURS[0], height=0.6)
        axes.bar_label(drawn, [f"{value:.3g}" for value in values.values()], padding=3)
        axes.set(xlabel=x)
        axes.invert_yaxis()
        axes.margins(x=0.12)

    plot(title, draw, height(values))


def dots(title: str, x: str, values: Mapping[str, float]) -> None:
    """A dot for each name on a logarithmic axis, which has no zero that bars could start from."""

    def draw(axes: Any) -> None:
        axes.plot(list(values.values()), list(values), "o", color=COLOURS[0])
        for name, value in values.items():
            axes.annotate(f"{value:.3g}", (value, name), (7, -3), textcoords="offset points")
        axes.set(xlabel=x, xscale="log")
        axes.grid(axis="y", color=PALE, alpha=0.3)
        axes.invert_yaxis()
        axes.margins(x=0.12)

    plot(title, draw, height(values))


def height(values: Mapping[str, float]) -> tuple[float, float]:
    """Width and height that rows of text need."""
    return 4.8, 0.8 + 0.24 * len(values)
