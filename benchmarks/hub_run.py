"""One model of `transformers` or `timm`: four quantities in a backward pass each, against plain autograd."""

from __future__ import annotations

import importlib.metadata
import signal
import statistics
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bpk
from benchmarks.hub_models import MODELS, SAMPLES, Hub
from benchmarks.hub_result import Finding, HubResult
from bpk.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.second_order.fused import StandIns
from bpk.jacobians.second_order.stand_ins import TWICE

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""By the lowest precision that a model computes in (some normalise in float32 always): the largest difference of an
entry, divided by the largest entry of its tensor."""

SECONDS = 60.0
"""Of processor time, that a quantity may take."""

SMALL = 30_000
"""Up to so many parameters `DiagHessian` is tried."""

NOISE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Entries are compared with no less than this share of the largest of all: some tensors are zero but for rounding."""

TENSORS = 60
"""Of so many parameters two entries of second-order quantities are compared: the largest, and a random one."""


class Slow(Exception):
    """A quantity takes longer than it may."""


class Wrong(Exception):
    """A value is not what it must be."""


def precisions(logits: Tensor) -> set[torch.dtype]:
    """In which precision what `logits` depends on is computed."""
    found, seen, waiting = {logits.dtype}, {logits.grad_fn}, [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        assert node is not None
        found.update(each.dtype for each in node._input_metadata)  # type: ignore[attr-defined]
        above = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= above
        waiting += above
    return found


class Problem:
    """A model, its inputs and its targets."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.model = hub.build()
        self.inputs = hub.inputs()
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        logits = hub.call(self.model, self.inputs)
        lowest = torch.float32 if torch.float32 in precisions(logits) else torch.float64
        self.tolerance, self.noise = TOLERANCE[lowest], NOISE[lowest]
        classes = logits.shape[-1] if logits.dim() < 4 else logits.shape[1]
        torch.manual_seed(2)
        shape = logits.shape[:-1] if logits.dim() < 4 else (len(logits), *logits.shape[2:])
        self.targets = torch.randint(classes, shape)

    def logits(self) -> tuple[Tensor, Tensor]:
        """Flattened logits and targets."""
        self.model.train().eval()  # some keep what they have computed from parameters until they are trained again
        found = self.hub.call(self.model, self.inputs)
        return (found.flatten(0, 1), self.targets.flatten()) if found.dim() == 3 else (found, self.targets)

    def loss(self) -> Tensor:
        """The mean loss."""
        return F.cross_entropy(*self.logits())


def check(number: int) -> HubResult:
    """Check a line of the table."""
    hub = MODELS[number]
    problem = Problem(hub)
    result = HubResult(hub.title, hub.package, importlib.metadata.version(hub.package))
    result.params = sum(p.numel() for p in problem.params.values())
    bpk.extend(problem.model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for extension in (BatchGrad(), DiagGGNExact(), DiagHessian(), KFAC()):
            name = type(extension).__name__
            if name == "DiagHessian" and result.params > SMALL:
                result.findings[name] = Finding("skipped", reason=f"more than {SMALL} parameters")
            else:
                result.findings[name] = examine(problem, loss_fn, extension)
        if result.findings["BatchGrad"].verdict == "ok":
            result.ratio = ratio(problem, loss_fn)
    mine = [str(w.message) for w in told if "bpk" in str(w.message) or "\n  Why:" in str(w.message)]
    result.warnings = list(dict.fromkeys(message.splitlines()[0] for message in mine))
    return result


def examine(problem: Problem, loss_fn: nn.Module, extension: BackpropExtension) -> Finding:
    """One quantity."""
    started = time.perf_counter()
    try:
        for param in problem.params.values():
            param.grad = None
            vars(param).clear()
        with within(SECONDS), bpk.backpack(extension):
            loss_fn(*problem.logits()).backward()
        taken = time.perf_counter() - started
        found = {n: vars(p)[extension.savefield] for n, p in problem.params.items() if extension.savefield in vars(p)}
        bpk.memory_cleanup(problem.model)
        with within(2 * SECONDS), bpk.disable():
            error = compare(problem, extension, found)
    except Wrong as wrong:
        return Finding("wrong", seconds=taken, reason=str(wrong))
    except (Slow, MemoryError) as slow:
        return Finding("slow", reason=str(slow))
    except Exception as failure:
        if "allocate memory" in str(failure):
            return Finding("slow", reason="more memory than it may take")
        refused = "\n  Why:" in str(failure)
        if not refused:
            traceback.print_exc()
        reason = str(failure) if refused else f"{type(failure).__name__}: {failure} {place_of(failure)}"
        return Finding("refused" if refused else "crashed", reason=reason)
    verdict = "ok" if error < problem.tolerance else "wrong"
    return Finding(verdict, error, taken, "" if verdict == "ok" else f"off by {error:.1e}")


def place_of(error: Exception) -> str:
    """The last line of the package that an exception has passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/bpk/" in f.filename]
    return f"({frames[-1].filename.rsplit('/bpk/')[-1]}, {frames[-1].name})" if frames else ""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise if a block takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Slow(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def compare(problem: Problem, extension: BackpropExtension, found: Mapping[str, Tensor]) -> float:
    """The largest error."""
    if isinstance(extension, KFAC):
        return factors_are_finite(problem, found)
    if isinstance(extension, BatchGrad):
        return of_gradients(problem, found)
    with sdpa_kernel(SDPBackend.MATH), StandIns(TWICE):  # fused kernels cannot be differentiated twice, or are wrong
        if isinstance(extension, DiagHessian):
            return of_diagonal(problem, found, *hessian(problem))
        try:
            return of_diagonal(problem, found, *ggn(problem))
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            return of_columns(problem, found)


def of_gradients(problem: Problem, found: Mapping[str, Tensor]) -> float:
    """Individual gradients: every entry.

    The forward pass has the whole batch: torch differentiates BatchNorm2d in evaluation mode wrongly for some batches
    of one.
    """
    expected: dict[str, list[Tensor]] = {}
    logits, targets = problem.logits()
    for rows in torch.arange(len(logits)).chunk(SAMPLES):
        loss = F.cross_entropy(logits[rows], targets[rows]) / SAMPLES
        grads = torch.autograd.grad(loss, list(problem.params.values()), retain_graph=True, allow_unused=True)
        for (name, p), g in zip(problem.params.items(), grads, strict=True):
            expected.setdefault(name, []).append(torch.zeros_like(p) if g is None else g)
    rows = {name: torch.stack(parts) for name, parts in expected.items()}
    require_fields(found, {name for name, row in rows.items() if row.any()})
    scale = max(float(row.abs().max()) for row in rows.values())
    return worst({name: (found[name], row) for name, row in rows.items() if name in found}, problem.noise * scale)


def require_fields(found: Mapping[str, Tensor], used: set[str]) -> None:
    """Parameters that take part must have a field."""
    missing = sorted(used - set(found))
    if missing:
        raise Wrong(f"{len(missing)} parameters have no field, such as {missing[0]}")


def worst(pairs: Mapping[str, tuple[Tensor, Tensor]], least: float) -> float:
    """The largest difference, divided by the largest entry of the tensor."""
    errors = {}
    for name, (value, expected) in pairs.items():
        if value.shape != expected.shape:
            raise Wrong(f"{name} has the shape {list(value.shape)} instead of {list(expected.shape)}")
        difference = float((value - expected).abs().max())
        errors[name] = difference / max(float(expected.abs().max()), least) if difference else 0.0
    first = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    if not errors[first] < 0.1:
        raise Wrong(f"{first} is off by {errors[first]:.1e}")
    return errors[first]


def hessian(problem: Problem) -> tuple[list[Tensor | None], Tensor | None]:
    """The gradient, to be differentiated again."""
    found = torch.autograd.grad(
        problem.loss(), list(problem.params.values()), create_graph=True, allow_unused=True, materialize_grads=False
    )
    return list(found), None


def ggn(problem: Problem) -> tuple[list[Tensor | None], Tensor | None]:
    """`J^T v` as a function of `v`, and the loss's Hessian at the flattened logits."""
    logits, _ = problem.logits()
    v = torch.zeros_like(logits, requires_grad=True)
    found = torch.autograd.grad(logits, list(problem.params.values()), v, create_graph=True, allow_unused=True)
    return list(found), v


def of_columns(problem: Problem, found: Mapping[str, Tensor]) -> float:
    """Every entry of the GGN diagonal: the squares of `J^T s`, for columns `s` of a square root of the loss's Hessian.

    For functions that torch differentiates only once.
    """
    logits, _ = problem.logits()
    probabilities, terms = logits.detach().softmax(1), len(logits)
    params = list(problem.params.values())
    expected = {name: torch.zeros_like(p) for name, p in problem.params.items()}
    for row, p in zip(logits, probabilities, strict=True):
        for column in (p.sqrt().diag() - torch.outer(p, p.sqrt())).T / terms**0.5:
            grads = torch.autograd.grad(row, params, column, retain_graph=True, allow_unused=True)
            for name, g in zip(expected, grads, strict=True):
                if g is not None:
                    expected[name] += g.square()
    require_fields(found, {name for name, value in expected.items() if value.any()})
    scale = max(float(value.abs().max()) for value in expected.values())
    return worst({n: (found[n], value) for n, value in expected.items() if n in found}, problem.noise * scale)


def of_diagonal(
    problem: Problem, found: Mapping[str, Tensor], products: list[Tensor | None], v: Tensor | None
) -> float:
    """Some entries of a diagonal."""
    torch.manual_seed(3)
    used = [(n, p, g) for (n, p), g in zip(problem.params.items(), products, strict=True) if g is not None]
    require_fields(found, {n for n, _, g in used if g.requires_grad and (v is not None or g.any())})
    scale = max(float(value.abs().max()) for value in found.values())
    chosen = [used[k] for k in sorted(torch.randperm(len(used))[:TENSORS].tolist())]
    p_hat = None if v is None else probabilities(problem)
    error = 0.0
    for name, param, product in chosen:
        if name not in found or not product.requires_grad:
            continue
        value = found[name].flatten()
        if value.shape[0] != param.numel() or found[name].shape != param.shape:
            raise Wrong(f"{name} has the shape {list(found[name].shape)}")
        largest = max(float(value.abs().max()), problem.noise * scale) or 1.0  # all are zero behind a dead ReLU
        for entry in (int(value.abs().argmax()), int(torch.randint(param.numel(), ()))):
            of = product.flatten()[entry]
            (second,) = torch.autograd.grad(of, param if v is None else v, retain_graph=True, allow_unused=True)
            if second is None:
                expected = 0.0
            elif p_hat is None:
                expected = float(second.flatten()[entry])
            else:
                expected = curvature(second, *p_hat)
            off = abs(float(value[entry]) - expected) / largest
            if not off < problem.tolerance:
                raise Wrong(f"{name} is off by {off:.1e} at entry {entry}")
            error = max(error, off)
    return error


def probabilities(problem: Problem) -> tuple[Tensor, int]:
    """Of each class, classes last, and the number of terms."""
    with torch.no_grad():
        logits, targets = problem.logits()
        return logits.movedim(1, -1).softmax(-1), targets.numel()


def curvature(tangent: Tensor, p: Tensor, terms: int) -> float:
    """`t^T H t` for cross-entropy, averaged over terms."""
    t = tangent.movedim(1, -1)
    return float(((p * t * t).sum(-1) - (p * t).sum(-1) ** 2).sum() / terms)


def factors_are_finite(problem: Problem, found: Mapping[str, Tensor]) -> float:
    """Kronecker factors: sizes that fit the parameter, and finite values."""
    for name, factors in found.items():
        sizes = [len(factor) for factor in factors]
        if torch.Size(sizes).numel() != problem.params[name].numel():
            raise Wrong(f"{name} {list(problem.params[name].shape)} has factors of sizes {sizes}")
        if not all(bool(torch.isfinite(f.coalesce().values() if f.is_sparse else f).all()) for f in factors):
            raise Wrong(f"a factor of {name} is not finite")
    with_gradient = {name for name, p in problem.params.items() if p.grad is not None}
    require_fields(found, with_gradient)
    return 0.0


def ratio(problem: Problem, loss_fn: nn.Module) -> float:
    """Processor time of forward and backward pass with `BatchGrad`, divided by that of plain ones; medians of three."""

    def plain() -> None:
        with bpk.disable():
            F.cross_entropy(*problem.logits()).backward()

    def batched() -> None:
        with bpk.backpack(BatchGrad()):
            loss_fn(*problem.logits()).backward()

    times = []
    for step in (batched, plain):
        step()
        found = []
        for _ in range(3):
            started = time.process_time()
            step()
            found.append(time.process_time() - started)
        times.append(statistics.median(found))
    return times[0] / times[1]
