"""A model that is extended while batches pass, and is left as it was found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bpk.extending import detach, extend
from bpk.recording.changed import is_changed, stamp
from bpk.recording.context.state import CTX
from bpk.recording.membership import parts_of


@contextmanager
def extended(*modules: nn.Module) -> Iterator[None]:
    """Extend those of which no part is; afterwards, take the hooks away again from what was not extended before."""
    before = {id(module) for module in CTX.all_modules()}
    for module in modules:
        if not any(id(part) in before for part in parts_of(module).values()):
            extend(module)
    try:
        yield
    finally:
        for module in (part for whole in modules for part in whole.modules()):
            if id(module) not in before:
                detach(module)


@contextmanager
def set_aside(params: Iterable[Tensor], fields: Iterable[str]) -> Iterator[None]:
    """Put gradients and fields of parameters aside, and back in the end."""
    with ExitStack() as stack:
        for param in params:
            stack.callback(put_back, param, param.grad, {f: vars(param)[f] for f in fields if f in vars(param)}, fields)
            param.grad = None
            for name in fields:
                vars(param).pop(name, None)
        yield


def put_back(param: Tensor, grad: Tensor | None, values: Mapping[str, object], fields: Iterable[str]) -> None:
    """Let a parameter have this gradient and these fields."""
    param.grad = grad
    for name in fields:
        vars(param).pop(name, None)
    vars(param).update(values)


class Buffers:
    """The buffers of modules, as they were found.

    Each batch starts from these, so that batches add up to a large one where forward passes change them (spectral
    normalisation in training mode), and a run that goes on gets the same bits.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.known = [
            (part, name, x, x.clone(), stamp(x))
            for part in (part for whole in modules for part in whole.modules())
            for name, x in part.named_buffers(recurse=False)
            if not is_lazy(x)
        ]

    def put_back(self) -> None:
        """Let buffers that were changed or replaced be the ones before."""
        for number, (part, name, x, before, known) in enumerate(self.known):
            if is_changed(x, known) or (part.training and name.startswith("running_")):  # written uncounted
                with torch.no_grad():
                    x.copy_(before)
                self.known[number] = part, name, x, before, stamp(x)
            if getattr(part, name, None) is not x:
                setattr(part, name, x)
