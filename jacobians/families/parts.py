"""What composed layers share: their parts, whose parameter is whose, and products for parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.numeric import sum_of_squares
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.families.linear_map import RandomScale
from bpk.jacobians.rule import Rule

Part = tuple[Rule, Callable[[Options], Options]]
"""A rule, and how its hyperparameters are found in those of the whole layer."""

T = TypeVar("T")


def submodule(name: str) -> Callable[[Options], Options]:
    """The part's hyperparameters are those of the child module `name` (`"0"` in a `Sequential`)."""
    return partial(nn.Module.get_submodule, target=name)


def same(options: Options) -> Options:
    """The part reads its hyperparameters from the whole layer's."""
    return options


class Composite(Rule):
    """What chains and branches share: parts, whose parameter is whose, and products for parameters.

    `params` maps the layer's parameter names to `(part index, name within the part)`; left out, they are
    called `"0.weight"`, `"1.bias"`, … as in a `Sequential`. Parts that draw random numbers cannot be
    evaluated again and are refused while they do.
    """

    def __init__(
        self,
        *parts: Part,
        modules: Sequence[type[nn.Module]] = (),
        functions: Sequence[Any] = (),
        params: Mapping[str, tuple[int, str]] | None = None,
        examples: Sequence[Example] = (),
    ) -> None:
        named = {f"{i}.{name}": (i, name) for i, (rule, _) in enumerate(parts) for name in rule.params}
        self.owners: dict[str, tuple[int, str]] = named if params is None else dict(params)
        self.parts = parts
        super().__init__(*modules, functions=functions, params=tuple(self.owners), examples=examples)

    @property
    def name(self) -> str:
        if self.modules or self.functions:
            return super().name
        return f"{type(self).__name__}({', '.join(rule.name for rule, _ in self.parts)})"

    def obstacle(self, call: Call) -> str | None:
        if (reason := self._random(call)) is not None:
            return reason
        reasons = (rule.obstacle(inner) for rule, inner in self._inner(call))
        return next((reason for reason in reasons if reason is not None), None) or self.mixing(call)

    def mixing(self, call: Call) -> str | None:
        if self._random(call) is not None:  # parts are not evaluated again
            return None
        reasons = (rule.mixing(inner) for rule, inner in self._inner(call))
        return next((reason for reason in reasons if reason is not None), None)

    def _random(self, call: Call) -> str | None:
        """Why the parts cannot be evaluated again."""
        for rule, part_options in self.parts:
            if isinstance(rule, RandomScale) and rule.is_random(part_options(call.options)):
                return f"{rule.name} in it draws random numbers, which a composed layer cannot draw again"
        return None

    # ---- the parts -------------------------------------------------------------------------------
    def _of_part(self, index: int, given: Mapping[Any, T]) -> dict[Wrt, T]:
        """Entries of a mapping over the layer's parameters that belong to one part, under its own names."""
        return {name: given[outer] for outer, (i, name) in self.owners.items() if i == index and outer in given}

    def residual_squares(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        """From the columns of its parts, which are often fewer than the entries of a parameter."""
        columns, signs = self.signed_columns(call, grad_out, (param,))
        return sum_of_squares(columns[param], signs).to(grad_out.dtype)

    def _outer_names(self, index: int, values: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """Results of a part (by input and its own parameter names) under the layer's names."""
        outer: dict[Wrt, Tensor] = {wrt: x for wrt, x in values.items() if isinstance(wrt, int)}
        return outer | {o: values[name] for o, (i, name) in self.owners.items() if i == index and name in values}

    def _inner(self, call: Call) -> list[tuple[Rule, Call]]:
        """Every part with its own call, evaluated once per call."""
        calls = call.memo((self, "parts"), lambda: self._evaluate(call.options, call.inputs, call.params, call.output))
        return [(rule, inner) for (rule, _), inner in zip(self.parts, calls, strict=True)]

    def _part_call(
        self,
        index: int,
        options: Options,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        output: Tensor | None,
    ) -> Call:
        rule, part_options = self.parts[index]
        own_options, own_params = part_options(options), {str(k): p for k, p in self._of_part(index, params).items()}
        if isinstance(own_options, nn.Module):
            self._require_in_front(rule, rule.bind(own_options, tuple(inputs), {}))
        if output is None:
            output = rule.forward(own_options, inputs, own_params)
        return Call(own_options, inputs, own_params, output)

    def _require_in_front(self, rule: Rule, seen: Binding) -> None:
        """Refuse a part that would be seen otherwise if it were called by itself: parts see what the others give."""
        reason, do = seen.problem, seen.do
        if any(seen.axes) or seen.out_axis(0):
            reason, do = "its batch axis is not in front.", "move it there (batch_first=True), or call it by itself."
        if reason:
            raise UnsupportedLayer(f"{rule.name} cannot be a part of {type(self).__name__}.", reason, do)

    @abstractmethod
    def _evaluate(
        self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor], output: Tensor | None
    ) -> list[Call]:
        """The call of every part; `output` is the layer's, where it is known already."""

    @abstractmethod
    def _pull_to(self, call: Call, index: int, mat: Tensor) -> Tensor:
        """From the layer's output to that of a part: `[V, N, *out] -> [V, N, *out_i]`."""

    @abstractmethod
    def _push_from(self, call: Call, index: int, mat: Tensor) -> Tensor:
        """From the output of a part to the layer's: `[V, N, *out_i] -> [V, N, *out]`."""

    # ---- parameters: by the part that owns them ---------------------------------------------------
    def _owner(self, call: Call, param: str) -> tuple[int, Rule, Call, str]:
        index, name = self.owners[param]
        return index, *self._inner(call)[index], name

    def _param_jac_mat_prod(self, call: Call, mat: Tensor, param: str) -> Tensor:
        index, rule, inner, name = self._owner(call, param)
        return self._push_from(call, index, rule.jac_mat_prod(inner, mat, name))

    def _param_jac_t_mat_prod(self, call: Call, mat: Tensor, param: str, sum_batch: bool) -> Tensor:
        index, rule, inner, name = self._owner(call, param)
        return rule.jac_t_mat_prod(inner, self._pull_to(call, index, mat), name, sum_batch)

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        index, rule, inner, name = self._owner(call, param)
        return rule.squared_sum(inner, self._pull_to(call, index, mat), name, weights, per_sample)

    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        index, rule, inner, name = self._owner(call, param)
        return rule.outer(inner, self._pull_to(call, index, mat), name)

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        index, rule, inner, name = self._owner(call, param)
        return rule.norm_squared(inner, self._pull_to(call, index, grad_out[None])[0], name)

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        _, rule, inner, name = self._owner(call, param)
        return rule.kron_input(inner, name, approximation)

    def kron_output(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        index, rule, inner, name = self._owner(call, param)
        return rule.kron_output(inner, self._pull_to(call, index, mat), name, approximation)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        index, rule, inner, name = self._owner(call, param)
        return rule.kron_rows(inner, self._pull_to(call, index, mat), name, approximation)

    def kron_matrix(self, call: Call, rows: Tensor, param: str, outputs: int) -> Tensor:
        _, rule, inner, name = self._owner(call, param)
        return rule.kron_matrix(inner, rows, name, outputs)

    def projected_squares(
        self, call: Call, mats: Sequence[Tensor], param: str, left: Tensor | None, right: Tensor | None
    ) -> Tensor | None:
        index, rule, inner, name = self._owner(call, param)
        pulled = [self._pull_to(call, index, mat) for mat in mats]
        return rule.projected_squares(inner, pulled, name, left, right)


def join_columns(
    call: Call, wrts: Sequence[Wrt], found: Sequence[tuple[Mapping[Wrt, Tensor], Tensor]]
) -> tuple[dict[Wrt, Tensor], Tensor]:
    """Stack columns of several parts; where a part does not depend on a `wrt`, its columns are zero there."""
    like, n = call.output, call.batch_size
    columns: dict[Wrt, Tensor] = {}
    for wrt in wrts:
        shape = call.sample_shape(wrt)
        blocks = [c[wrt] if wrt in c else like.new_zeros(s.shape[0], n, *shape) for c, s in found]
        columns[wrt] = torch.cat(blocks) if blocks else like.new_zeros(0, n, *shape)
    signs = [s for _, s in found]
    return columns, torch.cat(signs) if signs else like.new_zeros(0, n)
