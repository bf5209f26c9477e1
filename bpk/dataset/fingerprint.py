"""What a run is: model, loss, extensions and loader, in words that another process can compare."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bpk.dataset.batches import length_of
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.nested import held_by, is_instance
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


PLAIN = (int, float, str, bool, tuple, Enum, torch.dtype, type(None))
"""Types whose values another process writes in the same way."""


def is_plain(value: object) -> bool:
    """Whether it is of these types; of a tuple, all that is in it: functions are shown by their addresses."""
    return isinstance(value, PLAIN) and (not isinstance(value, tuple) or all(map(is_plain, value)))


def settings(thing: object) -> str:
    """Plain attributes, functions with what they hold, and checksums of lists of tensors."""
    given = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
    shown = {k: known for k, v in given.items() if (known := in_words(v))}
    return ", ".join(f"{name}={value}" for name, value in sorted(shown.items()))


def in_words(value: object) -> str:
    """A value, where another process writes the same one in the same way."""
    if isinstance(value, tuple):
        return f"({', '.join(map(in_words, value))})"
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, FunctionType):
        return code_of(value)
    if isinstance(value, (BuiltinFunctionType, type)):
        return value.__qualname__
    if isinstance(value, partial):
        return f"{in_words(value.func)} of {', '.join(map(in_words, value.args))} and {in_words(value.keywords)}"
    if isinstance(value, dict):
        return ", ".join(f"{key!r}: {known}" for key, x in value.items() if (known := in_words(x)))
    return digest(value) if isinstance(value, list) else ""


def code_of(function: FunctionType) -> str:
    """A function's name, and a checksum of its code with the plain values that it holds."""
    found = inspect.getclosurevars(function)
    held = {k: v for k, v in sorted({**found.globals, **found.nonlocals}.items()) if is_plain(v)}
    held |= {"": (*map(in_words, function.__defaults__ or ()), in_words(function.__kwdefaults__ or {}))}
    digest = hashlib.sha256(repr((contents(function.__code__), held)).encode())
    return f"{function.__qualname__} {digest.hexdigest()[:16]}"


def contents(code: CodeType) -> list[Any]:
    """What a function does, and with which numbers; those of functions inside of it, too."""
    held = [contents(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    return [code.co_code, code.co_names, [x for x in held if isinstance(x, (*PLAIN, list))]]


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
    if is_instance(batch):
        return type(batch).__name__ + digest(held_by(batch))
    if getattr(getattr(batch, "dtype", None), "hasobject", False):  # an array of addresses
        return digest(batch.tolist())
    if hasattr(batch, "tobytes"):  # an array of numpy, or an image
        return f"{type(batch).__name__} {hashlib.sha256(batch.tobytes()).hexdigest()[:16]}"
    return repr(batch) if isinstance(batch, (str, bytes, int, float)) else type(batch).__name__


def versions() -> dict[str, str]:
    """Of what the numbers may depend on."""
    ours = vars(sys.modules["bpk"])["__version__"]  # the package itself imports this file
    return {"bpk": ours, "torch": torch.__version__}
