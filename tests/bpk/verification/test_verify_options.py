"""`verify`: options, the table, and bad input."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import bpk
from bpk import extensions as E
from bpk.verification import Row, Verdict, Verification
from bpk.verification.measured import Measured
from tests.bpk.verification.test_verify import EXACT, Data, cnn, mlp
from tests.references.compare import Assembled


# ---- options ---------------------------------------------------------------------------------------------
def test_subsampling_precision_and_several_inputs() -> None:
    chosen = [
        E.BatchGrad(subsampling=[3, 1]),
        E.Variance(subsampling=[2]),
        E.HMP(subsampling=[0]),
        E.KFAC(5, subsampling=[1]),
    ]
    assert bpk.verify(*mlp(), *chosen)
    assert bpk.verify(*mlp(), E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.KFLR(), dtype=None)
    assert bpk.verify(*mlp(), E.BatchGrad(), rtol=1e-6, atol=0.0, dtype=torch.float32)
    two = nn.Bilinear(3, 2, 2)
    data = torch.randn(4, 3), torch.randn(4, 2)
    assert bpk.verify(two, nn.MSELoss(), data, torch.randn(4, 2), E.BatchGrad(), E.KFLR())
    named = {"input1": data[0], "input2": data[1]}
    assert bpk.verify(two, nn.MSELoss(), named, torch.randn(4, 2), E.DiagGGNExact())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_batch_sizes(n: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    result = bpk.verify(model, nn.CrossEntropyLoss(), torch.randn(n, 4), torch.arange(n) % 2, *EXACT)
    assert len(result.of(Verdict.OK)) == len(result.rows), result


def test_nothing_is_changed() -> None:
    model, loss, x, y = cnn()
    model.train()
    model[1].eval()
    bpk.extend(model), bpk.extend(loss)
    with bpk.backpack(E.BatchGrad()):
        loss(model(x), y).backward()
    fields = {name: (p.grad.clone(), p.grad_batch.clone()) for name, p in model.named_parameters()}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    before = torch.get_rng_state(), x.clone()
    assert bpk.verify(model, loss, x, y, E.BatchGrad(), E.KFAC(), E.HMP())
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(x, before[1])
    assert torch.get_default_dtype() is torch.float32
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, fields[name][0]) and torch.equal(p.grad_batch, fields[name][1])
        assert not hasattr(p, "kfac") and not hasattr(p, "hmp")


def test_same_seed_same_result() -> None:
    first, again = (bpk.verify(*_mlp_of(0), E.DiagGGNMC(), seed=3) for _ in range(2))
    assert first == again
    assert first != bpk.verify(*_mlp_of(0), E.DiagGGNMC(), seed=4)


def _mlp_of(seed: int) -> Data:
    torch.manual_seed(seed)
    return mlp()


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bpk.verify(*mlp(), E.BatchGrad())
    assert capsys.readouterr().err == ""
    clock = itertools.count(0, 20)
    monkeypatch.setattr("bpk.progress.time.monotonic", lambda: next(clock))
    bpk.verify(*mlp(), E.BatchGrad(), progress=True)
    assert "BatchGrad" in capsys.readouterr().err


# ---- the table -------------------------------------------------------------------------------------------
def test_table() -> None:
    rows = tuple(Row(f"{k}.weight", "KFAC", Verdict.OK, 2, 1e-9 * k, 1e-8 * k) for k in range(60))
    wrong = Row("head.weight", "KFAC", Verdict.WRONG, 2, 1.0, 2.0, "bpk 1, autograd 2")
    table = Verification((*rows, wrong))
    assert not table and table.summary() == "60 ok, 1 WRONG"
    lines = str(table).splitlines()
    assert lines[2].split() == ["0.weight,", "...", "(60)", "KFAC", "120", "5.9e-08", "5.9e-07", "ok"]
    assert lines[3].endswith("WRONG    [1]") and lines[4] == "[1] bpk 1, autograd 2"
    assert table.to_markdown().count("\n| ") == 3
    assert table.to_markdown(full=True).count("\n| ") == 62
    assert not Verification(())


# ---- bad input -------------------------------------------------------------------------------------------
def two_results(m: Any, x: Tensor) -> Any:
    return m.a(x), x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d[0], nn.CrossEntropyLoss, *d[2:]), "The loss is the class CrossEntropyLoss, which is no module"),
        (lambda d: (d[0], 3, *d[2:]), "The loss is of type int, which is no module"),
        (lambda d: (d[0], lambda output, y: output, *d[2:]), "the function that picks the loss returned shape"),
        (lambda d: (d[0], lambda output: output.sum(), *d[2:]), "the function that picks the loss fails for what"),
        (lambda d: (nn.Linear, *d[1:]), "The model is the class Linear, which is no module"),
        (lambda d: (d[0], nn.CrossEntropyLoss(reduction="none"), *d[2:]), "needs a scalar loss"),
        (
            lambda d: (Assembled(two_results, a=nn.Linear(4, 3)), *d[1:]),
            r"that is tuple with tensors of shape \[4, 3\]",
        ),
        (lambda d: (Assembled(lambda m, x: None), *d[1:]), "that is NoneType without tensors"),
        (
            lambda d: (*d[:3], torch.randn(2, 5)),
            r"(?s)fails for what Sequential returns and these targets: .*shape \[4, 3\] \(float64\); "
            r"the targets are a tensor of shape \[2, 5\] \(float64\)",
        ),
        (lambda d: (*d[:3], None), "fails for what Sequential returns and no targets"),
        (
            lambda d: (Assembled(lambda m, x: m.a(x).a, a=nn.Linear(4, 3)), *d[1:]),
            "forward pass of a copy of Assembled fails",
        ),
        (lambda d: (Assembled(lambda m, x: m.a(x).detach(), a=nn.Linear(4, 3)), *d[1:]), "the loss does not depend on"),
        (lambda d: (*d[:2], "text", d[3]), "no input with a batch axis"),
        (lambda d: (*d[:2], torch.randn(4, 7), d[3]), "forward pass of a copy of Sequential fails"),
        (lambda d: (*d, E.BatchGrad), r"write backpack\(BatchGrad\(\)\)"),
    ],
)
def test_bad_input(change: Callable[[Data], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bpk.verify(*change(mlp()))


def test_gradients_themselves_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bpk.verify(*mlp(), E.BatchGrad(), E.KFLR())
    count = len(list(mlp()[0].parameters()))
    assert result.gradients == 2 * count
    assert str(result).endswith(f".grad compared after each pass, {2 * count} in all: none wrong")
    backward = Measured.backward

    def disturbed(self: Measured, *args: Any) -> None:
        backward(self, *args)
        next(iter(self.params.values())).grad[0] *= 1.001  # type: ignore[index]

    monkeypatch.setattr(Measured, "backward", disturbed)
    result = bpk.verify(*mlp(), E.BatchGrad(), E.KFLR())
    assert [row.quantity for row in result.wrong] == [".grad with BatchGrad", ".grad with KFLR"]
    assert "entry [0" in result.wrong[0].note and str(result).endswith("2 wrong")


def test_random_slopes_do_not_mix_samples() -> None:
    """Torch draws slopes for negative entries only: those of one sample move the draws of the next."""
    model = nn.Sequential(nn.Linear(4, 6), nn.RReLU(inplace=True), nn.Linear(6, 3))
    data = torch.randn(5, 4), torch.randint(0, 3, (5,))
    result = bpk.verify(model, nn.CrossEntropyLoss(), *data, E.DiagGGNMC(), E.BatchGrad(), E.KFLR())
    assert result.ok and not result.of(Verdict.UNCHECKED), result


class Warming(nn.Module):
    """Scales by how often it was called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * float(self.calls)


def test_models_that_change_their_buffers() -> None:
    """As spectral normalisation in training mode, whose power iteration takes a step in each forward pass."""
    for part in (spectral_norm(nn.Linear(4, 4)), Warming()):
        model = nn.Sequential(part, nn.Tanh(), nn.Linear(4, 3))
        before = [x.clone() for x in model.buffers()]
        data = torch.randn(3, 4), torch.tensor([0, 1, 2])
        assert bpk.verify(model, nn.CrossEntropyLoss(), *data, E.BatchGrad(), E.DiagGGNExact(), E.KFLR(), E.HMP())
        assert all(torch.equal(x, y) for x, y in zip(model.buffers(), before, strict=True))
