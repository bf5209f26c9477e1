"""`bpk.support` and `bpk.support_matrix`: what is computed by rule, generically, or not, before any backward pass.

All answers are those of `bpk.support.support`, which the dispatcher asks, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from bpk.context import check_extension
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.binding import tensors_in
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.core.rule import Rule
from bpk.recording.membership import parts_of
from bpk.rules import REGISTRY
from bpk.support.decide import Kind, Support
from bpk.support.decide import support as answer
from bpk.support.table import Cell, SupportTable

FUNCTIONS = Support(Kind.GENERIC, "Parameters that this module holds itself are used by plain functions.")

IDLE = Support(Kind.SUPPORTED, "It has no parameters, and autograd passes the gradient.")


class Unseen(Call):
    """A call of which only the layer is known: asking for its tensors raises `AttributeError`."""

    def __init__(self, options: nn.Module) -> None:
        self.options = options
        self.params = {}
        self._memo = {}


@overload
def support(subject: nn.Module, /, *extensions: BackpropExtension, inputs: Any = None) -> SupportTable: ...
@overload
def support(
    subject: BackpropExtension, rule: Rule | None, call: Call | None = None, name: str = "it", /
) -> Support: ...
def support(subject: Any, /, *rest: Any, inputs: Any = None, **named: Any) -> SupportTable | Support:
    """Which layer of a model gets which quantity: by rule, generically, or not, with the reason and what to do.

    Without `inputs`, reasons are those that the layers' options tell (BatchNorm in training mode). With them, one
    forward pass of a copy is recorded, and its real calls decide; what lies between layers as plain functions, and
    parameters that such functions use, have rows of their own.

    Args:
        subject: The model, in the mode (training, evaluation) that is meant. If only a part of it is extended, the
            answer is about that part; if nothing is, about all of it.
        *rest: Which extensions (all by default).
        inputs: What the model is called with: a tensor, a tuple of arguments, or a mapping of named ones.

    With an extension instead of a model this is the question that the dispatcher asks,
    `support(extension, rule, call=None, name="it") -> Support`.

    >>> import torch, bpk
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())
    >>> print(bpk.support(model, bpk.extensions.KFAC(), bpk.extensions.DiagGGNExact()))
    where  layer        KFAC         DiagGGNExact
    -----  -----------  -----------  ------------
    0      Linear       rule         rule
    1      BatchNorm1d  refused [1]  generic [2]
    2      ReLU         rule         rule
    [1] BatchNorm in training mode mixes samples: it standardises with the statistics of the batch. Do: ...
    [2] BatchNorm in training mode mixes samples: ... The quantity is that of the whole batch, ...
    >>> bpk.support(model.eval()).refused
    ()
    """
    if isinstance(subject, BackpropExtension):
        return answer(subject, *rest, **named)
    if not isinstance(subject, nn.Module):
        raise ValueError(f"support(...) takes a model (nn.Module), got {type(subject).__name__}.")
    for extension in rest:
        check_extension(extension)
    extensions = rest or every_extension()
    if inputs is not None:
        from bpk.support.of_forward import (
            recorded,  # it needs the dispatcher, which asks this package's `support` in turn
        )

        return recorded(subject, extensions, inputs)
    return SupportTable(
        tuple(
            cell
            for start, part in parts_of(subject).items()
            for path, module in layers(part, start)
            for cell in of_layer(path, module, extensions)
        )
    )


def layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers that `extend` would hook, and modules that hold parameters themselves, with their paths."""
    rule, children = REGISTRY.find(module), dict(module.named_children())
    own = any(p is not None for p in module.parameters(recurse=False))
    if (rule is not None or not children or own) and not isinstance(module, Plain):
        yield path, module
    if rule is None:
        for name, child in children.items():
            yield from layers(child, f"{path}.{name}" if path else name)


def of_layer(path: str, module: nn.Module, extensions: Sequence[BackpropExtension]) -> Iterator[Cell]:
    """The row of a layer of which no call is known."""
    rule, name = REGISTRY.find(module), type(module).__name__
    for extension in extensions:
        if extension.module_extension(module) is not None:
            found = Support(Kind.SUPPORTED)
        elif rule is None and len(list(module.children())):
            found = FUNCTIONS
        else:
            found = of_options(extension, rule, module)
        passed = found.kind is Kind.REFUSED or rule is None
        if passed and is_idle(extension, module.parameters(recurse=False)):
            found = IDLE
        yield Cell(path, name, extension_name(extension), found.kind, found.reason, found.do)


def of_options(extension: BackpropExtension, rule: Rule | None, module: nn.Module) -> Support:
    """The answer as far as it does not depend on tensors."""
    name = type(module).__name__
    try:
        return answer(extension, rule, Unseen(module), name)
    except AttributeError:
        return answer(extension, rule, None, name)


def is_idle(extension: BackpropExtension, params: Iterable[Tensor]) -> bool:
    """Whether a first-order extension has nothing to do at a layer."""
    return not extension.second_order and extension.sweep() is not None and not any(p.requires_grad for p in params)


def extension_name(extension: BackpropExtension) -> str:
    """How a column is called."""
    return type(extension).__name__


def support_matrix(*extensions: BackpropExtension) -> SupportTable:
    """Every layer and loss that has a rule, times every extension.

    Each cell is decided by the calls of the rule's examples: refused where all of them are, otherwise with the reasons
    of those that are.

    >>> import bpk
    >>> table = bpk.support_matrix(bpk.extensions.DiagGGNExact())
    >>> [(cell.layer, cell.kind.value) for cell in table.cells if cell.layer in ("Linear", "LSTM")]
    [('Linear', 'supported'), ('LSTM', 'supported')]
    """
    chosen = extensions or every_extension()
    cells: list[Cell] = []
    for rule in REGISTRY:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = calls_of(rule)
        for module in rule.modules:
            mine = [call for made, call in calls if made is module] or [call for _, call in calls]
            cells += (of_rule(rule, module.__name__, mine, extension) for extension in chosen)
    return SupportTable(tuple(cells))


def calls_of(rule: Rule) -> list[tuple[type[nn.Module], Call]]:
    """The examples of a rule, evaluated."""
    found = []
    for example in rule.examples if rule.modules else ():
        module, inputs = example.build().double(), example.inputs()
        binding = rule.bind(module, inputs, {})
        results = [x.detach() for x in tensors_in(module(*(x.clone() for x in inputs)))]  # layers may work in place
        output, used = rule.join(binding, results, (0,))
        known = dict(module.named_parameters())
        params = {name: known[name] for name in rule.params_of(module) if name in known}
        found.append((type(module), Call(binding.options, binding.seen(binding.inputs), params, output, used=used)))
    return found


def of_rule(rule: Rule, name: str, calls: Sequence[Call], extension: BackpropExtension) -> Cell:
    """One cell of the matrix."""
    answers: list[Support] = [answer(extension, rule, call, name) for call in calls] or [
        answer(extension, rule, None, name)
    ]
    refused = [found for found in answers if found.kind is Kind.REFUSED]
    if len(refused) == len(answers):
        kind = Kind.REFUSED
    else:
        kind = next(found.kind for found in answers if found.kind is not Kind.REFUSED)
    texts = dict.fromkeys((found.reason, found.do) for found in (refused or answers) if found.reason)
    partly = "In some cases: " if refused and kind is not Kind.REFUSED else ""
    reason, do = next(iter(texts), ("", ""))
    return Cell("", name, extension_name(extension), kind, partly + reason if reason else "", do)
