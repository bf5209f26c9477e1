"""What a run is: model, loss, extensions and loader, in words that another process can compare."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bpk.dataset.batches import length_of
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.recording.context.surroundings import is_sharded


def fingerprint(
    model: nn.Module,
    loss_fn: nn.Module,
    extensions: Iterable[BackpropExtension],
    loader: Any,
    options: Mapping[str, object],
) -> dict[str, str]:
    """All that must be the same, by what it is called in an error."""
    found = {f"extension {e.savefield}": f"{type(e).__name__}({settings(e)})" for e in extensions}
    for what, module in (("model", model), ("loss", loss_fn)):
        found |= {f"the {what}'s layer '{path}'": described(part) for path, part in module.named_modules()}
        tensors = (*module.named_parameters(), *module.named_buffers())
        frozen = {id(p) for p in module.parameters() if not p.requires_grad}  # they get no fields
        found |= {f"the {what}'s tensor '{name}'": checksum(x) + ", frozen" * (id(x) in frozen) for name, x in tensors}
    found["the number of batches"] = str(length_of(loader))
    if isinstance(loader, DataLoader):
        found["batch_size"] = str(loader.batch_size)
        found["the length of the data set"] = str(length_of(loader.dataset))
    return found | {name: str(value) for name, value in options.items()}


def described(module: nn.Module) -> str:
    """A layer, without those inside."""
    return f"{type(module).__name__}({module.extra_repr()}; {settings(module)})"


PLAIN = (int, float, str, bool, tuple, Enum, type(None))
"""Types whose values another process writes in the same way."""


def settings(thing: object) -> str:
    """Plain attributes, functions, and checksums of lists of tensors."""
    given = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
    shown = {k: repr(v) for k, v in given.items() if isinstance(v, PLAIN)}
    shown |= {k: code_of(v) for k, v in given.items() if isinstance(v, FunctionType)}
    shown |= {k: digest(v) for k, v in given.items() if isinstance(v, list)}
    return ", ".join(f"{name}={value}" for name, value in sorted(shown.items()))


def code_of(function: FunctionType) -> str:
    """A function's name, and a checksum of its code with the plain values that it holds."""
    code, cells = function.__code__, inspect.getclosurevars(function).nonlocals.values()
    held = [v for v in (*code.co_consts, *cells, *(function.__defaults__ or ())) if isinstance(v, PLAIN)]
    digest = hashlib.sha256(repr((code.co_code, code.co_names, held)).encode())
    return f"{function.__qualname__} {digest.hexdigest()[:16]}"


def checksum(x: Tensor) -> str:
    """Type, shape and a checksum of the numbers (of a tensor in shards, which processes do not have alike, none)."""
    if is_sharded(x):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} in shards"
    if x.is_sparse:
        x = x.coalesce()
        return f"{list(x.shape)} of {checksum(x.indices())} {checksum(x.values())}"
    there = x.detach().to("cpu").contiguous()
    digest = hashlib.sha256()
    if there.numel():
        size = there.numel() * there.element_size()
        digest.update((ctypes.c_ubyte * size).from_address(there.data_ptr()))
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} {digest.hexdigest()[:16]}"


def digest(batch: Any) -> str:
    """A batch in a few letters: what two processes compare."""
    if isinstance(batch, Tensor):
        return checksum(batch)
    if isinstance(batch, Mapping):
        return "".join(f"{key!r}{digest(value)}" for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return "".join(map(digest, batch))
    return repr(batch) if isinstance(batch, (str, bytes, int, float)) else type(batch).__name__


def versions() -> dict[str, str]:
    """Of what the numbers may depend on."""
    ours = vars(sys.modules["bpk"])["__version__"]  # the package itself imports this file
    return {"bpk": ours, "torch": torch.__version__}
