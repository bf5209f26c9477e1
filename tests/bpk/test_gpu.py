"""What is different on a GPU: its own kernels, its random numbers, its memory, and that it works while Python goes on.

`pytest --device cuda` runs the other tests there, too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk import operators, preconditioners
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import FIELDS, backward, numbers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

GPU = torch.device("cuda")
N, T = 5, 6
ELSEWHERE = (E.KFRA, E.PCHMP, E.EKFLR)
"""What is defined for chains of layers only; and eigenvectors, some of which may be any (`test_matrix.py` has them)."""


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recurrent layers by cuDNN, and tensors on the processor unless it is said otherwise, also with `--device`."""
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        monkeypatch.setattr(torch._VF, name, getattr(torch._C._VariableFunctions, name))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", acceptable)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch.device("cpu"):
        yield


def acceptable(x: Tensor) -> bool:
    """Whether cuDNN takes a tensor."""
    return x.is_cuda and torch.backends.cudnn.enabled


class Recurrent(nn.Module):
    """The last step of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


class Residual(nn.Module):
    """Convolutions with a shortcut, and functions between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner, self.head = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = x + torch.tanh(self.inner(x))
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return out


class Encoder(nn.Module):
    """A table, an encoder layer, and the mean over steps."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.table(tokens)).mean(1))
        return out


class Tied(nn.Module):
    """A language model whose table is the last layer's weight, with causal attention by the fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed, self.norm = nn.Embedding(7, 8), nn.Linear(8, 24), nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.mixed(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = self.head(x).transpose(1, 2)
        return out


def images() -> Tensor:
    return torch.randn(N, 2, 6, 6)


def series() -> Tensor:
    return torch.randn(N, T, 3)


def tokens() -> Tensor:
    return torch.randint(7, (N, T))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(3, 4, 2), nn.GroupNorm(2, 4), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), lambda: torch.randn(N, 3)),
    "convolutions": (convolutions, images),
    "residual": (lambda: Residual().eval(), images),
    "LSTM": (lambda: Recurrent(nn.LSTM(3, 4, 2, batch_first=True)), series),
    "GRU": (lambda: Recurrent(nn.GRU(3, 2, bidirectional=True, batch_first=True)), series),
    "encoder": (Encoder, tokens),
    "tied": (Tied, tokens),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in double precision on the processor, data, and labels."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make().double(), inputs()
    y = torch.randint(3, (N, T) if name == "tied" else (N,))
    return model, x.double() if x.is_floating_point() else x, y


def fields(
    model: nn.Module, x: Tensor, y: Tensor, extensions: list[BackpropExtension], passes: int = 2, **options: Any
) -> dict[str, dict[str, Tensor]]:
    """Numbers of fields on the processor, by parameter and field, of the last of so many passes; also gradients."""
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(passes):
        model.zero_grad()
        backward(model, loss_fn, x, y, *extensions, **options)
    found: dict[str, dict[str, Tensor]] = {}
    for name, p in model.named_parameters():
        vectors = torch.linspace(-1, 1, 2 * p.numel(), device=p.device, dtype=p.dtype).reshape(2, *p.shape)
        found[name] = {e.savefield: numbers(getattr(p, e.savefield), vectors).cpu() for e in extensions}
        assert p.grad is not None
        found[name]["grad"] = p.grad.cpu()
    return found


def exact() -> list[BackpropExtension]:
    """All quantities that draw nothing."""
    return [e for e in every_extension() if e.get_num_mc_samples() is None and type(e) not in ELSEWHERE]


def same(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]], tolerance: float) -> None:
    for name, values in expected.items():
        for field, value in values.items():
            error, size = (found[name][field].double() - value).norm(), value.norm()
            assert error <= tolerance * (size + 1e-3), f"{name}.{field}: {error:.1e} of {size:.1e}"


def on_gpu(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """The same problem on the GPU."""
    model, x, y = problem(name)
    x = x.to(dtype) if x.is_floating_point() else x
    return model.to(GPU, dtype), x.to(GPU), y.to(GPU)


@pytest.mark.parametrize("name", MODELS)
def test_every_quantity_is_that_of_the_processor(name: str) -> None:
    expected = fields(*problem(name), exact())
    same(fields(*on_gpu(name), exact()), expected, 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_single_precision(name: str) -> None:
    """By the kernels that training takes: cuDNN's, and fused attention."""
    some = [e for e in exact() if isinstance(e, (E.BatchGrad, E.Variance, E.DiagGGNExact, E.KFLR, E.DiagHessian))]
    same(fields(*on_gpu(name, torch.float32), some), fields(*problem(name), some), 1e-3)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
@pytest.mark.parametrize("name", ["encoder", "tied"])
def test_kernels_of_attention(name: str, backend: SDPBackend) -> None:
    some = [E.BatchGrad(), E.DiagGGNExact(), E.KFLR(), E.DiagHessian()]
    with sdpa_kernel(backend):
        found = fields(*on_gpu(name, torch.float32), some)
    same(found, fields(*problem(name), some), 1e-3)


@pytest.mark.parametrize("name", ["encoder", "tied"])
def test_flash_attention(name: str) -> None:
    """In half precision, as its kernels ask for."""
    some = [E.BatchGrad(), E.SumGradSquared(), E.DiagGGNExact(), E.KFLR()]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = fields(*on_gpu(name, torch.bfloat16), some)
    same(found, fields(*problem(name), some), 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["convolutions", "residual", "LSTM", "encoder"])
def test_mixed_precision(name: str, dtype: torch.dtype) -> None:
    """Autocast, with a scaled loss where the format is short of exponents."""
    some = [E.BatchGrad(), E.BatchL2Grad(), E.SumGradSquared(), E.DiagGGNExact(), E.KFLR()]
    expected = fields(*problem(name), some)
    model, x, y = on_gpu(name, torch.float32)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(*some, grad_scaler=scaler):
        with torch.autocast("cuda", dtype):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
    for name, p in model.named_parameters():
        for e in some:
            value = expected[name][e.savefield]
            found = numbers(getattr(p, e.savefield), torch.empty(0)).cpu().double()
            assert (found - value).norm() <= 0.1 * value.norm() + 1e-4, f"{name}.{e.savefield}"


@pytest.mark.parametrize("name", MODELS)
def test_draws_are_those_of_the_seed(name: str) -> None:
    """The same seed gives the same numbers, whose fields agree with each other."""
    found = []
    for _ in range(2):
        model, x, y = on_gpu(name)
        bpk.extend(model)
        loss_fn = bpk.extend(nn.CrossEntropyLoss())
        torch.manual_seed(1)
        backward(model, loss_fn, x, y, E.SqrtGGNMC(2), E.DiagGGNMC(2), E.KFAC(2))
        found.append([p.sqrt_ggn_mc for p in model.parameters()])
        for p in model.parameters():
            torch.testing.assert_close(p.diag_ggn_mc, p.sqrt_ggn_mc.square().sum((0, 1)))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)


def test_sampled_curvature_is_right_in_the_mean() -> None:
    model, x, y = on_gpu("perceptron")
    bpk.extend(model)
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, E.DiagGGNMC(20000), E.DiagGGNExact())
    for p in model.parameters():
        error = (p.diag_ggn_mc - p.diag_ggn_exact).norm() / p.diag_ggn_exact.norm()
        assert error < 0.05


def test_attention_that_drops_weights() -> None:
    """Fused kernels draw where nobody can draw again; torch's plain functions can be asked."""
    torch.manual_seed(0)
    model, x, y = Encoder(dropout=0.3).double().to(GPU), tokens().to(GPU), torch.randint(3, (N,), device=GPU)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with sdpa_kernel(SDPBackend.MATH):
        backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact(), E.SqrtGGNExact())
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        torch.testing.assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact)


def test_recurrent_layers_that_drop_values_are_refused() -> None:
    model = bpk.extend(Recurrent(nn.LSTM(3, 4, 2, batch_first=True, dropout=0.5)).to(GPU))
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), series().to(GPU), torch.randint(3, (N,), device=GPU)
    with pytest.raises(UnsupportedLayer, match="cannot be drawn again"):
        backward(model, loss_fn, x, y, E.BatchGrad())


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
    assert len(set(held[1:])) == 1


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
