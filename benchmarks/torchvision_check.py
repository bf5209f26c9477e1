"""One model of torchvision: individual gradients and GGN diagonal in one backward pass, against plain autograd."""

from __future__ import annotations

import fnmatch
import gc
import resource
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import bpk
from benchmarks.torchvision_reference import error, of_samples
from bpk.extensions import BatchGrad, DiagGGNExact
from bpk.plan.support import Kind
from examples._torchvision import import_torchvision

models = import_torchvision().models  # here, so that it is imported once for all processes

CLASSES = 3
SAMPLES = 2
TRAINED = 60_000_000
"""In larger models the largest tensors are frozen."""

SECONDS, GIB, ERROR = 60.0, 12.0, 1e-8
"""What a model may take, and the relative error that is allowed."""

SIZES = {"alexnet": 224, "vgg*": 224, "maxvit_t": 224, "inception_v3": 75, "vit_h_14": 28, "vit_*": 32, "*": 64}
"""Width and height of the images, by the first pattern that fits (Inception v3 takes no fewer than 75)."""


@dataclass
class Result:
    """What was found for one model, with or without the converter.

    `seconds` are those of extend, forward and backward, `gib` the peak of the resident memory meanwhile, the model
    included; `plain_seconds` and `plain_gib` the same for the reference. Errors are the largest difference of an entry,
    divided by the largest entry of the same tensor. `commit` is the last one that had changed the package.
    """

    model: str
    converter: bool
    size: int = 0
    params: int = 0
    trained: int = 0
    unused: int = 0
    seconds: float = 0.0
    gib: float = 0.0
    gradient_error: float = 0.0
    ggn_error: float = 0.0
    plain_seconds: float = 0.0
    plain_gib: float = 0.0
    by_rule: int = 0
    generic: int = 0
    warnings: list[str] = field(default_factory=list)
    problem: str = ""
    commit: str = ""

    @property
    def faults(self) -> list[str]:
        """What is not as it must be."""
        limits = {
            f"takes {self.seconds:.0f} s": self.seconds > SECONDS,
            f"takes {self.gib:.1f} GiB": self.gib > GIB,
            f"individual gradients are off by {self.gradient_error:.1e}": not self.gradient_error < ERROR,
            f"GGN diagonal is off by {self.ggn_error:.1e}": not self.ggn_error < ERROR,
            self.problem: bool(self.problem),
        }
        return [fault for fault, holds in limits.items() if holds]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Usage:
    """Processor time and peak of the resident memory of a `with` block.

    On one thread processor time is what the clock would show on an idle machine. The peak is reset at the start where
    the system can do that (Linux); elsewhere it is the one since the start of the process.
    """

    seconds = 0.0
    gib = 0.0

    def __enter__(self) -> Usage:
        gc.collect()
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")
        self.started = time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds = time.process_time() - self.started
        if sys.platform == "linux":
            status = Path("/proc/self/status").read_text().splitlines()
            kib = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
        else:
            kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        self.gib = kib / 2**20


def names() -> list[str]:
    """The classification models of torchvision, the smallest first."""
    found = models.list_models(module=models)
    return sorted(found, key=lambda name: models.get_model_weights(name).DEFAULT.meta["num_params"])


def image_size(name: str) -> int:
    """Width and height of the images that a model gets."""
    return next(size for pattern, size in SIZES.items() if fnmatch.fnmatch(name, pattern))


def build(name: str, **options: Any) -> nn.Module:
    """A model with random weights."""
    if name.startswith("vit_"):
        options.setdefault("image_size", image_size(name))
    if name in ("googlenet", "inception_v3"):
        options.setdefault("init_weights", False)  # a slow initialisation of their own
    torch.manual_seed(0)
    return prepared(models.get_model(name, num_classes=CLASSES, **options), image_size(name))


def prepared(model: nn.Module, size: int) -> nn.Module:
    """In evaluation mode and float64; all but the smallest tensors are frozen.

    BatchNorms take their statistics from a batch (of more images than are used later, which keeps rounding errors
    small): with those that they start with, deep networks with random weights are so certain that the GGN is zero.
    """
    model.double().eval()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:
        with torch.no_grad():
            model(data(size, 4 * SAMPLES)[0])
        model.eval()
    for param in model.parameters():
        if param.dim() > 1 and not param.any():  # the last layer of ViT: all gradients before it would be zero
            nn.init.normal_(param, std=0.02)
    total = 0
    for param in sorted(model.parameters(), key=Tensor.numel):
        total += param.numel()
        param.requires_grad_(total <= TRAINED)
    return model


def data(size: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    torch.manual_seed(1)
    return torch.randn(samples, 3, size, size, dtype=torch.float64), torch.arange(samples).mul(2) % CLASSES


def check(name: str, converter: bool) -> Result:
    """Measure one of torchvision's models and compare every entry with plain autograd."""
    result = Result(name, converter, image_size(name))
    examine(build(name), result)
    return result


def examine(model: nn.Module, result: Result) -> None:
    """Measure a model and compare every entry with plain autograd."""
    x, y = data(result.size)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    result.params = sum(p.numel() for p in model.parameters())
    result.trained = sum(p.numel() for p in params.values())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Usage() as usage:
            extended = bpk.extend(model, use_converter=result.converter)
            loss_fn = bpk.extend(nn.CrossEntropyLoss())
            with bpk.backpack(BatchGrad(), DiagGGNExact()):
                loss_fn(extended(x), y).backward()
    result.seconds, result.gib = usage.seconds, usage.gib
    result.warnings = [str(warning.message).splitlines()[0] for warning in told]
    compare(model, params, x, y, result)
    table = bpk.support(extended, DiagGGNExact(), inputs=x)
    result.by_rule, result.generic = len(table.of(Kind.SUPPORTED)), len(table.generic)


def compare(model: nn.Module, params: dict[str, nn.Parameter], x: Tensor, y: Tensor, result: Result) -> None:
    """Compare the fields of all parameters with plain autograd, and measure what autograd takes."""
    bpk.memory_cleanup(model)
    for param in model.parameters():
        param.grad = None
    fields = {
        n: (vars(p)["grad_batch"], vars(p)["diag_ggn_exact"]) for n, p in params.items() if "grad_batch" in vars(p)
    }
    expected = {n: torch.zeros_like(p) for n, p in params.items()}
    used: set[str] = set()
    idle: list[str] = []
    with Usage() as usage, bpk.disable():
        for n, (gradients, columns) in enumerate(of_samples(model, x, y, params)):
            for name, gradient in gradients.items():
                used.add(name)
                if n == 0 and not gradient.any():
                    idle.append(name)
                if name in fields:
                    result.gradient_error = max(result.gradient_error, error(fields[name][0][n], gradient))
            for column in columns:
                for name, gradient in column.items():
                    expected[name].addcmul_(gradient, gradient)
    result.plain_seconds = usage.seconds
    result.plain_gib = usage.gib - sum(a.nbytes + b.nbytes for a, b in fields.values()) / 2**30
    result.unused = len(params) - len(used)
    idle += [name for name in used if not expected[name].any()]
    for name in used & set(fields):
        result.ggn_error = max(result.ggn_error, error(fields[name][1], expected[name]))
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad and "grad_batch" in vars(p)]
    if missing := sorted(used - set(fields)):
        result.problem = f"{len(missing)} parameters have no field, such as {missing[0]}"
    elif idle:
        result.problem = f"{len(idle)} gradients or GGN diagonals are zero and prove nothing, such as that of {idle[0]}"
    elif extra := sorted([*(set(fields) - used), *frozen]):
        result.problem = f"{len(extra)} parameters have a field but no gradient, such as {extra[0]}"
