"""Which modules are extended, what they hold, and which of them hold others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property
from typing import Any

from torch import nn

from bpk.jacobians.core.function_module import Plain
from bpk.recording.context.state import CTX

MARK = "_bpk_mark"
"""Under which name an extended module keeps its mark."""


class Mark:
    """Says that a module is extended; so are a copy of the module, and what is made from a pickle of it.

    `undo` takes the hooks of the module away. The module is referred to weakly, so that each copy finds its own.
    `wholes` are the models, referred to weakly, that were extended or called with the module inside, latest last: what
    is around a module is looked for there, and not in all models of the process.
    """

    hyperparameters: Any = None
    """Those of the module as its last call has found them, if others may find the same (`hyperparameters.py`)."""

    def __init__(self, undo: Callable[[nn.Module], None], module: nn.Module | None = None) -> None:
        self.undo = undo
        self.module = (lambda: None) if module is None else weakref.ref(module)
        self.wholes: list[weakref.ref[nn.Module]] = []
        if module is not None:
            CTX.add_module(module, undo)

    def be_within(self, whole: nn.Module) -> None:
        """Note that the module is inside of a model, or is one."""
        self.wholes = [ref for ref in self.wholes if ref() not in (None, whole)]
        self.wholes.append(weakref.ref(whole))

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return Mark(self.undo, memo.get(id(self.module())))

    def __reduce__(self) -> tuple[type[Mark], tuple[Any, ...]]:
        module = self.module()
        if module is None or type(module).__reduce__ is not object.__reduce__:
            return Mark, (self.undo,)  # what pickles itself (fx.GraphModule) may not have begun to exist
        return Mark, (self.undo, module)


def mark(module: nn.Module, undo: Callable[[nn.Module], None]) -> None:
    """Note that a module is extended, and what takes its hooks away."""
    fields = module.__dict__
    if MARK not in fields or fields[MARK].module() is not module:
        fields[MARK] = Mark(undo, module)
    CTX.add_module(module, undo)


def mark_whole(model: nn.Module) -> None:
    """Note that all modules inside were extended with this model."""
    for module in model.modules():
        if MARK in module.__dict__:
            module.__dict__[MARK].be_within(model)


def is_users(module: nn.Module) -> bool:
    """Whether a layer was written by users: what its class does is not known."""
    return not type(module).__module__.startswith(("torch.", "bpk."))


def path_of(module: nn.Module) -> str:
    """Where a layer sits in the extended model, for messages."""
    return module.__dict__.get("_bpk_path", "") or type(module).__name__


def where_is(module: nn.Module) -> str:
    """A layer by its path and its class, for messages."""
    return f"'{path_of(module)}' ({type(module).__name__})"


def mark_as(module: nn.Module, fields: Mapping[str, Any]) -> None:
    """Note that a module is extended if the one with these attributes is."""
    if MARK in fields:
        mark(module, fields[MARK].undo)


def unmark(module: nn.Module) -> None:
    """Note that a module is extended no more."""
    module.__dict__.pop(MARK, None)
    CTX.remove_module(module)


def wholes_of(modules: Iterable[nn.Module]) -> list[nn.Module] | None:
    """The extended models that these modules are known to be in; `None`: of some, none is known (copies, say).

    What is not extended, such as what stands for a function, is in none.
    """
    found = dict[int, nn.Module]()
    for module in modules:
        known: Mark | None = module.__dict__.get(MARK)
        is_inside = known is None
        for ref in known.wholes if known is not None else ():
            whole = ref()
            if whole is not None and MARK in whole.__dict__:
                found[id(whole)] = whole
                is_inside = True
        if not is_inside:
            return None
    return list(found.values())


def with_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules, and all that are inside."""
    found = list(modules)
    seen = {id(module) for module in found}
    for module in found:  # it grows meanwhile
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def parameters_in(*models: nn.Module) -> dict[int, nn.Parameter]:
    """All parameters of models, by `id`: what `model.parameters()` goes through, without its generators."""
    return {id(p): p for part in with_parts(models) for p in part._parameters.values() if p is not None}


class ExtendedParameters:
    """Which parameters extended modules hold, as of when it is asked first: these get fields, and no others.

    Models of the modules that it was told of (`look_at`) are looked at first, and all other extended ones only for a
    parameter that is not there.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._seen = set[int]()
        self._near = set[int]()

    def look_at(self, module: nn.Module) -> None:
        """Look at the models around a module first."""
        self._modules.append(module)

    def _is_near(self, param: nn.Parameter) -> bool:
        """Whether a parameter is in the models around the modules of which was told."""
        for module in self._modules:
            for whole in wholes_of([module]) or ():
                if id(whole) not in self._seen:
                    self._seen.add(id(whole))
                    self._near.update(parameters_in(whole))
        self._modules.clear()
        return id(param) in self._near

    @cached_property
    def _by_id(self) -> dict[int, nn.Parameter]:
        return parameters_in(*CTX.all_modules())

    def __contains__(self, param: object) -> bool:
        return isinstance(param, nn.Parameter) and (self._is_near(param) or id(param) in self._by_id)

    @property
    def params(self) -> list[nn.Parameter]:
        """These parameters."""
        return list(self._by_id.values())


def holders(modules: Iterable[nn.Module]) -> dict[int, list[nn.Module]]:
    """By `id` of a module: the modules that hold it directly, in extended models around these."""
    above: dict[int, list[nn.Module]] = {}
    parts = list(modules)
    first = {id(module) for module in parts}
    for module in parts:  # it grows meanwhile
        for child in module._modules.values():
            holding = above.get(id(child))
            if holding is not None:
                holding.append(module)
            elif child is not None:
                above[id(child)] = [module]
                if id(child) not in first:
                    parts.append(child)
    return above


def around(modules: Iterable[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The extended modules that hold any of these, and the outermost ones of both."""
    waiting = list(modules)
    known = wholes_of(waiting)
    above = holders(CTX.all_modules() if known is None else known)
    seen = {id(module) for module in waiting}
    containers, wholes = [], []
    while waiting:
        module = waiting.pop()
        holding = above.get(id(module), ())
        if not holding:
            wholes.append(module)
        for holder in holding:
            if id(holder) not in seen:
                seen.add(id(holder))
                containers.append(holder)
                waiting.append(holder)
    if known is None:
        for whole in wholes:
            mark_whole(whole)
    return containers, wholes


def taking_part(
    modules: Iterable[nn.Module], by_functions: Set[int], reached: Iterable[int]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """The same of modules, and of those that hold parameters (by `id`) which functions use, in no call of a layer.

    What stands for a product of a function holds no parameter: the model is looked for by all that were `reached`.
    """
    modules = list(modules)
    found = around(modules)
    products = [module for module in modules if isinstance(module, Plain)]
    params = {*by_functions, *reached} if products else by_functions
    if not params or params <= parameters_in(*found[1]).keys():
        return found
    holding = [each for each in CTX.all_modules() if not params.isdisjoint(parameters_in(each))]
    return around([*modules, *holding])


def containers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that were extended and hold any of these."""
    extended = {id(module) for module in CTX.all_modules()}
    return [module for module in around(modules)[0] if id(module) in extended]


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that are extended, by path; all of it if none is: it will be."""
    found: dict[str, nn.Module] = {}
    waiting = {"": model}
    while waiting:
        path, module = waiting.popitem()
        if MARK in module.__dict__:
            found[path] = module
        else:
            waiting |= {f"{path}.{name}" if path else name: child for name, child in module.named_children()}
    order = {id(module): k for k, module in enumerate(model.modules())}
    return dict(sorted(found.items(), key=lambda part: order[id(part[1])])) or {"": model}
