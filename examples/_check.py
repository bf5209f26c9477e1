"""How the examples hold a result against its reference, and what they say where a package is missing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from bpk.utils.examples import autograd_diag_ggn_exact

NAME = {"sklearn": "scikit-learn"}
"""What a package is called where it is installed from, if not as it is imported."""


def agree(what: str, got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    """Print how far a result is from its reference, and stop the example where that is too far."""
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, must be {tuple(want.shape)}")
    difference = (got.detach().double() - want.detach().double()).norm()
    error = (difference / want.detach().double().norm().clamp(min=1e-30)).item()
    print(f"  check: {what:<58} relative error {error:.0e}")
    if not error <= tolerance:
        raise AssertionError(f"{what}: relative error {error:.1e}, at most {tolerance:.0e} was expected")


def compare_diag_ggn(x: Tensor, y: Tensor, model: nn.Module, loss_fn: nn.Module, entries: int = 10) -> None:
    """Compare evenly spaced entries of `diag_ggn_exact` with products of the GGN and unit vectors by autograd."""
    params = [p for p in model.parameters() if p.requires_grad]
    got = torch.cat([p.diag_ggn_exact.flatten() for p in params])
    index = torch.linspace(0, len(got) - 1, entries, dtype=torch.float64).long()  # float32 rounds large indices up
    want = autograd_diag_ggn_exact(x, y, model, loss_fn, idx=index)
    for i, value, reference in zip(index.tolist(), got[index].tolist(), want.tolist(), strict=True):
        match = abs(value - reference) <= 1e-4 * abs(reference) + 1e-12
        print(f"  entry {i:>8}: bpk {value:.5e}, autograd {reference:.5e}, match: {match}")
        if not match:
            raise AssertionError(f"entry {i} of the GGN diagonal is {value}, autograd says {reference}")


def shapes(model: nn.Module, *fields: str) -> None:
    """Print the shapes of each parameter and of the fields saved on it."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            print(f"  {name:<24}", shape(p), *(f"{f} {shape(getattr(p, f))}" for f in fields))


def shape(tensor: Tensor) -> Sequence[int]:
    """A shape as a short list."""
    return list(tensor.shape)


def needs(*packages: str, extra: str = "demo") -> None:
    """Stop with the command that helps, where a package that an example needs (of this extra) is missing."""
    missing = [NAME.get(package, package) for package in packages if find_spec(package) is None]
    if missing:
        raise SystemExit(f"skipped: this example needs {', '.join(missing)}; install with  pip install '.[{extra}]'")
