"""What `bpk` computes: one backward pass per quantity, of whose fields only the compared entries are kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bpk.context import backpack
from bpk.extending import extend, memory_cleanup
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.kernels.predictive import only
from bpk.plan.parts import from_parts, in_parts
from bpk.verification.gradient import Gradients
from bpk.verification.picked import Picked
from bpk.verification.place import Extent, Place
from bpk.verification.problem import Problem
from bpk.verification.quantities import Check, Mismatch, Read
from bpk.verification.result import Verdict

DRAWS, PASSES = 5, 10
"""Of a sampled quantity: draws per backward pass, and backward passes."""
MOST_PASSES = 16
"""Over how many backward passes the parameters are spread, if the fields of all do not fit into memory."""


@dataclass
class Measurement:
    """By parameter: what was read (once per pass), what is wrong with a field, or a verdict and its reason."""

    read: dict[str, list[Read]] = field(default_factory=dict)
    mismatch: dict[str, str] = field(default_factory=dict)
    ended: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)

    def absent(self, used: bool) -> tuple[Verdict, str]:
        """The verdict on a parameter without a field."""
        if not used:
            return Verdict.UNCHECKED, "the loss does not depend on it"
        if self.warned:
            return Verdict.REFUSED, self.warned[0]
        return Verdict.WRONG, "there is no field, although the loss depends on the parameter"


class Measured:
    """An extended copy of the model, on which every extension runs alone; `.grad` is compared after each pass."""

    def __init__(
        self,
        problem: Problem,
        gradients: Gradients,
        use_converter: bool,
        extent: Extent,
        memory: float,
        say: Callable[[str], None],
    ) -> None:
        self.problem, self.gradients, self.extent, self.say = problem, gradients, extent, say
        self.params = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model: nn.Module = extend(problem.model, use_converter=use_converter)
            self.loss = problem.loss if isinstance(problem.loss, Picked) else extend(problem.loss)
        self.limit = memory * 2**30 / 8  # in numbers of eight bytes

    def run(
        self, extension: BackpropExtension, check: Check, places: Mapping[str, Place], passes: int = 1
    ) -> Measurement:
        """One extension on all parameters, in so many backward passes."""
        result = Measurement()
        groups, result.ended = self.groups(extension, check, places)
        for group in groups[:MOST_PASSES]:
            with only(self.params, group), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    self.run_group(extension, check, {name: places[name] for name in group}, result, passes)
                except Exception as error:  # whatever a broken rule raises is a result
                    refused = isinstance(error, UnsupportedLayer) or "\n  Why: " in str(error)
                    text = one_line(error) if refused else f"{type(error).__name__}: {one_line(error)}"
                    result.ended = dict.fromkeys(places, (Verdict.REFUSED if refused else Verdict.WRONG, text))
                    return result
            result.warned += [text for w in caught if leaves_out(extension, text := one_line(w.message))]
        return result

    def groups(
        self, extension: BackpropExtension, check: Check, places: Mapping[str, Place]
    ) -> tuple[list[list[str]], dict[str, tuple[Verdict, str]]]:
        """Parameters whose fields are in memory together, and those that are left out."""
        columns, sizes = columns_of(extension, self.extent.columns), dict[str, int]()
        ended: dict[str, tuple[Verdict, str]] = {}
        for name, place in places.items():
            sizes[name] = check.numbers(place, columns)
            most = max(sizes[name], check.on_the_way(self.extent))
            if most > self.limit:
                del sizes[name]
                ended[name] = Verdict.UNCHECKED, f"it would take {most * 8 / 2**30:.1f} GiB (memory=)"
        groups = list(packed(sizes, self.limit))
        left = [name for group in groups[MOST_PASSES:] for name in group]
        why = "the fields of all parameters do not fit into memory (memory=)"
        return groups, ended | dict.fromkeys(left, (Verdict.UNCHECKED, why))

    def is_spread(self, extension: BackpropExtension, check: Check, places: Mapping[str, Place]) -> bool:
        """Whether some pass may not reach all predictions: only a part of the parameters requires gradients."""
        return sum(map(len, self.groups(extension, check, places)[0][:1])) < len(places)

    def run_group(
        self, extension: BackpropExtension, check: Check, places: dict[str, Place], result: Measurement, passes: int
    ) -> None:
        """One extension on some parameters."""
        used = check.variant(extension, next(iter(places.values())))
        if check.sampled:
            used = copy.copy(used)
            used.__dict__["mc_samples"] = columns_of(extension, 1)
        for number in range(passes):
            self.backward(used, number, f"backward pass {number + 1} of {passes}")
            for name, place in places.items():
                self.gradients.compare(type(extension).__name__, name, self.params[name].grad)
                value = self.params[name].__dict__.pop(used.savefield, None)
                if value is None:
                    continue
                if self.params[name].is_complex():
                    value = of_parts(value)
                try:
                    result.read.setdefault(name, []).append(check.read(value, check.at(place)))
                except Mismatch as error:
                    result.mismatch[name] = str(error)
            memory_cleanup(self.model)
            memory_cleanup(self.loss)

    def backward(self, extension: BackpropExtension, number: int, about: str) -> None:
        """A forward and a backward pass; the draws of pass `number`."""
        names = {id(module): name for name, module in self.model.named_modules() if name}

        def reached(module: nn.Module) -> None:
            self.say(f"{about}, at {names.get(id(module), 'the loss')}")

        for param in self.params.values():
            param.grad = None
        loss = self.problem.objective(self.problem.predict(model=self.model), self.loss)
        torch.manual_seed(seed_of(self.problem, number))
        self.say(about)
        context = backpack(extension, extension_hook=reached, **self.problem.options)
        if not isinstance(self.loss, Picked):
            context.checks_objective = False  # where it would refuse, the comparison shows which numbers are wrong
        with context:
            loss.backward()


def of_parts(value: Any) -> Any:
    """The field of a complex parameter as that of its real and imaginary parts."""
    if isinstance(value, Tensor):
        return in_parts(value)
    return (lambda mat: in_parts(value(from_parts(mat)))) if callable(value) else value


def leaves_out(extension: BackpropExtension, warning: str) -> bool:
    """Whether a warning says that there are parameters without this quantity; others excuse no missing field."""
    left_out = " cannot be computed for " in warning or " no field of " in warning
    return left_out and type(extension).__name__ in warning


def columns_of(extension: BackpropExtension, exact: int) -> int:
    """How many columns travel."""
    drawn = extension.get_num_mc_samples()
    return exact if drawn is None else max(drawn, DRAWS)


def seed_of(problem: Problem, number: int) -> int:
    """The seed of a backward pass."""
    return problem.seed + 1 + number


def packed(sizes: Mapping[str, int], limit: float) -> Iterator[list[str]]:
    """Names in groups whose sizes add up to at most `limit`."""
    group: dict[str, int] = {}
    for name, size in sizes.items():
        if group and sum(group.values()) + size > limit:
            yield [*group]
            group = {}
        group[name] = size
    if group:
        yield [*group]


def one_line(error: object) -> str:
    """A message without its line breaks, and without the file of the rule."""
    lines = [line for line in str(error).splitlines() if not line.strip().startswith("Rule:")]
    return " ".join(" ".join(lines).split())
