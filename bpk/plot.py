"""Pictures of fields, with matplotlib: `pip install 'bpk[plot]'`.

Each function draws into `axes` (new ones by default) and returns them; what is drawn is what a backward pass has left
on the parameters. Nothing is shown or saved: `axes.figure.savefig(...)` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import explain, value_error

__all__ = ["gradient_noise", "histograms", "kronecker_spectra", "strip"]


def strip(model: nn.Module, field: str, axes: Any = None, bins: int = 60) -> Any:
    """A heat strip for each parameter: entries of a field `[*p]` in order, means of bins by colour (log10 of `|x|`).

    Args:
        model: A model whose parameters have the field.
        field: Its name, such as `"diag_ggn_exact"` or `"variance"`.
        axes: Where to draw.
        bins: How many colours a strip has at most.

    Returns:
        The axes.
    """
    values = shaped_as_parameters(model, field)
    rows = torch.full((len(values), bins), torch.nan, dtype=torch.float64, device="cpu")
    for row, value in zip(rows, values.values(), strict=True):
        parts = value.detach().double().cpu().abs().flatten().tensor_split(min(bins, value.numel()))
        means = torch.stack([part.mean() for part in parts])
        index = torch.arange(bins, device="cpu") * len(parts) // bins  # few entries have wide colours
        row.copy_(means.log10()[index])
    rows[rows.isinf()] = torch.nan  # a mean of zero
    axes = axes_or_new(axes)
    image = axes.imshow(rows.numpy(), aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set_yticks(range(len(values)), list(values))
    axes.set_xticks([])
    axes.set_xlabel("entries, in order")
    axes.figure.colorbar(image, ax=axes, label=f"log10 |{field}|")
    return axes


def gradient_noise(model: nn.Module, samples: int, axes: Any = None) -> Any:
    """The noise of the batch's gradient, a bar for each parameter: `sqrt(N sum(variance)) / |g|`.

    The batch's gradient `g` is a mean over `N` samples, whose gradients are `N g_n`; its own variance is `1 / N` of
    theirs. Below one, it points where the expected gradient does; far above, a larger batch would help.

    Args:
        model: A model with `p.grad` and `p.variance`, of a loss that is a mean.
        samples: The size `N` of the batch.
        axes: Where to draw.

    Returns:
        The axes.
    """
    params, noise = dict(model.named_parameters()), dict[str, float]()
    for name, variance in shaped_as_parameters(model, "variance").items():
        grad = params[name].grad
        if grad is None:
            raise ValueError(missing(f"'{name}' has no gradient"))
        noise[name] = float((samples * variance.sum()).clamp(min=0).sqrt() / grad.norm())
    axes = axes_or_new(axes)
    axes.bar_label(
        axes.barh(list(noise), list(noise.values())), [f"{value:.2g}" for value in noise.values()], padding=3
    )
    axes.axvline(1.0, linestyle=":", color="grey")
    axes.set_xlabel("noise of the gradient / its norm")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    return axes


def kronecker_spectra(model: nn.Module, field: str = "kfac", axes: Any = None) -> Any:
    """Eigenvalues of Kronecker factors, in descending order: a line for the block `kron(G, A)` of each parameter.

    The eigenvalues of `kron(G, A)` are all products of one of `G` and one of `A`; a bias has those of `G`.

    Args:
        model: A model whose parameters have the field.
        field: The factors: `"kfac"`, `"kflr"` or `"kfra"`.
        axes: Where to draw.

    Returns:
        The axes.
    """
    axes = axes_or_new(axes)
    for name, factors in fields(model, field).items():
        if not isinstance(factors, (list, tuple)) or any(f.layout != torch.strided for f in factors):
            raise value_error(
                f"The field '{field}' of '{name}' is not a list of dense factors.",
                "a spectrum is drawn of Kronecker factors.",
                "use 'kfac', 'kflr' or 'kfra', on a model whose large parameters are weights of layers.",
            )
        spectrum = torch.ones(1, dtype=torch.float64, device="cpu")
        for factor in factors:
            eigenvalues = torch.linalg.eigvalsh(factor.detach().double().cpu()).clamp(min=0)
            spectrum = torch.outer(spectrum, eigenvalues).flatten()
        spectrum = spectrum.sort(descending=True).values
        kept = spectrum[spectrum > 1e-12 * spectrum[0]]
        axes.plot(torch.arange(1, 1 + len(kept), device="cpu").numpy(), kept.numpy(), label=name)
    axes.set(xscale="log", yscale="log", xlabel="number", ylabel=f"eigenvalue ({field})")
    axes.legend()
    return axes


def histograms(history: Mapping[int, Tensor], axes: Any = None, bins: int = 40, label: str = "log10 of entries") -> Any:
    """How entries of a field are distributed over training: a column for each step, by colour how many are in a bin.

    Args:
        history: By step: entries, such as `torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])`.
        axes: Where to draw.
        bins: How many there are between the smallest and the largest entry that is not zero.
        label: What the entries are.

    Returns:
        The axes.
    """
    if not history:
        raise ValueError(missing("the history has no step"))
    logs = {step: x.detach().double().cpu().abs().flatten().log10() for step, x in history.items()}
    logs = {step: x[x.isfinite()] for step, x in logs.items()}
    everything = torch.cat(list(logs.values()))
    if not len(everything):
        raise ValueError(missing("all entries are zero"))
    low, high = float(everything.min()), float(everything.max())
    high = high if high > low else low + 1
    counts = torch.stack([torch.histc(x, bins, low, high) / max(1, len(x)) for x in logs.values()], 1)
    axes = axes_or_new(axes)
    extent = (-0.5, len(logs) - 0.5, low, high)
    image = axes.imshow(counts.numpy(), aspect="auto", origin="lower", extent=extent, cmap="magma")
    axes.set_xticks(range(len(logs)), [str(step) for step in logs])
    axes.set(xlabel="step", ylabel=label)
    axes.figure.colorbar(image, ax=axes, label="share of entries")
    return axes


def axes_or_new(axes: Any) -> Any:
    """These axes, or those of a new figure that belongs to no window."""
    if axes is not None:
        return axes
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            explain(
                "bpk.plot needs matplotlib, which is not installed.",
                "bpk itself needs no package that draws.",
                "pip install 'bpk[plot]', or in a checkout: pip install '.[plot]'.",
            )
        ) from error
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()


def fields(model: nn.Module, field: str) -> dict[str, Any]:
    """The values of a field by parameter; an error where no parameter has it."""
    found = {name: vars(p)[field] for name, p in model.named_parameters() if field in vars(p)}
    if not found:
        raise ValueError(missing(f"no parameter has the field '{field}'"))
    return found


def shaped_as_parameters(model: nn.Module, field: str) -> dict[str, Tensor]:
    """The same of a field with an entry for each one of the parameter."""
    found, params = fields(model, field), dict(model.named_parameters())
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.shape != params[name].shape:
            raise value_error(
                f"The field '{field}' of '{name}' has not the shape {list(params[name].shape)} of the parameter.",
                "a strip has a colour for each entry of a parameter.",
                "use a field such as 'diag_ggn_exact', 'variance' or 'diag_h'.",
            )
    return found


def missing(what: str) -> str:
    """What is to be drawn is not there."""
    return explain(
        f"There is nothing to draw: {what}.",
        "pictures show what a backward pass has left on parameters.",
        "run loss.backward() inside of bpk.backpack(...) with the extension that saves it.",
    )
