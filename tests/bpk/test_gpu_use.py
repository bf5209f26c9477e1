"""How a GPU is used: Python does not wait for it, memory is given back; streams, data sets, operators."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk import operators, preconditioners
from bpk.extensions.backprop_extension import BackpropExtension
from tests.bpk.on_gpu import GPU, N, exact, fields, on_gpu, problem, same
from tests.helpers import FIELDS, backward, numbers

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.usefixtures("as_users_have_it"),
]


WITHOUT_WAITING: dict[str, tuple[type[BackpropExtension], ...]] = {
    "perceptron": (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.ClippedGrad, E.GradGram),
    "convolutions": (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.ClippedGrad),
    "residual": (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared),
    "encoder": (E.BatchGrad,),
}
"""First-order quantities that tell Python nothing."""


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_python_does_not_wait(name: str) -> None:
    """From the second pass on, Python runs ahead of the GPU, as in a plain pass."""
    model, x, y = on_gpu(name, torch.float32)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    for kind in WITHOUT_WAITING[name]:
        extension = kind(1.0) if kind is E.ClippedGrad else kind()
        for number in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number == 2 else "default")
            try:
                backward(model, loss_fn, x, y, extension)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "encoder"])
def test_curvature_waits_once(name: str) -> None:
    """For the factor of the loss, which may be negative."""
    model, x, y = on_gpu(name, torch.float32)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    for extension in (E.DiagGGNExact(), E.DiagGGNMC(), E.KFAC(), E.KFLR(), E.BatchDiagGGNExact()):
        for _ in range(2):
            backward(model, loss_fn, x, y, extension)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                backward(model, loss_fn, x, y, extension)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in caught if "synchroniz" in str(w.message)]
        assert len(waits) <= 1 + (name == "encoder"), f"{extension}: {len(waits)}"


def test_memory_is_given_back() -> None:
    """Steps take no more of it, and a pass leaves fields alone."""
    model, x, y = on_gpu("residual", torch.float32)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    held = []
    for _ in range(5):
        model.zero_grad()
        backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.KFAC())
        for p in model.parameters():
            for field in FIELDS.values():
                vars(p).pop(field, None)
        held.append(torch.cuda.memory_allocated())
    assert max(held[2:]) <= held[1]


def test_a_limit_of_memory() -> None:
    """Of columns: more of them go in rounds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 50)).to(GPU)
    x, y = torch.randn(64, 512, device=GPU), torch.randint(50, (64,), device=GPU)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    peaks, found = [], []
    for memory in (None, 4 << 20):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward(model, loss_fn, x, y, E.DiagGGNExact(), memory=memory)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append([p.diag_ggn_exact for p in model.parameters()])
    assert peaks[3] < peaks[1] / 2
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)


def test_a_model_on_two_devices() -> None:
    """The first layers on the processor, the last ones on the GPU."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out: Tensor = self.last(hidden.to(next(self.last.parameters()).device))
            return out

    torch.manual_seed(0)
    model, x, y = Divided().double(), torch.randn(N, 3).double(), torch.randint(3, (N,))
    expected = fields(copy.deepcopy(model), x, y, exact())
    model.last.to(GPU)
    same(fields(model, x, y.to(GPU), exact()), expected, 1e-9)


def test_layouts_in_memory() -> None:
    some = [E.BatchGrad(), E.SumGradSquared(), E.DiagGGNExact(), E.KFLR(), E.DiagHessian()]
    expected = fields(*problem("convolutions"), some)
    model, x, y = on_gpu("convolutions", torch.float32)
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    same(fields(model, x, y, some), expected, 1e-3)


def test_a_stream_of_its_own() -> None:
    some = [E.BatchGrad(), E.DiagGGNExact(), E.KFLR(), E.DiagHessian()]
    model, x, y = on_gpu("residual")
    expected = fields(copy.deepcopy(model), x, y, some)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = fields(model, x, y, some)
    same(found, expected, 1e-12)


def test_checkpoints() -> None:
    """Layers that are evaluated again in the backward pass, and draw the same numbers there."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Tanh())
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(checkpoint(self.inner, x, use_reentrant=False))
            return out

    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Checkpointed().double().to(GPU)), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 3, device=GPU).double(), torch.randint(3, (N,), device=GPU)
    for _ in range(2):
        model.zero_grad()
        backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact(), E.SqrtGGNExact())
        for p in model.parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
            torch.testing.assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact)


def test_compiled() -> None:
    some = [E.BatchGrad(), E.DiagGGNExact()]
    expected = fields(*problem("perceptron"), some)
    model, x, y = on_gpu("perceptron")
    extended, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    compiled = torch.compile(extended)
    for _ in range(2):
        backward(compiled, loss_fn, x, y, *some)
    for name, p in model.named_parameters():
        for e in some:
            torch.testing.assert_close(getattr(p, e.savefield).cpu().flatten(), expected[name][e.savefield])


def test_random_numbers_of_the_gpu_are_seen_by_the_converter() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x + torch.rand(3, device=GPU))
            return out

    with pytest.warns(UserWarning, match="draws random numbers"):
        bpk.extend(Noisy().to(GPU), use_converter=True)


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "encoder"])
def test_where_tensors_are_made_there_by_default(name: str) -> None:
    """`torch.set_default_device("cuda")` in the program of a user."""
    expected = fields(*problem(name), exact())
    model, x, y = on_gpu(name)
    with GPU:
        found = fields(model, x, y, exact())
        loss_fn = nn.CrossEntropyLoss()
        report = bpk.verify(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact(), E.KFAC(), E.DiagHessian())
    same(found, expected, 1e-9)
    assert report.ok


def test_verify() -> None:
    model, x, y = on_gpu("encoder")
    state = torch.cuda.get_rng_state()
    report = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.Variance(), E.DiagGGNExact(), E.KFAC(), E.DiagGGNMC())
    assert report.ok and torch.equal(state, torch.cuda.get_rng_state())


def test_a_data_set() -> None:
    """Batches come from the processor; what adds up is that of one large batch."""
    some = [E.Variance(), E.DiagGGNExact(), E.KFLR(), E.BatchGrad()]
    model, x, y = problem("convolutions")
    expected = fields(copy.deepcopy(model), x, y, some[:3])
    batches = list(zip(x.split(2), y.split(2), strict=True))
    found = bpk.accumulate(model.to(GPU), nn.CrossEntropyLoss(), batches, *some[:3], device="cuda")
    for name, values in expected.items():
        for e in some[:3]:
            value = numbers(found[name][e.savefield], torch.empty(0)).cpu()
            torch.testing.assert_close(value, values[e.savefield])


@pytest.mark.parametrize("kind", [operators.GGN, operators.Hessian, operators.EmpiricalFisher])
def test_operators(kind: Any) -> None:
    model, x, y = problem("convolutions")
    batches = list(zip(x.split(3), y.split(3), strict=True))
    expected = kind(model, nn.CrossEntropyLoss(), batches)
    v = torch.linspace(-1, 1, expected.shape[1]).double()
    on_processor = expected @ v
    model, moved = copy.deepcopy(model).to(GPU), [(a.to(GPU), b.to(GPU)) for a, b in batches]
    torch.testing.assert_close((kind(model, nn.CrossEntropyLoss(), moved) @ v.to(GPU)).cpu(), on_processor)


@pytest.mark.parametrize("kind", [preconditioners.KFAC, preconditioners.EKFAC, preconditioners.DiagonalGGN])
def test_preconditioners(kind: Any) -> None:
    """Ten steps make the loss smaller."""
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(GPU))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(64, 3, device=GPU), torch.randint(3, (64,), device=GPU)
    preconditioner, optimizer = kind(model, damping=1e-2), torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with bpk.backpack(*preconditioner.extensions):
            loss = loss_fn(model(x), y)
            loss.backward()
        preconditioner.step()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_derivatives_in_the_input() -> None:
    model, x, _ = problem("perceptron")
    expected = bpk.laplacian(model, x), bpk.input_hessian_diag(model, x)
    found = bpk.laplacian(model.to(GPU), x.to(GPU)), bpk.input_hessian_diag(model, x.to(GPU))
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), one)


def test_kernel_of_two_batches() -> None:
    model, x, _ = problem("convolutions")
    expected = bpk.ntk(model, x[:3], x[3:])
    torch.testing.assert_close(bpk.ntk(model.to(GPU), x[:3].to(GPU), x[3:].to(GPU)).cpu(), expected)
