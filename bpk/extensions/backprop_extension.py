"""What every extension is: a sweep to listen to, and how a parameter's share of it becomes a field.

Whatever the field is computed with asks for no more than this, so that nothing of it is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from reprlib import repr
from typing import Any

from torch import Tensor, nn

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.module_extension import ModuleExtension
from bpk.extensions.options import checked_indices, positive, require_options
from bpk.extensions.over_batches import OverBatches, Parts, Rows, Size
from bpk.jacobians.core.errors import value_error
from bpk.plan.quantity import FAIL_ERROR as FAIL_ERROR
from bpk.plan.quantity import FAIL_SILENT as FAIL_SILENT
from bpk.plan.quantity import FAIL_WARN as FAIL_WARN
from bpk.plan.quantity import PassListener, Takes


class BackpropExtension:
    """Base class of all extensions.

    Args:
        savefield: Name of the field on each parameter.
        module_exts: Module extensions by layer class; they take precedence over rules.
        fail_mode: What happens at a layer that is not supported. An extension that works by rules ends in an error
            wherever fields would be wrong.
        subsampling: Indices of the samples to consider, in this order; a sample counts as often as it is named.
            Divisors stay the full batch's.
    """

    field: str = ""
    """The name of the field, of an extension that is not told it."""
    second_order = False
    """Whether something beside the gradient must travel backwards."""
    needs_rows = False
    """Whether individual rows `[V, N, *p]` are materialised anyway."""
    needs_samples = False
    """Whether per-sample squares `[N, *p]` are materialised anyway."""
    combines = False
    """Whether values from some of the columns, and from the others, give the whole (see `combine`)."""
    stacks = False
    """Whether these are rows `[V, N, *p]` that are put one behind the other."""
    sums_rows = False
    """Whether the value adds up rows, exact ones of a square root, so that each may count as a sample of its own."""
    takes: Takes = "columns"
    """Of what the value is made: squares and factors may be known without columns."""
    sums_samples = False
    """Whether the value (of second order) is one of the whole batch, so that it exists where samples mix."""
    linear_in_terms = False
    """Whether it is a sum over terms of the loss also where samples mix: of Jacobians, with no gradient in between."""
    joins_calls = False
    """Whether it has columns of second derivatives, and is the same if these are those of several calls together."""
    needs_gradient = False
    """Whether the value uses the parameter's gradient of this backward pass."""
    needs_independence = False
    """Whether a quantity of first order is refused where samples mix, and is not what the chain rule gives there."""
    needs_total = False
    """Whether the value uses what all parameters of the pass add up to (`share`), in `uses.total`."""
    joins_parameters = False
    """Whether `share` and `value` are the same for several parameters as for one with all their entries in a row."""
    averages = False
    """Whether a mean over samples is part of the value, so that there must be some."""
    over_batches: OverBatches | str | None = None
    """How the fields of batches make that of all their samples (`bpk.accumulate`), or why they do not.

    A reason may have a second line: what to do instead.
    """
    power: float | None = None
    """Of which power of the loss the field is, where `over_batches` does not say so."""
    adds_field = True
    """Whether the field is itself what adds up over batches; else, it is the `statistic`."""
    linear = False
    """Whether the field is made of gradients or columns as they are, so that it is complex where the parameter is.

    Squares and others are those of real and imaginary parts, `[*p, 2]`.
    """
    listener: PassListener | None = None
    """Who is told of the backward passes in which it is computed."""
    form: Form
    """What the field holds, of an extension that says so by a `definition`."""

    __signature__: inspect.Signature
    """The options of the class, which `__new__` would hide (Python 3.10)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        options = inspect.signature(cls.__init__)
        cls.__signature__ = options.replace(parameters=list(options.parameters.values())[1:])

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse options under a name that is none."""
        if options:
            require_options(cls, options)
        return super().__new__(cls)

    def __init__(
        self,
        savefield: str,
        module_exts: Mapping[type[nn.Module], ModuleExtension] | None = None,
        fail_mode: str = FAIL_ERROR,
        subsampling: Sequence[int] | None = None,
    ) -> None:
        if fail_mode not in (FAIL_ERROR, FAIL_WARN, FAIL_SILENT):
            raise ValueError(f"fail_mode must be FAIL_ERROR, FAIL_WARN or FAIL_SILENT, got {fail_mode!r}.")
        if not isinstance(savefield, str):
            raise TypeError(f"savefield must be the name of an attribute of parameters, got {repr(savefield)}.")
        if not savefield:
            raise value_error(
                f"{type(self).__name__} has no field.",
                "its values are saved on parameters under that name.",
                'declare field = "..." in the class.',
            )
        self.savefield = savefield
        self.fail_mode = fail_mode
        self.subsampling = checked_indices(subsampling)
        if self.averages and self.subsampling == ():
            raise ValueError("subsampling=[] names no sample, and there is no mean over none: pass one index at least.")
        self._module_exts = dict(module_exts or {})

    def __setattr__(self, name: str, value: Any) -> None:
        """Options are checked, also where they change later."""
        if name == "subsampling":
            value = checked_indices(value)
        elif name == "mc_samples" and (value is not None or name in vars(self)):  # without a number: exact
            value = positive(name, value)
        super().__setattr__(name, value)

    def get_subsampling(self) -> list[int] | None:
        """The considered samples, or `None` for all."""
        return None if self.subsampling is None else list(self.subsampling)

    def set_module_extension(
        self, module_cls: type[nn.Module], extension: ModuleExtension, overwrite: bool = False
    ) -> None:
        """Use a hand-written module extension for a layer class.

        Raises:
            ValueError: If the class already has one and `overwrite` is false.
        """
        if not isinstance(extension, ModuleExtension):
            raise value_error(
                f"{type(self).__name__} got {extension!r} for {module_cls.__name__}, which is no module extension.",
                "it is called with the layer, and must have a method for each of its parameters.",
                "pass an instance of a subclass of ModuleExtension (first order: FirstOrderModuleExtension).",
            )
        if module_cls in self._module_exts and not overwrite:
            raise value_error(
                f"{type(self).__name__} already has a module extension for {module_cls.__name__}.",
                "the second one would silently replace the first.",
                "pass overwrite=True to replace it.",
            )
        self._module_exts[module_cls] = extension

    def module_extension(self, module: nn.Module) -> ModuleExtension | None:
        """The hand-written module extension for a module, or `None`."""
        return self._module_exts.get(type(module))

    @property
    def has_module_extensions(self) -> bool:
        """Whether any layer class has a hand-written module extension."""
        return bool(self._module_exts)

    def sweep(self) -> Any:
        """The sweep (`bpk.sweeps`) that the extension listens to; `None`: it works through module extensions only."""
        return None

    @property
    def sample_axis(self) -> int | None:
        """Along which axis of the field samples are (`None`: it is no tensor with a row for each of them)."""
        return self.over_batches.axis if type(self.over_batches) is Rows else None

    @property
    def works_by_rules(self) -> bool:
        """Whether the rule of a layer is enough, so that no module extension is needed for it."""
        return self.sweep() is not None

    def get_num_mc_samples(self) -> int | None:
        """The number of Monte-Carlo samples (`None`: nothing is drawn)."""
        return None

    def value(self, uses: Any) -> Any:
        """The value of the field, from what the sweep has brought to the parameter (`bpk.fields.statistics.Uses`)."""
        raise TypeError(f"{type(self).__name__} declares a sweep but no value: write a method value(self, uses)")

    def share(self, uses: Any) -> Tensor:
        """What a parameter adds to the total of the pass (`needs_total`): a tensor, of the same shape for all."""
        raise TypeError(f"{type(self).__name__} needs a total but does not say what of")

    def of_total(self, total: Tensor, n: int) -> Any:
        """What is handed to every `value` as `uses.total`, computed once. `n` is the size of the batch."""
        return total

    def statistic(self, uses: Any) -> Any:
        """What `over_batches` adds up: a tensor, or tensors by name. Default: the value."""
        return self.value(uses)

    def unscaled(self, uses: Any) -> tuple[Any, Parts]:
        """The value for a loss without the factor `uses.loss_scale`, and what adds up of it."""
        rule, scale = self.over_batches, uses.loss_scale
        if isinstance(rule, OverBatches):
            found, size = self.statistic(uses), Size(uses.batch_size, None)
            parts = rule.unscaled(found if isinstance(found, dict) else {"": found}, scale)
            return rule.whole(rule.scaled(parts, size), size), parts
        if self.power is None:
            raise value_error(
                f"{self} does not say how it scales with the loss.",
                "backpack(..., grad_scaler=) gives fields of the loss before a GradScaler has scaled it.",
                "declare power= (2 for squared gradients) or over_batches= in its class.",
            )
        return self.value(uses) / scale**self.power, {}

    def combine(self, before: Any, value: Any) -> Any:
        """The value of all columns, from that of the first ones (which may be overwritten) and that of the others."""
        raise TypeError(
            f"{type(self).__name__} does not combine values: write a method combine(self, before, value), or leave out "
            "`combines`"
        )

    def definition(self, plain: PlainAutograd) -> Tensor:
        """What the field must be, in terms of plain autograd; its shape is said by `form`."""
        raise TypeError(f"{type(self).__name__} has no definition")

    def magnitude(self, plain: PlainAutograd) -> Tensor | None:
        """Of what size the numbers are whose rounding errors the field has (`None`: of its own)."""
        return None

    def __str__(self) -> str:
        """How messages and tables call it."""
        return type(self).__name__

    def __repr__(self) -> str:
        given = vars(self)
        options = inspect.signature(type(self)).parameters.values()
        shown = (f"{o.name}={given[o.name]!r}" for o in options if o.name in given and given[o.name] != o.default)
        return f"{type(self).__name__}({', '.join(shown)})"
