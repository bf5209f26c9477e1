"""The hyperparameters of a layer as they were in a call: users may change them before the next one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import WithArguments
from bpk.recording.changed import Changed, Stamp, is_changed, stamp
from bpk.recording.membership import MARK, Mark, is_users, where_is

PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types of hyperparameters."""

SEQUENCES = (tuple, list)
"""Those that may be made of them."""

COUNT, COUNTED = "num_batches_tracked", ("running_mean", "running_var")
"""A forward pass of BatchNorm in training mode changes its statistics without a new version, so autograd uses wrong
ones of an earlier call in evaluation mode; but it counts."""


FIXED = "_bpk_hyperparameters"
"""Under which name what stands for a layer that nobody has made keeps those of all its calls."""


def is_setting(value: Any) -> bool:
    """Whether this is a hyperparameter: no tuple of tensors, say, which a layer keeps of its last call."""
    kind = type(value)
    return kind in PLAIN or (kind in SEQUENCES and all(map(is_setting, value)))


def is_other(now: Any, known: Any) -> bool:
    """Whether an attribute has another value than the hyperparameter that it was."""
    return type(now) is not type(known) or not is_setting(now) or now != known


def hyperparameters_of(module: nn.Module, options: Any) -> Hyperparameters:
    """Those of a call that was made now: where there are no tensors among them, of all calls that find the same."""
    fields = module.__dict__
    mark: Mark | None = fields.get(MARK)
    known: Hyperparameters | None = fields.get(FIXED) if mark is None else mark.hyperparameters
    if known is None or not known.are_still(fields):
        known = Hyperparameters(settings_of(module))
        if mark is not None:
            mark.hyperparameters = known if will_tell(module, known.plain) else None
    if options is module and not module._buffers:
        return known
    buffers = {name: (x, stamp(x)) for name, x in module._buffers.items() if x is not None}
    if options is module:
        return Hyperparameters(known.plain, buffers)
    return Hyperparameters(known.plain, buffers, {name: stamp(x) for name, x in tensors_of(options)}, module)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module: without those of torch's classes that are nobody's business but theirs."""
    found: dict[str, Any] = {}
    private = is_users(module)
    for name, value in module.__dict__.items():
        kind = type(value)
        if name.startswith("_") and not private:
            continue
        if kind in PLAIN:
            found[name] = value
        elif kind in SEQUENCES and is_setting(value):
            found[name] = value if kind is tuple else copy.deepcopy(value)
    return found


def will_tell(module: nn.Module, plain: Mapping[str, Any]) -> bool:
    """Whether these attributes of a module are other objects where hyperparameters have changed.

    A class of torch reads none that was set later. What is in a list may change in place.
    """
    return not is_users(module) and list not in map(type, plain.values())


class Hyperparameters:
    """What a call depends on beside inputs and parameters.

    `plain` are the plain attributes of the module, its mode (training or evaluation) among them, `buffers` its buffers
    with what tells whether they still have their values, and `given` tells so of tensors among the options of the call,
    where these are not the `module` itself. `looks_at` keeps how many axes a rule has said that a call with some shapes
    looks at.
    """

    def __init__(
        self,
        plain: Mapping[str, Any],
        buffers: Mapping[str, tuple[Tensor, Stamp]] = MappingProxyType({}),
        given: Mapping[str, Stamp] = MappingProxyType({}),
        module: nn.Module | None = None,
    ) -> None:
        self.plain = plain
        self.buffers = buffers
        self.given = given
        self.module = module
        self.looks_at: tuple[Any, tuple[torch.Size, ...], int | None] | None = None

    def are_still(self, fields: Mapping[str, Any]) -> bool:
        """Whether the plain attributes of a module are the same objects."""
        return all(map(is_, map(fields.get, self.plain), self.plain.values()))

    def as_called(self, options: Any) -> Any:
        """The options as they were; a module shares its parameters with its copy."""
        if not isinstance(options, nn.Module):
            return self.arguments_as_called(options)
        now, buffers = options.__dict__, options._buffers
        if not self.are_still(now):
            for name, value in self.plain.items():
                if is_other(now.get(name), value) and not name.startswith("_"):
                    return self.earlier(options)
        for name, (x, known) in self.buffers.items():
            if buffers.get(name) is not x or is_changed(x, known):
                return self.earlier(options)
        return options

    def arguments_as_called(self, options: Any) -> Any:
        """The same of options that have tensors among them."""
        assert self.module is not None
        lost = [(name, x) for name, x in tensors_of(options) if is_changed(x, self.given.get(name))]
        gone = {name: Changed.of(where_is(self.module), name, x) for name, x in lost}
        if not isinstance(options, WithArguments):
            return dataclasses.replace(options, **gone) if gone else options
        module = self.as_called(options.module)
        if not gone and module is options.module:
            return options
        return WithArguments(module, {**options.arguments, **gone})

    def earlier(self, module: nn.Module) -> nn.Module:
        """A copy as the module was."""
        made = copy.copy(module)
        gone = {name for name, (x, known) in self.buffers.items() if is_changed(x, known)}
        if COUNT in gone and not self.plain.get("training"):
            gone.update(COUNTED)
        where = where_is(module)
        buffers = {name: Changed.of(where, name, x) if name in gone else x for name, (x, _) in self.buffers.items()}
        made.__dict__.update(self.plain, _buffers={**module._buffers, **buffers})
        return made


def tensors_of(options: Any) -> Iterable[tuple[str, Tensor]]:
    """The tensors among the arguments of a call that a rule does not see as inputs."""
    if isinstance(options, WithArguments):
        named = options.arguments
    elif dataclasses.is_dataclass(options):
        named = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    else:
        named = {}
    return [(name, x) for name, x in named.items() if isinstance(x, Tensor)]
