"""One call of a layer: everything a rule is allowed to see."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import wraps
from math import prod
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binder
from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.core.numeric import no_number
from bpk.jacobians.core.random_state import RandomState

Wrt = int | str
"""What to differentiate with respect to: the index of an input or the name of a parameter."""

Options = Any
"""Where hyperparameters are read from: the module itself, or an object with the same attributes."""


R = TypeVar("R")
T = TypeVar("T")

DRAWN = ("slope", "mask")
"""Keys of the memo under which random layers keep what they drew, `[N, ...]`: it cannot be recomputed for a part."""


def of_samples(drawn: Any, index: Tensor) -> Any:
    """What was drawn for some samples; several tensors may be in a tuple."""
    return tuple(part[index] for part in drawn) if isinstance(drawn, tuple) else drawn[index]


class Call:
    """One evaluation `output = layer(*inputs; params)` on a batch of `N` samples.

    Axis 0 of every input and of the output is the batch axis. Of a layer with several results, `used` names those that
    matter; if these are several, `output` holds them flattened, side by side. `options` carries the hyperparameters as
    attributes (for a module: the module). `pull`, where present, multiplies `[N, *out] -> [N, *in]` with the transposed
    Jacobian through autograd's own graph; only rules of layers that draw random numbers need it. `saved`, where
    present, looks up what autograd kept of the forward pass under a name, so that a rule need not compute it again.
    Both exist during the backward pass only, for `Rule.capture`. `whole` is the call on the whole batch, where this is
    a part of it; only rules of layers that mix samples need it. `spares` is memory that `empty` and `room` may hand
    out, flat tensors that nobody else refers to. `drawn`, where the rule asks for it, is the state of the random
    generators before the call. `sums`, where somebody wants them, takes by parameter the sum over samples of individual
    gradients that are made anyway.
    """

    saved: Callable[[str], Tensor | None] | None = None
    spares: list[Tensor] | None = None
    drawn: RandomState | None = None
    sums: dict[str, Tensor] | None = None
    whole: Call | None = None

    def __init__(
        self,
        options: Options,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        output: Tensor,
        pull: Callable[[Tensor], Tensor] | None = None,
        used: Mapping[int, torch.Size] | None = None,
    ) -> None:
        self.options = options
        self.inputs = tuple(inputs)
        self.params = dict(params)
        self.output = output
        self.pull = pull
        self.used = {0: output.shape[1:]} if used is None else dict(used)
        self._memo: dict[Hashable, Any] = {}
        self._of_columns: dict[str, tuple[ref[Tensor], object, tuple[int, int], Tensor]] = {}

    @property
    def batch_size(self) -> int:
        """`N`, the number of samples."""
        return self.inputs[0].shape[0]

    def summing(self, param: str) -> Callable[[Tensor], None] | None:
        """What adds parts to the sum in `sums`, if somebody wants it and nobody has it. The first is written into."""
        sums = self.sums
        if sums is None or param in sums:
            return None

        def add(part: Tensor) -> None:
            sums[param] = sums[param].add_(part) if param in sums else part

        return add

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for a result, of the dtype and on the device of `like`: the spare memory, where it fits."""
        room = self.room(shape, like)
        return torch.empty(shape, dtype=like.dtype, device=like.device) if room is None else room

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """Spare memory, where a result fits in that has the dtype and the device of `like`; it is handed out once.

        In the input products of layers without parameters, it may be that of the columns: an elementwise rule
        may overwrite them, others must have read all of them. (New memory costs up to ten times more than used one.)
        """
        for k, spare in enumerate(spares := self.spares or []):
            if spare.numel() == prod(shape) and (spare.dtype, spare.device) == (like.dtype, like.device):
                return spares.pop(k).resize_(torch.Size(shape))  # no view, which would keep another tensor alive
        return None

    def memo(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, evaluated once per call and shared by all who ask for `key`."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def of_columns(self, mat: Tensor, which: object, compute: Callable[[Tensor, Any], Tensor]) -> tuple[Tensor, bool]:
        """`compute(mat, which)`, and whether it was known: what several parameters make of the same columns, one after
        the other, is computed once. Where it must be differentiable, nothing is kept.
        """
        if torch.is_grad_enabled() or is_transformed():
            return compute(mat, which), False
        kept = self._of_columns.get(compute.__qualname__)
        if kept is not None:
            of, known, versions, found = kept
            if of() is mat and known is which and versions == (mat._version, found._version):
                return found, True
        found = compute(mat, which)
        self._of_columns[compute.__qualname__] = ref(mat), which, (mat._version, found._version), found
        return found, False

    def without_output(self) -> Call:
        """The same call for rules that do not read the output: it has a shape, takes no memory, and holds NaN."""
        call = copy(self)
        call.output = no_number(self.output.dtype, self.output.device).expand(self.output.shape)
        return call

    def detached(self) -> Call:
        """The same call without its graph; it shares memory, versions, and what was computed already."""
        call = self._mapped(Tensor.detach)
        call._memo = self._memo
        return call

    def seen_with(self, options: Options) -> Call:
        """The same call with other hyperparameters: of what was computed already, what was drawn is left."""
        call = self._mapped(lambda x: x)
        call.options, call.drawn, call.whole = options, self.drawn, self.whole
        call._memo = {key: value for key, value in self._memo.items() if key in DRAWN}
        return call

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same call with other tensors."""
        params = {name: change(p) for name, p in self.params.items()}
        return Call(self.options, [change(x) for x in self.inputs], params, change(self.output), used=self.used)

    def shape_of(self, wrt: Wrt) -> torch.Size:
        """The shape of an input (`[N, *in]`) or of a parameter (`[*p]`)."""
        return self.inputs[wrt].shape if isinstance(wrt, int) else self.params[wrt].shape

    def sample_shape(self, wrt: Wrt) -> torch.Size:
        """The shape of one sample of an input (`[*in]`), or of a parameter (`[*p]`)."""
        return self.inputs[wrt].shape[1:] if isinstance(wrt, int) else self.params[wrt].shape

    def by_position(self, axes: int) -> Call:
        """The same call with every position as a sample: so many axes behind the batch axis join it."""
        inputs = [x.flatten(0, axes) for x in self.inputs]
        return Call(self.options, inputs, self.params, self.output.flatten(0, axes))

    def subset(self, samples: Sequence[int]) -> Call:
        """The same call restricted to some samples of the batch."""
        index = index_of(samples, self.output.device)
        kept = Call(
            self.options,
            [x[index] for x in self.inputs],
            self.params,
            self.output[index] if self.output.dim() else self.output,
            used=self.used,
        )
        kept.whole = self if self.whole is None else self.whole
        kept._memo = {key: of_samples(value, index) for key, value in self._memo.items() if key in DRAWN}
        return kept

    def cast(self, dtype: torch.dtype) -> Call:
        """The same call with floating-point tensors converted to `dtype` (autocast, bfloat16)."""

        def to(x: Tensor) -> Tensor:
            return x.to(dtype) if x.is_floating_point() else x

        cast = self._mapped(to)
        cast._memo = {key: value for key, value in self._memo.items() if key in DRAWN}
        cast._memo |= {key: to(value) for key, value in cast._memo.items() if isinstance(value, Tensor)}
        cast.drawn = self.drawn
        return cast

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *inputs: Tensor,
        params: Sequence[str] = (),
        rule: Binder | None = None,
        used: Any = None,
    ) -> Call:
        """Evaluate `module` and return the call, ready to hand to its rule.

        `rule` is asked how the layer's arguments are to be seen; `used` names the results that matter.

        >>> call = Call.of(nn.Linear(2, 3), torch.ones(4, 2), params=("weight", "bias"))
        >>> call.output.shape, call.batch_size
        (torch.Size([4, 3]), 4)
        """
        with torch.enable_grad():
            live = [x.detach().requires_grad_() if x.is_floating_point() else x.detach() for x in inputs]
            given = [x * 1 if x.requires_grad else x for x in live]  # survives in-place layers
            out = module(*given)
        results = tensors_in(out)

        def pull(vector: Tensor) -> Tensor:
            return torch.autograd.grad(results[0], live[0], vector, retain_graph=True)[0]

        every = dict(module.named_parameters(remove_duplicate=False))
        own = {n: p for n in params if (p := every.get(n)) is not None}
        if rule is None:
            return cls(module, [x.detach() for x in live], own, results[0].detach(), pull)
        binding = rule.bind(module, tuple(live), {})
        seen = binding.seen([x.detach() for x in binding.inputs])
        output, shapes = rule.join(binding, [x.detach() for x in results], used or (0,))
        return cls(binding.options, seen, own, output, pull, shapes)


def once(compute: Callable[[R, Call], T]) -> Callable[[R, Call], T]:
    """A method of a rule, or a function of a rule and a call, that is evaluated once per call.

    What was computed without a graph must not serve who differentiates through it: with a graph, once more.
    """

    @wraps(compute)
    def kept(rule: R, call: Call) -> T:
        return call.memo((compute, rule, torch.is_grad_enabled(), is_transformed()), lambda: compute(rule, call))

    return kept


def index_of(samples: Sequence[int], device: torch.device) -> Tensor:
    """Samples of a batch, maybe none, as an index."""
    return torch.as_tensor(samples, dtype=torch.long, device="cpu").to(device, non_blocking=True)
