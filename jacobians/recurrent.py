"""Recurrent layers: one backward recurrence serves the input, the initial states and every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians import gemm, recurrent_residual, sequence_gemm
from bpk.jacobians.binding import Binding, tensors_in
from bpk.jacobians.call import Call, Options, Wrt
from bpk.jacobians.errors import UnsupportedLayer, explain
from bpk.jacobians.recurrent_cells import Cell
from bpk.jacobians.recurrent_grams import TimeGrams, pays
from bpk.jacobians.recurrent_residual import Bent
from bpk.jacobians.recurrent_scan import Scan
from bpk.jacobians.recurrent_stack import Pulled, Seeds, Stack
from bpk.jacobians.rule import Example, Residual
from bpk.jacobians.several import SeveralOutputs

PACKED = "its input is a packed sequence, whose rows are not samples"
UNBATCHED = "its input has no batch axis"
DROPOUT = "it drops out values between its layers, and what it drew cannot be drawn again"
PAD = "pass a padded tensor, and leave what is padding out of the loss (ignore_index, or a mask)."
ADD_AXIS = "add a batch axis: x.unsqueeze(0) with batch_first=True, x.unsqueeze(1) without."
SPLIT = "use single layers with nn.Dropout in between (extend(model, use_converter=True) does that), or call eval()."

KEEP = 1 << 22
"""How many numbers of backward recurrences are kept for the next one who asks."""

COLUMNS = 1 << 22
"""How many numbers a backward recurrence finds at a time (on a processor): memory of this size is used again."""


class Latest:
    """What was computed from the columns that came last, for those who ask with the same columns again."""

    def __init__(self) -> None:
        self.kept: dict[Any, tuple[Tensor, Pulled]] = {}

    def find(self, mat: Tensor, compute: Callable[[], Pulled]) -> Pulled:
        """`compute()`, evaluated once for these columns (they are held, so that their memory stays theirs)."""
        if mat.requires_grad or torch._C._functorch.maybe_current_level() is not None:
            return compute()
        key = (mat.data_ptr(), mat._version, mat.shape, mat.stride(), torch.is_grad_enabled())
        if key not in self.kept:
            found = compute()
            while self.kept and sum(pulled.size for _, pulled in self.kept.values()) + found.size > KEEP:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = (mat, found)
        return self.kept[key][1]


class RecurrentForward(SeveralOutputs):
    """What a recurrent layer computes, and how its arguments are seen; products are left to a family.

    Inputs are `x` `[N, T, I]` and, where they are given, the initial states `[N, scans, *]`; results are the output
    `[N, T, *]` and the last states `[N, scans, *]`, where there is one scan for each layer and direction.
    """

    axes = 3
    """How many axes an input has."""

    def __init__(
        self,
        *modules: type[nn.Module],
        cell: Callable[[Options], Cell],
        params: Sequence[str] = (),
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, params=params, examples=examples)
        self.cell = cell

    def params_of(self, module: Any) -> Sequence[str]:
        return module._flat_weights_names

    def bind(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        given = (*args, *kwargs.values())
        inputs = tuple(tensors_in(given))
        if any(isinstance(x, nn.utils.rnn.PackedSequence) for x in given):
            return Binding(module, inputs[:1], problem=PACKED + ".", do=PAD)
        if inputs[0].dim() != self.axes:
            return Binding(module, inputs, problem=UNBATCHED + ".", do=ADD_AXIS)
        if self.draws(module):
            return Binding(module, inputs, problem=DROPOUT + ".", do=SPLIT)
        axis, states = 0 if module.batch_first else 1, 2 if module.mode == "LSTM" else 1
        return Binding(module, inputs, (axis, *[1] * (len(inputs) - 1)), (axis, *[1] * states))

    def obstacle(self, call: Call) -> str | None:
        if call.inputs[0].dim() != self.axes:
            return UNBATCHED
        return DROPOUT if self.draws(call.options) else None

    def draws(self, options: Any) -> bool:
        """Whether the layer draws random numbers in its present mode."""
        return bool(options.training and options.dropout > 0 and options.num_layers > 1)

    def layers(self, options: Any) -> list[list[Scan]]:
        """The scans of each layer."""
        ways = (False, True) if options.bidirectional else (False,)
        return [
            [Scan(f"_l{k}{'_reverse' if way else ''}", k * len(ways) + way, way) for way in ways]
            for k in range(options.num_layers)
        ]

    def stack(
        self,
        options: Options,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        known: Callable[[int], Tensor | None] | None = None,
    ) -> Stack:
        """The layer evaluated at a point; `known` gives outputs of layers, and says that no graph is needed."""
        x, h0, c0 = self.seen(inputs)
        assert x is not None
        return Stack(self.cell(options), self.layers(options), params, x, h0, c0, known)

    def seen(
        self, inputs: Sequence[Tensor | None], lead: int = 0
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Inputs (or columns of inputs, with `lead` axes more) as a stack takes them: time first."""
        x, h0, c0 = (*inputs, None, None)[:3]
        return None if x is None else x.movedim(1 + lead, 0), h0, c0

    def returned(self, seeds: Seeds, lead: int = 0) -> list[Tensor | None]:
        """The results (or columns of results) of a stack, by number."""
        return [None if seeds.y is None else seeds.y.movedim(0, 1 + lead), seeds.h, seeds.c]

    def seeds(self, parts: Mapping[int, Tensor]) -> Seeds:
        """The inverse of `returned`, for columns."""
        return Seeds(*self.seen([parts.get(k) for k in range(3)], 1))

    def left(self, pulled: Pulled | Bent, index: int) -> Tensor:
        """Columns of an input, from what was pulled back to it."""
        return pulled.state(index) if index else pulled.input().movedim(0, 2)

    def results(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Sequence[Tensor]:
        found = self.returned(self.stack(options, inputs, params).results())
        return [x.to(inputs[0].dtype) for x in found if x is not None]


class Recurrent(RecurrentForward):
    """Recurrent layers with products by one recurrence over time.

    Every parameter is that of an affine map applied at each step, `a_t = W_ih x_t + b_ih`, `b_t = W_hh h_{t-1} + b_hh`
    and `h_t = W_hr m_t`: its gradients are those of a linear layer with time as an extra axis, and so are its
    Kronecker factors: `A = sum_n sum_t u_t u_t^T / N` with `u` the input of the map, and `G` the block of the GGN of
    a bias added to its output (gradients summed over time before the outer product). "expand" and "reduce" are as
    for linear layers (Eschenhagen et al. 2023, arXiv:2311.00636).
    """

    # ---- evaluated at a call ---------------------------------------------------------------------
    def at(self, call: Call) -> Stack:
        """The layer at the point of a call, evaluated once."""
        if call.inputs[0].dim() != self.axes or self.draws(call.options):
            reason = self.obstacle(call) or ""
            raise UnsupportedLayer(
                explain(
                    f"{self.name}: products are not defined here.",
                    reason + ".",
                    SPLIT if self.draws(call.options) else ADD_AXIS,
                )
            )
        if torch.is_grad_enabled():
            return call.memo((self, "with graph"), lambda: self.stack(call.options, call.inputs, call.params))
        last = len(self.layers(call.options)) - 1

        def known(layer: int) -> Tensor | None:
            return self.sequence(call) if layer == last else None

        return call.memo((self, "stack"), lambda: self.stack(call.options, call.inputs, call.params, known))

    def sequence(self, call: Call) -> Tensor | None:
        """The output `[T, N, *]`, where it is one of the results that are used."""
        if 0 not in call.used:
            return None
        return self.split(call, call.output, 1)[0].movedim(1, 0)

    def pulled(self, call: Call, mat: Tensor) -> Pulled:
        """The backward recurrence for columns `[V, N, *out]`, shared by all who ask with the same columns."""
        stack, latest = self.at(call), call.memo((self, "latest"), Latest)
        return latest.find(mat, lambda: stack.pull(self.seeds(self.split(call, gemm.wide(mat)))))

    def pieces(self, call: Call, mat: Tensor) -> Iterator[tuple[Tensor | None, Pulled]]:
        """Backward recurrences of some columns at a time, and which these are (`None`: all of them).

        A column that starts at some step lives at earlier steps only: those that start together go back together.
        """
        stack = self.at(call)
        step = max(1, COLUMNS // stack.size) if mat.device.type == "cpu" else len(mat)
        if len(mat) <= step or torch.is_grad_enabled() or torch._C._functorch.maybe_current_level() is not None:
            yield None, self.pulled(call, mat)
            return
        order, ends = torch.arange(len(mat), device=mat.device), None
        if stack.forward_only and set(call.used) == {0}:
            y = self.seeds(self.split(call, mat)).y
            if y is not None:
                alive = (y != 0).flatten(2).any(2)
                ends = (alive * torch.arange(1, len(y) + 1, device=mat.device)[:, None]).amax(0).clamp(min=1)
                order = ends.argsort()
        for part in order.split(step):
            seeds = self.seeds(self.split(call, gemm.wide(mat[part])))
            if ends is not None and seeds.y is not None:
                seeds.y = seeds.y[: int(ends[part].max())]
            yield part, stack.pull(seeds)

    def collect(self, call: Call, mat: Tensor, shape: Sequence[int], found: Callable[[Pulled], Tensor]) -> Tensor:
        """Columns `[V, *shape]` of what is `found` for some of them; steps at which they do not live are zero."""
        out: Tensor | None = None
        for part, pulled in self.pieces(call, mat):
            some = found(pulled)
            if part is None:
                return some.to(mat.dtype)
            if out is None:
                whole = some.shape[1:] == torch.Size(shape)
                out = call.empty((len(mat), *shape), mat) if whole else mat.new_zeros(len(mat), *shape)
            if some.shape[1:] == out.shape[1:]:
                out[part] = some.to(mat.dtype)
            else:
                out[part, :, : some.shape[2]] = some.to(mat.dtype)
        assert out is not None
        return out

    def affine(self, call: Call, pulled: Pulled, param: str) -> tuple[Tensor, Tensor | None]:
        """The affine map of a parameter: gradients `[T, V, N, O]` of its output, and its input `[T, N, I]` (weights)."""
        stack = self.at(call)
        layer, place, role = stack.find(param)
        trace, adjoint = stack.traces[layer][place], pulled.adjoints[layer][place]
        columns, values = adjoint.of(trace, role), trace.value(role)
        return columns, None if values is None else values[: len(columns)]

    # ---- products --------------------------------------------------------------------------------
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        found = self.pushed(call, {wrt: gemm.wide(mat)})
        parts = {k: x for k, x in enumerate(found) if x is not None and k in call.used}
        return self.merge(call, parts).to(mat.dtype)

    def pushed(self, call: Call, mats: Mapping[Wrt, Tensor]) -> list[Tensor | None]:
        x, h, c = self.seen([mats.get(k) for k in range(3)], 1)
        params = {name: mat for name, mat in mats.items() if isinstance(name, str)}
        lead = len(next(iter(mats.values())))
        return self.returned(self.at(call).push(x, h, c, params, lead)[0], 1)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, int):
            grams = self.foresee(call, mat)

            def to_input(pulled: Pulled) -> Tensor:
                if grams is not None:
                    grams.add(pulled)
                return self.left(pulled, wrt)

            return self.collect(call, mat, call.inputs[wrt].shape, to_input)
        shape = (*([] if sum_batch else [call.batch_size]), *call.params[wrt].shape)
        return self.collect(call, mat, shape, lambda pulled: self.rows(call, pulled, wrt, sum_batch))

    def rows(self, call: Call, pulled: Pulled, param: str, sum_batch: bool) -> Tensor:
        """The gradients of a parameter: `[V, *p]`, or `[V, N, *p]`."""
        columns, values = self.affine(call, pulled, param)
        if values is None:
            return columns.sum((0, 2) if sum_batch else 0)
        return (
            sequence_gemm.summed(columns, values)
            if sum_batch
            else sequence_gemm.per_sample(columns, values, call.empty)
        )

    def has_cheap_squares(self, call: Call, param: str) -> bool:
        """A bias has few entries."""
        return param.startswith("bias")

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        found = self.squared_sum_of_blocks(call, [mat], param, weights, per_sample)
        return super().squared_sum(call, mat, param, weights, per_sample) if found is None else found

    def squared_sum_of_blocks(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor | None:
        if torch.is_grad_enabled():
            return None
        if pays(self.at(call), sum(map(len, mats))):
            return self.grams(call, mats, weights).squares(param, per_sample).to(mats[0].dtype)
        total: Tensor | None = None
        for scale, pulled in self.all_pieces(call, mats, weights):
            columns, values = self.affine(call, pulled, param)
            if values is None:
                squares = columns.sum(0).square()
                squares = squares if scale is None else squares * scale[..., None]
                part = squares.sum(0) if per_sample else squares.sum((0, 1))
            else:
                part = sequence_gemm.squared_sum(columns, values, scale, per_sample, call.empty)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(mats[0].dtype)

    def all_pieces(
        self, call: Call, mats: Sequence[Tensor], weights: Tensor | None
    ) -> Iterator[tuple[Tensor | None, Pulled]]:
        """Backward recurrences of columns in several blocks, with the weights of these columns."""
        split = [None] * len(mats) if weights is None else weights.split([len(mat) for mat in mats])
        for mat, scale in zip(mats, split, strict=True):
            for part, pulled in self.pieces(call, mat):
                yield scale if part is None or scale is None else scale[part], pulled

    def grams(self, call: Call, mats: Sequence[Tensor], weights: Tensor | None) -> TimeGrams:
        """Gram matrices over time, shared by all parameters that ask with the same columns."""
        known: list[TimeGrams] = call.memo((self, "grams"), list)
        for grams in known:
            if grams.holds(mats, weights):
                return grams
        grams = TimeGrams(self.at(call))
        grams.mats, grams.weights = list(mats), weights
        for scale, pulled in self.all_pieces(call, mats, weights):
            grams.add(pulled, scale)
        known[:] = [*known[-1:], grams]
        return grams

    def foresee(self, call: Call, mat: Tensor) -> TimeGrams | None:
        """Where many columns pass on the way to the input: Gram matrices to which they are added at once.

        Squares of the parameters' columns usually follow, and would need the same backward recurrences again.
        """
        if torch.is_grad_enabled() or not pays(self.at(call), len(mat)):
            return None
        known: list[TimeGrams] = call.memo((self, "grams"), list)
        if not known:
            known.append(TimeGrams(self.at(call)))
        if known[0].weights is not None or any(mat is other for other in known[0].mats):
            return None
        known[0].mats.append(mat)
        return known[0]

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        columns, values = self.affine(call, self.pulled(call, grad_out[None]), param)
        if values is None:
            return columns[:, 0].sum(0).square().sum(1).to(grad_out.dtype)
        return sequence_gemm.norm_squared(columns[:, 0], values).to(grad_out.dtype)

    # ---- the second derivative -------------------------------------------------------------------
    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        grad = self.seeds(self.split(call, gemm.wide(grad_out)[None]))
        given = {wrt: gemm.wide(mat) for wrt, mat in mats.items()}
        x, h, c = self.seen([given.get(k) for k in range(3)], 1)
        params = {name: mat for name, mat in given.items() if isinstance(name, str)}
        lead = len(next(iter(mats.values())))
        bent = recurrent_residual.residual_mat_prod(self.at(call), grad, (x, h, c), params, lead)
        found = {wrt: bent.params[wrt] if isinstance(wrt, str) else self.left(bent, wrt) for wrt in mats}
        return {wrt: product.to(mats[wrt].dtype) for wrt, product in found.items()}

    # ---- Kronecker factors -----------------------------------------------------------------------
    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        stack = self.at(call)
        layer, place, role = stack.find(param)
        values = stack.traces[layer][place].value(role)
        if values is None:
            return None
        t, n = values.shape[:2]
        rows = values.mean(0) if approximation == "reduce" else values.flatten(0, 1)
        return (rows.T @ rows / (n * t if approximation == "expand" else n)).to(call.output.dtype)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        """Rows whose Gram matrix is `G`: gradients summed over time, or one row for each step ("expand")."""
        expand = approximation == "expand" and param.startswith("weight")

        def found(pulled: Pulled) -> Tensor:
            columns, _ = self.affine(call, pulled, param)
            return columns.movedim(0, 2) if expand else columns.sum(0)

        steps = [call.inputs[0].shape[1]] if expand and self.axes == 3 else []
        width = call.params[param].shape[0]
        return self.collect(call, mat, (call.batch_size, *steps, width), found)

    def _pull_flat(self, call: Call, mat: Tensor, wrt: Wrt) -> Tensor:
        """For the recursion of KFRA a weight stands for the bias that would be added to its map."""
        if isinstance(wrt, int):
            return super()._pull_flat(call, mat, wrt)
        return self.kron_rows(call, mat, wrt).sum(1)


class RecurrentStep(Recurrent):
    """A single step of a recurrent layer (`nn.LSTMCell`): `x` `[N, I]`, states `[N, *]`; the new states are returned."""

    axes = 2

    def params_of(self, module: Any) -> Sequence[str]:
        return self.params

    def bind(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        inputs = tuple(tensors_in((*args, *kwargs.values())))
        if inputs[0].dim() != self.axes:
            return Binding(module, inputs, problem=UNBATCHED + ".", do=ADD_AXIS)
        return Binding(module, inputs)

    def draws(self, options: Any) -> bool:
        return False

    def layers(self, options: Any) -> list[list[Scan]]:
        return [[Scan()]]

    def seen(
        self, inputs: Sequence[Tensor | None], lead: int = 0
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, h0, c0 = (*inputs, None, None)[:3]
        states = [None if s is None else s.unsqueeze(1 + lead) for s in (h0, c0)]
        return None if x is None else x[None], states[0], states[1]

    def sequence(self, call: Call) -> Tensor | None:
        return None

    def returned(self, seeds: Seeds, lead: int = 0) -> list[Tensor | None]:
        return [None if s is None else s.squeeze(1 + lead) for s in (seeds.h, seeds.c)]

    def seeds(self, parts: Mapping[int, Tensor]) -> Seeds:
        h, c = (None if part is None else part.unsqueeze(2) for part in (parts.get(0), parts.get(1)))
        return Seeds(None, h, c)

    def left(self, pulled: Pulled | Bent, index: int) -> Tensor:
        return pulled.state(index).squeeze(2) if index else pulled.input()[0]
