"""Products with curvature blocks: a tape of the calls between a parameter and the loss, played both ways.

For one parameter `p` and tangents `v`, the product with the Hessian's block is the directional derivative of the
gradient (Pearlmutter, 1994): tangents run forward from `p` to the loss (`t_out = J t_in + J_p v`), meet the loss
Hessian, and adjoints run back (`a_in = J^T a_out + R t_in`), where `R` is each call's residual. Leaving out `R`
gives the GGN, making `R` positive semi-definite the positive-curvature Hessian.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bpk.extensions.curvature import Curvature
from bpk.fields.statistics import Uses
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.rule import Residual, Rule
from bpk.jacobians.losses.loss import Loss
from bpk.plan.graph import Source
from bpk.recording.ports import Port
from bpk.recording.record import Record
from bpk.recording.state import CTX
from bpk.sweeps.stretch import Modify, Stretch, positive, through_columns
from bpk.sweeps.sweeps import Direct, Step, Sweep, matched


@dataclass
class Frame:
    """What the tape keeps of one visited call: its neighbours by identity, not its graph."""

    number: int
    rule: Rule
    call: Call
    grad: Tensor
    feeds: dict[int, Feed]
    path: str
    samples: tuple[int, ...] | None
    names: dict[str, int]
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = [(x, x._version) for x in (*self.call.inputs, *self.call.params.values())]

    def verify(self) -> None:
        """Refuse if a tensor of the forward pass, or a parameter, was changed since."""
        if any(x._version != version for x, version in self.versions):
            raise RuntimeError(
                explain(
                    f"Tensors of '{self.path}' were changed since the backward pass.",
                    "the product belongs to the point at which the gradient was taken; mixing two points is wrong.",
                    "call the product before optimizer.step(), or run forward and backward again.",
                )
            )


@dataclass
class Feed:
    """What feeds one input of a call: producers (calls, then parameters) by number, and plain autograd in between."""

    producers: tuple[int, ...]
    stretch: Stretch | None
    entrance: Port
    exit: Port

    def push(self, tangents: dict[int, Tensor]) -> Tensor | None:
        """The tangent at the input, from the tangents at the producers' outputs."""
        found = [tangents.get(number) for number in self.producers]
        if all(t is None for t in found):
            return None
        if self.stretch is not None:
            return self.stretch.push(found)
        assert found[0] is not None
        return self.entrance.to_rule(self.exit.to_graph(found[0]))

    def pull(self, adjoint: Tensor) -> list[tuple[int, Tensor]]:
        """The adjoint at the input, sent to the producers."""
        if self.stretch is None:
            return [(self.producers[0], self.exit.to_rule(self.entrance.to_graph(adjoint)))]
        return self.sent(self.stretch.pull(adjoint))

    def curve(self, tangents: dict[int, Tensor], modify: Modify | None) -> list[tuple[int, Tensor]]:
        """The stretch's own residual times the tangents, sent to the producers."""
        if self.stretch is None:
            return []
        return self.sent(self.stretch.curve([tangents.get(number) for number in self.producers], modify))

    def sent(self, parts: list[Tensor | None]) -> list[tuple[int, Tensor]]:
        """What goes to whom."""
        return [(number, part) for number, part in zip(self.producers, parts, strict=True) if part is not None]


class Tape(Sweep):
    """Write down every visited call, latest first, for products later on.

    `factored` says whether residuals will be made positive semi-definite.
    """

    def __init__(self, samples: tuple[int, ...] | None = None, factored: bool = False) -> None:
        super().__init__(samples)
        self.factored = factored
        self.needs_root = factored  # clipping leaves the loss Hessian alone
        self.frames: list[Frame] = []
        self.numbers: dict[int, int] = {}
        self.live: list[tuple[Feed, Source]] = []

    @property
    def key(self) -> Hashable:
        return ("tape", self.samples, self.factored)

    def start(self, step: Step, loss: Loss) -> None:
        self.write(step, step.full)

    def visit(self, step: Step) -> tuple[Tape, int]:
        if id(step.record) not in self.numbers:
            self.arrived(step)  # nothing can have arrived: say so
        self.write(step, step.call)
        return self, len(self.frames)

    def write(self, step: Step, call: Call) -> None:
        """Add a frame, and give numbers to the calls that feed it."""
        feeds = {}
        for index, source in step.sources.items():
            calls = tuple(self.number(id(record)) for record, _ in source.targets)
            params = tuple(number_of(p) for p in source.trained)
            direct = Port() if source.stretch is not None else source.exits[0]
            feeds[index] = Feed(calls + params, self.linearise(step, index, source), source.entrance, direct)
            self.live.append((feeds[index], source))
        kept = call if torch.is_grad_enabled() else call.detached()  # a live graph would lead back to the parameter
        grad = step.grad if isinstance(step.rule, Loss) else self.rows(step.grad)
        number = self.number(id(step.record))
        names = {name: id(p) for name, p in step.record.params.items()}
        self.frames.append(Frame(number, step.rule, kept, grad, feeds, step.record.path, self.samples, names))
        for source in step.sources.values():
            for param in source.trained:
                self.direct[param] = Direct((self, len(self.frames)), step.batch_size)

    def relay(self, record: Record, before: Sequence[int]) -> None:
        for feed, source in self.live:
            if feed.stretch is not None:
                feed.stretch.ports[: len(source.targets)] = source.exits
            elif source.exits:
                feed.exit = source.exits[0]

    def number(self, identity: int) -> int:
        """A number for a call (its `id` may be used again once it is gone)."""
        return self.numbers.setdefault(identity, len(self.numbers))

    def linearise(self, step: Step, index: int, source: Source) -> Stretch | None:
        """Prepare the stretch of plain autograd behind an input, while its graph is alive."""
        if source.stretch is None:
            return None
        at_input = step.full.inputs[index]
        scale = step.grad[None] if not isinstance(step.rule, Loss) else step.grad.reshape(1)
        share = step.rule.jac_t_mat_prod(step.full, scale, index)[0]
        merged = self.attribution.is_one_sample(source.consumer)
        stretch = Stretch(source, at_input, share, self.samples, self.factored, merged)
        if self.factored and stretch.columns is not None and step.samples_of_rows is not None and not merged:
            raise UnsupportedLayer(
                explain(
                    f"PCHMP cannot pass the nonlinear function before '{step.record.path}'.",
                    "the batch axis is merged with another one, and its second derivative is known row by row only.",
                    "make the nonlinear part a module (nn.Tanh() in place of torch.tanh), or use HMP or GGNMP.",
                )
            )
        return stretch


def number_of(param: Tensor) -> int:
    """A parameter among the producers of a stretch: a negative number, that of no call."""
    return ~id(param)


class BlockProduct:
    """Multiply with the diagonal block of one parameter: one vector `[*p]`, or several, `[V, *p]`."""

    def __init__(self, uses: Uses, curvature: Curvature, modify: Modify | None = None) -> None:
        tape, _ = uses.uses[-1].arrived
        self.frames: list[Frame] = tape.frames[: max(use.arrived[1] for use in uses.uses)]
        self.param = uses.param
        self.curvature = curvature
        self.modify = modify
        self.differentiable = torch.is_grad_enabled()
        for stretch in [feed.stretch for frame in self.frames for feed in frame.feeds.values()]:
            if curvature is not Curvature.GGN and stretch is not None and stretch.refusal is not None:
                raise stretch.refusal

    def __repr__(self) -> str:
        return f"BlockProduct({self.curvature.value}, {tuple(self.param.shape)})"

    def __call__(self, mat: Tensor) -> Tensor:
        """Multiply `mat`, or every `mat[v]`, with the block: the number of axes says which."""
        several = mat.dim() == self.param.dim() + 1
        if mat.shape[several:] != self.param.shape:
            shape = ", ".join(map(str, self.param.shape))
            raise ValueError(
                explain(
                    f"The product expects shape [{shape}] or [V, {shape}], got {list(mat.shape)}.",
                    "it multiplies one vector of the parameter's shape, or V of them at once.",
                    "reshape it, such as v.reshape(p.shape) or v.reshape(-1, *p.shape).",
                )
            )
        if mat.dtype != self.param.dtype:
            raise ValueError(
                explain(
                    f"The product expects {self.param.dtype}, the parameter's, got {mat.dtype}.",
                    "mixed precision would be lost in one of the two.",
                    "convert the vectors: p.hmp(v.to(p.dtype)).",
                )
            )
        for frame in self.frames:
            frame.verify()
        with CTX.quietly(), torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            return self.multiply(mat) if several else self.multiply(mat[None])[0]

    def multiply(self, mat: Tensor) -> Tensor:
        """Tangents forward, adjoints backward."""
        outs: dict[int, Tensor] = {number_of(self.param): mat}
        ins: dict[int, dict[int, Tensor]] = {}
        for frame in reversed(self.frames):
            inner = {i: t for i, feed in frame.feeds.items() if (t := feed.push(outs)) is not None}
            own = self.names(frame)
            if not inner and not own:
                continue
            inner = {i: matched(t, frame.call) for i, t in inner.items()}
            ins[frame.number] = inner
            if isinstance(frame.rule, Loss):
                continue
            parts = [frame.rule.jac_mat_prod(frame.call, t, i) for i, t in inner.items()]
            parts += [frame.rule.jac_mat_prod(frame.call, mat, name) for name in own]
            outs[frame.number] = sum(parts[1:], parts[0])
        return self.gather(mat, outs, ins)

    def gather(self, mat: Tensor, outs: dict[int, Tensor], ins: dict[int, dict[int, Tensor]]) -> Tensor:
        """Adjoints backward, from the loss to the parameter."""
        result = torch.zeros_like(mat)
        adjoints: dict[int, Tensor] = {}
        curved = self.curvature is not Curvature.GGN
        for frame in self.frames:
            if frame.number not in ins:
                continue
            inner, sends = ins[frame.number], dict[int, Tensor]()
            if isinstance(frame.rule, Loss):
                sends = loss_hessian(frame, inner)
            elif frame.number in adjoints:
                adjoint = matched(adjoints.pop(frame.number), frame.call)
                sends = {i: frame.rule.jac_t_mat_prod(frame.call, adjoint, i) for i in inner}
                for name in self.names(frame):
                    result = result + frame.rule.jac_t_mat_prod(frame.call, adjoint, name, sum_batch=True)
            if curved and not isinstance(frame.rule, Loss):
                tangents: dict[Wrt, Tensor] = dict(inner.items())
                tangents.update(dict.fromkeys(self.names(frame), mat))
                for wrt, bent in self.residual(frame, tangents).items():
                    if isinstance(wrt, int):
                        sends[wrt] = sends[wrt] + bent if wrt in sends else bent
                    else:
                        result = result + bent
            parts = [sent for i, adjoint in sends.items() for sent in frame.feeds[i].pull(adjoint)]
            if curved:
                parts += [sent for i in sends for sent in frame.feeds[i].curve(outs, self.modify)]
            for number, part in parts:
                if number in outs:
                    adjoints[number] = adjoints[number] + part if number in adjoints else part
        own = adjoints.get(number_of(self.param))
        return result if own is None else result + own

    def names(self, frame: Frame) -> list[str]:
        """Under which names a call uses this parameter."""
        return [name for name, identity in frame.names.items() if identity == id(self.param)]

    def residual(self, frame: Frame, tangents: dict[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """The residual of one call times the tangents, made positive where that is asked for."""
        kind = frame.rule.residual(frame.call, tuple(tangents))
        if kind is Residual.ZERO:
            return {}
        if self.modify is None:
            return frame.rule.residual_mat_prod(frame.call, frame.grad, tangents)
        if kind is Residual.DIAGONAL and tuple(tangents) == (0,):
            diag = frame.rule.residual_diag(frame.call, frame.grad)
            return {0: positive(diag, self.modify) * tangents[0]}
        columns, signs = frame.rule.residual_columns(frame.call, frame.grad, tuple(tangents))
        return through_columns(columns, positive(signs, self.modify), tangents)


def loss_hessian(frame: Frame, tangents: dict[int, Tensor]) -> dict[int, Tensor]:
    """The loss Hessian (with its scalar factor) times tangents, by input; also where only some samples count."""
    assert isinstance(frame.rule, Loss)
    joint = frame.rule.joint(frame.call, tuple(frame.feeds))
    tangent = joint.merge(tangents)
    if frame.samples is None:
        return joint.split(joint.rule.hessian_mat_prod(joint.call, tangent) * frame.grad)
    index = torch.as_tensor(frame.samples, device=tangent.device)
    full = tangent.new_zeros(tangent.shape[0], *joint.call.inputs[0].shape).index_copy(1, index, tangent)
    return joint.split((joint.rule.hessian_mat_prod(joint.call, full) * frame.grad).index_select(1, index))
