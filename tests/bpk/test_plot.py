"""`bpk.plot`: what is drawn is what the fields hold. No display is used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import bpk
from bpk import plot
from bpk.extensions import KFLR, BatchGrad, DiagGGNExact, Variance

pytest.importorskip("matplotlib")


def trained() -> nn.Sequential:
    """A small model with fields."""
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    with bpk.backpack(DiagGGNExact(), Variance(), KFLR(), BatchGrad()):
        bpk.extend(nn.CrossEntropyLoss())(model(torch.randn(20, 6)), torch.randint(3, (20,))).backward()
    return model


def test_a_strip_has_the_entries() -> None:
    model = trained()
    axes = plot.strip(model, "diag_ggn_exact", bins=30)
    drawn = torch.as_tensor(axes.images[0].get_array().filled(float("nan")))
    assert drawn.shape == (4, 30)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    torch.testing.assert_close(drawn[0], model[0].weight.diag_ggn_exact.flatten().double().log10(), equal_nan=True)
    torch.testing.assert_close(drawn[3, ::10], model[2].bias.diag_ggn_exact.double().log10())
    whole = torch.as_tensor(plot.strip(model, "diag_ggn_exact", bins=1).images[0].get_array())
    torch.testing.assert_close(whole[0, 0], model[0].weight.diag_ggn_exact.double().mean().log10())


def test_gradient_noise_is_that_of_the_mean() -> None:
    model = trained()
    axes = plot.gradient_noise(model, samples=20)
    samples = 20 * model[0].weight.grad_batch  # gradients of each sample's own loss
    expected = (samples.var(0, unbiased=False).sum() / 20).sqrt() / model[0].weight.grad.norm()
    assert axes.patches[0].get_width() == pytest.approx(float(expected), rel=1e-4)


def test_spectra_are_those_of_the_product() -> None:
    model = trained()
    axes = plot.kronecker_spectra(model, "kflr")
    spectrum = torch.linalg.eigvalsh(torch.kron(*[f.double() for f in model[0].weight.kflr])).flip(0)
    drawn = torch.as_tensor(axes.lines[0].get_ydata())
    torch.testing.assert_close(drawn, spectrum[: len(drawn)])
    assert len(drawn) > 5 and len(axes.lines) == 4


def test_histograms_have_a_column_for_each_step() -> None:
    history = {0: torch.tensor([0.0, 1.0, 1.0, 1.0]), 10: torch.tensor([0.01, 0.01, 1.0, 1.0])}
    drawn = torch.as_tensor(plot.histograms(history, bins=2).images[0].get_array())
    torch.testing.assert_close(drawn, torch.tensor([[0.0, 0.5], [1.0, 0.5]], dtype=drawn.dtype))
    plot.histograms({0: torch.ones(3)})  # one value


def test_axes_of_the_user_are_used() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots(4)
    model = trained()
    assert plot.strip(model, "variance", axes[0]) is axes[0]
    assert plot.gradient_noise(model, 20, axes[1]) is axes[1]
    assert plot.kronecker_spectra(model, "kflr", axes[2]) is axes[2]
    assert plot.histograms({0: torch.ones(3)}, axes[3]) is axes[3]


def test_what_is_not_there_is_said() -> None:
    model = trained()
    with pytest.raises(ValueError, match="no parameter has the field 'diag_h'"):
        plot.strip(model, "diag_h")
    with pytest.raises(ValueError, match="has not the shape"):
        plot.strip(model, "grad_batch")
    with pytest.raises(ValueError, match="not a list of dense factors"):
        plot.kronecker_spectra(model, "variance")
    with pytest.raises(ValueError, match="no step"):
        plot.histograms({})
    with pytest.raises(ValueError, match="all entries are zero"):
        plot.histograms({0: torch.zeros(3)})
    model.zero_grad()
    with pytest.raises(ValueError, match="has no gradient"):
        plot.gradient_noise(model, 20)


def test_matplotlib_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install '.\[plot\]'"):
        plot.strip(trained(), "variance")


def test_bpk_imports_no_matplotlib() -> None:
    code = "import sys, bpk; bpk.plot.strip; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
