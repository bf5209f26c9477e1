"""Draw which samples and which weights carry gradient noise and curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from PIL import Image
from torch import Tensor, nn

import bpk
import bpk.plot

NOISY, QUIET = "#d1495b", "#30638e"
LAYERS = {"0.weight": ("conv 1", "#edae49"), "3.weight": ("conv 2", "#30638e"), "6.weight": ("linear", "#d1495b")}


@dataclass(frozen=True)
class Look:
    """What a picture is drawn for: colours of ground, letters and axes, and whether there is room for all panels."""

    ending: str
    ground: str = "white"
    ink: str = "#22303c"
    pale: str = "#9aa7b1"
    digits: str = "gray_r"
    phone: bool = False

    def style(self) -> dict[str, Any]:
        """For matplotlib."""
        return {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.facecolor": self.ground,
            "axes.edgecolor": self.pale,
            "text.color": self.ink,
            "axes.labelcolor": self.ink,
            "xtick.color": self.ink,
            "ytick.color": self.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "image.cmap": self.digits,
        }


LIGHT = Look("")
DARK = Look("-dark", ground="#16191d", ink="#d7dde3", pale="#66717b", digits="gray")
VARIANTS = (LIGHT, DARK, replace(LIGHT, ending="-phone", phone=True), replace(DARK, ending="-phone-dark", phone=True))
"""By what they append to the name of the file."""


def draw(model: nn.Sequential, x: Tensor, y: Tensor, data: str, out: Path, looks: Sequence[Look] = (LIGHT,)) -> None:
    """Read `batch_l2`, `variance`, `diag_ggn_exact`, `diag_h` and `kflr` off the parameters and draw them."""
    params = dict(model.named_parameters())
    for look in looks:
        with plt.rc_context(look.style()), torch.no_grad():
            batch = (params, model(x), x, y)
            figure = _two_panels(data, *batch) if look.phone else _all_panels(data, *batch)
            file = out.with_name(f"{out.stem}{look.ending}{out.suffix}")
            _save(figure, file, 170 if look.phone else 100, look.ground)
            plt.close(figure)


def draw_model(model: nn.Module, samples: int, history: Mapping[int, Tensor], out: Path) -> None:
    """The four pictures of `bpk.plot`: of the same fields, and of the GGN diagonal at some steps of the training."""
    with plt.rc_context(LIGHT.style()), torch.no_grad():
        figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
        bpk.plot.strip(model, "diag_ggn_exact", axes[0, 0]).set_title("GGN diagonal, entry by entry")
        bpk.plot.gradient_noise(model, samples, axes[0, 1]).set_title("Gradient noise")
        bpk.plot.kronecker_spectra(model, "kflr", axes[1, 0]).set_title("Kronecker spectra")
        bpk.plot.histograms(history, axes[1, 1], label="log10 of the diagonal").set_title("Curvature over training")
        _save(figure, out, 80, LIGHT.ground)
        plt.close(figure)


def _save(figure: Figure, out: Path, dots: int, ground: str) -> None:
    """As a PNG of 200 colours, a third of the bytes of one of all colours."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=dots, facecolor=ground)
    Image.open(drawn).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)


def _all_panels(data: str, params: dict[str, nn.Parameter], logits: Tensor, x: Tensor, y: Tensor) -> Figure:
    """Samples, filters, noise, curvature and classes."""
    figure = plt.figure(figsize=(13, 9.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(0.84, 1), hspace=0.04)
    figure.suptitle(f"One backward pass of bpk: {data}, batch of {len(x)}", fontsize=14, fontweight="bold")
    left, right = top.subfigures(1, 2, width_ratios=(1.25, 1), wspace=0.03)
    _samples(left, params, logits, x, y, most=8)
    _filters(right, params)
    axes = bottom.subplots(1, 3)
    _noise(axes[0], params, len(x))
    _curvature(axes[1], params)
    _classes(axes[2], figure, params)
    return figure


def _two_panels(data: str, params: dict[str, nn.Parameter], logits: Tensor, x: Tensor, y: Tensor) -> Figure:
    """Samples and noise, at a size that can be read on a phone."""
    figure = plt.figure(figsize=(4.3, 7.2), layout="constrained")
    figure.suptitle(f"One backward pass of bpk:\n{data}, batch of {len(x)}", fontsize=10, fontweight="bold")
    top, bottom = figure.subfigures(2, 1, hspace=0.04)
    _samples(top, params, logits, x, y, most=5)
    _noise(bottom.subplots(), params, len(x))
    return figure


def _samples(area: SubFigure, params: dict[str, nn.Parameter], logits: Tensor, x: Tensor, y: Tensor, most: int) -> None:
    """The digits whose gradients are the longest and the shortest, and the distribution over the batch."""
    norms = (sum(p.batch_l2 for p in params.values()) * len(x) ** 2).sqrt()  # of each sample's own loss
    order = norms.argsort(descending=True).tolist()
    count = min(most, len(order) // 2) or 1
    grid = area.add_gridspec(3, count, height_ratios=(1, 1, 0.95))
    for row, (chosen, colour) in enumerate(((order[:count], NOISY), (order[-count:], QUIET))):
        for column, n in enumerate(chosen):
            axis = area.add_subplot(grid[row, column])
            axis.imshow(x[n, 0], interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set(visible=True, color=colour, linewidth=1.6)
            predicted = int(logits[n].argmax())
            verdict = f"{int(y[n])}" if predicted == y[n] else f"{int(y[n])}, read as {predicted}"
            axis.set_xlabel(f"{verdict}\n{norms[n]:.2g}", fontsize=8, labelpad=2)
            if column == 0:
                axis.set_title("largest ‖gₙ‖" if row == 0 else "smallest ‖gₙ‖", color=colour, fontsize=9)
    axis = area.add_subplot(grid[2, :])
    colours = [NOISY] * count + [plt.rcParams["axes.edgecolor"]] * (len(order) - 2 * count) + [QUIET] * count
    axis.bar(range(len(order)), norms[order], color=colours[: len(order)], width=0.8)
    axis.set(yscale="log", xlabel="samples of the batch, sorted", ylabel="‖gₙ‖")
    axis.margins(x=0.01)
    area.suptitle(
        "Gradient norm of every sample (BatchL2Grad)",
        fontsize=10,
        fontweight="bold",
        x=0.01,
        ha="left",
    )


def _filters(area: SubFigure, params: dict[str, nn.Parameter]) -> None:
    """The filters of the first layer beside the variance and the curvature of each of their weights."""
    p = params["0.weight"]
    rows = (
        ("weight\n", p.detach(), "RdBu_r"),
        ("gradient variance\n(Variance)", p.variance, "magma"),
        ("curvature\n(DiagGGNExact)", p.diag_ggn_exact, "viridis"),
    )
    for axis, (label, value, cmap) in zip(area.subplots(1, 3), rows, strict=True):
        low, high = (-value.abs().max(), value.abs().max()) if cmap == "RdBu_r" else (0, value.max())
        image = axis.imshow(_mosaic(value[:, 0]), cmap=cmap, vmin=float(low), vmax=float(high))
        axis.set(xticks=[], yticks=[])
        axis.set_title(label, fontsize=9, fontweight="normal", loc="center")
        for spine in axis.spines.values():
            spine.set_visible(False)
        bar = area.colorbar(image, ax=axis, location="bottom", shrink=0.9, aspect=16, pad=0.02)
        bar.ax.tick_params(labelsize=7)
        bar.outline.set_visible(False)
        bar.formatter.set_powerlimits((-2, 2))
    area.suptitle(
        "The first layer's filters, their gradient noise and their curvature",
        fontsize=10,
        fontweight="bold",
        x=0.01,
        ha="left",
    )


def _mosaic(filters: Tensor, columns: int = 2, gap: int = 1) -> Tensor:
    """`[K, H, W]` side by side in one image, not-a-number (left white) between them."""
    k, h, w = filters.shape
    rows = -(-k // columns)
    image = torch.full((rows * (h + gap) - gap, columns * (w + gap) - gap), torch.nan)
    for i, one in enumerate(filters):
        top, left = i // columns * (h + gap), i % columns * (w + gap)
        image[top : top + h, left : left + w] = one
    return image


def _noise(axis: Axes, params: dict[str, nn.Parameter], n: int) -> None:
    """Each weight's squared gradient against the variance of the mini-batch gradient."""
    for name, (label, colour) in LAYERS.items():
        p = params[name]
        noise, signal = (n * p.variance).flatten(), p.grad.square().flatten()
        share = (signal > noise).float().mean().item()
        axis.scatter(noise, signal, s=7, alpha=0.6, color=colour, linewidths=0, label=f"{label}: {share:.0%} above")
    axis.set(xscale="log", yscale="log", xlabel="noise: variance of the batch gradient", ylabel="signal: its square")
    _clip_to_decades(axis, params, n)
    low, high = axis.get_xlim()
    axis.plot([low, high], [low, high], color=plt.rcParams["text.color"], linewidth=1, linestyle="--")
    axis.set_xlim(low, high)
    axis.set_title("Signal and noise of every weight (Variance)")
    axis.legend(frameon=False, markerscale=2.5, loc="upper left", title="signal beyond noise", alignment="left")


def _clip_to_decades(axis: Axes, params: dict[str, nn.Parameter], n: int) -> None:
    """Leave the few vanishing values out of view, which would stretch the axes over twenty decades."""
    noise = torch.cat([(n * params[name].variance).flatten() for name in LAYERS])
    signal = torch.cat([params[name].grad.square().flatten() for name in LAYERS])
    for values, limit in ((noise, axis.set_xlim), (signal, axis.set_ylim)):
        positive = values[values > 0]
        if len(positive):
            limit(positive.quantile(0.01).item() / 2, positive.max().item() * 3)


def _curvature(axis: Axes, params: dict[str, nn.Parameter]) -> None:
    """The Hessian's diagonal against that of the GGN: they part where the network itself is curved."""
    values = []
    for name, (label, colour) in LAYERS.items():
        ggn, hessian = params[name].diag_ggn_exact.flatten(), params[name].diag_h.flatten()
        values.append(ggn)
        negative = (hessian < 0).float().mean().item()
        axis.scatter(
            ggn, hessian, s=7, alpha=0.6, color=colour, linewidths=0, label=f"{label}: {negative:.0%} negative"
        )
    top = torch.cat(values).quantile(0.995).item() * 1.2
    axis.plot([0, top], [0, top], color=plt.rcParams["text.color"], linewidth=1, linestyle="--")
    axis.axhline(0, color=plt.rcParams["axes.edgecolor"], linewidth=0.8)
    axis.set(
        xlim=(0, top), ylim=(-0.18 * top, 1.1 * top), xlabel="diagonal of the GGN", ylabel="diagonal of the Hessian"
    )
    axis.ticklabel_format(style="sci", scilimits=(-2, 2))
    axis.set_title("Curvature of every weight (DiagHessian)")
    axis.legend(frameon=False, markerscale=2.5, loc="upper left")


def _classes(axis: Axes, figure: Figure, params: dict[str, nn.Parameter]) -> None:
    """The Kronecker factor of the output layer: which classes the loss still trades against each other."""
    factor = params["6.weight"].kflr[0].abs()
    image = axis.imshow(factor, cmap="magma", norm=LogNorm(vmin=factor.max().item() * 1e-3, vmax=factor.max().item()))
    axis.set(xticks=range(10), yticks=range(10), xlabel="digit", ylabel="digit")
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.tick_params(length=0)
    axis.set_title("Confusion: |G| of the last layer (KFLR)")
    figure.colorbar(image, ax=axis, shrink=0.75, aspect=22, pad=0.02).outline.set_visible(False)
