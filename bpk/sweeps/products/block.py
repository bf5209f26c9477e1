"""Products with curvature blocks: the tape of the calls between a parameter and the loss, played both ways.

For one parameter `p` and tangents `v`, the product with the Hessian's block is the directional derivative of the
gradient (Pearlmutter, 1994): tangents run forward from `p` to the loss (`t_out = J t_in + J_p v`), meet the loss
Hessian, and adjoints run back (`a_in = J^T a_out + R t_in`), where `R` is each call's residual. Leaving out `R`
gives the GGN, making `R` positive semi-definite the positive-curvature Hessian.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bpk.fields.statistics import Uses
from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.errors import runtime_error, type_error, value_error
from bpk.jacobians.core.numeric import is_differentiated
from bpk.jacobians.losses.loss import Loss
from bpk.plan.parts import as_parameter, in_parts
from bpk.plan.samples.rows import along_rows, of_samples, over_batch
from bpk.plan.step import promoted
from bpk.recording.context.state import CTX
from bpk.sweeps.curvature import Curvature
from bpk.sweeps.products.tape import Feed, Frame, Tape


class Passing(NamedTuple):
    """A call that tangents at a parameter reach: by these inputs, and by these of its own parameters."""

    frame: Frame
    feeds: dict[Wrt, Feed]
    own: list[str]
    is_loss: bool


class BlockProduct:
    """Multiply with the diagonal block of one parameter: one vector `[*p]`, or several, `[V, *p]`.

    It is that of the loss before it was multiplied with a scale.
    """

    def __init__(self, uses: Uses, curvature: Curvature) -> None:
        self.tape: Tape = uses.uses[-1].arrived[0]  # which lives as long as one of its products
        self.tape.products.add(self)
        self.frames: list[Frame] = self.tape.frames[: max(use.arrived[1] for use in uses.uses)]
        self.param = uses.parameter
        self.curvature = curvature
        self.scale = uses.loss_scale
        self.differentiable = torch.is_grad_enabled()
        for frame in self.frames if curvature is not Curvature.GGN else ():
            if frame.stretch is not None and frame.stretch.refusal is not None:
                raise frame.stretch.refusal

    def __repr__(self) -> str:
        return f"BlockProduct({self.curvature.value}, {tuple(self.param.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockProduct:
        return self  # as functions do: nothing changes it

    def __reduce__(self) -> tuple[type[Lost], tuple[str]]:
        return Lost, (repr(self),)

    def __call__(self, mat: Tensor) -> Tensor:
        """Multiply `mat`, or every `mat[v]`, with the block: the number of axes says which."""
        if not isinstance(mat, Tensor):
            raise type_error(
                f"The product got {type(mat).__name__}, which is no tensor.",
                "it multiplies vectors of the parameter's shape, dtype and device.",
                "convert it: torch.as_tensor(v, dtype=p.dtype, device=p.device).",
            )
        several = mat.dim() == self.param.dim() + 1
        if mat.shape[several:] != self.param.shape:
            shape = ", ".join(map(str, self.param.shape))
            raise value_error(
                f"The product expects shape [{shape}] or [V, {shape}], got {list(mat.shape)}.",
                "it multiplies one vector of the parameter's shape, or V of them at once.",
                "reshape it, such as v.reshape(p.shape) or v.reshape(-1, *p.shape).",
            )
        if mat.dtype != self.param.dtype:
            raise value_error(
                f"The product expects {self.param.dtype}, the parameter's, got {mat.dtype}.",
                "mixed precision would be lost in one of the two.",
                "convert the vectors: p.hmp(v.to(p.dtype)).",
            )
        for frame in self.frames:
            frame.verify()
        if not mat.numel():  # no vectors: rules expect one at least
            return torch.zeros_like(mat)
        with CTX.quietly(), torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled()):
            product = self.multiply(in_parts(mat if several else mat[None]))
            found = as_parameter(product, mat)
            found = found if several else found[0]
            return found if self.scale == 1 else found / self.scale

    @cached_property
    def path(self) -> list[Passing]:
        """The calls that tangents at the parameter reach, latest first."""
        reached: set[int] = set()
        path: list[Passing] = []
        for frame in reversed(self.frames):
            fed: dict[Wrt, Feed] = {i: feed for i, feed in frame.feeds.items() if feed.producer in reached}
            own = [name for name, identity in frame.params.items() if identity == id(self.param)]
            if fed or own:
                path.append(Passing(frame, fed, own, frame.rule.is_loss))
                if not path[-1].is_loss:
                    reached.add(frame.number)
        return path[::-1]

    def multiply(self, mat: Tensor) -> Tensor:
        """Tangents forward, adjoints backward."""
        outs: dict[int, Tensor] = {}
        tangents: list[dict[Wrt, Tensor]] = []
        for passing in reversed(self.path):
            frame = passing.frame
            found: dict[Wrt, Tensor] = {
                i: promoted(feed.forth(outs[feed.producer]), frame.call) for i, feed in passing.feeds.items()
            }
            for name in passing.own:
                found[name] = mat
            tangents.append(found)
            if not passing.is_loss:
                outs[frame.number] = frame.push(found)
        return self.gather(mat, tangents)

    def gather(self, mat: Tensor, tangents: list[dict[Wrt, Tensor]]) -> Tensor:
        """Adjoints backward, from the loss to the parameter; `tangents` of the path's calls, the earliest first."""
        result: Tensor | None = None
        adjoints: dict[int, Tensor] = {}
        for passing in self.path:
            frame, inner = passing.frame, tangents.pop()
            sent: list[tuple[Wrt, Tensor]] = []
            if passing.is_loss:
                sent += loss_hessian(frame, inner).items()
            elif frame.number in adjoints:
                sent += frame.pull(adjoints.pop(frame.number), inner).items()
            if self.curvature is not Curvature.GGN and not passing.is_loss:
                sent += frame.curve(inner, self.curvature).items()
            for wrt, part in sent:
                if wrt in passing.own:
                    result = owned(part, mat) if result is None else result + part
                elif wrt in passing.feeds:
                    feed = passing.feeds[wrt]
                    arrived = feed.back(part)
                    known = adjoints.get(feed.producer)
                    adjoints[feed.producer] = arrived if known is None else known + arrived
        return torch.zeros_like(mat) if result is None else result


class Lost:
    """What files have in the place of a product: that lives on activations, and on autograd's graph."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{self.name}, lost on the way through a file"

    def __call__(self, mat: Tensor) -> Tensor:
        """Say what is missing."""
        raise runtime_error(
            f"{self.name} came out of a file or another process, without what it multiplies with.",
            "a product keeps the activations of its forward pass, which files of a model do not carry.",
            "run the passes here, or save what the product returns.",
        )


def owned(part: Tensor, mat: Tensor) -> Tensor:
    """A product with vectors `mat`, in memory that nobody else looks at: as it is, where it fills memory of its own."""
    if not is_differentiated() and part.dtype is mat.dtype and part.is_contiguous():
        memory = part.untyped_storage()
        if memory.nbytes() == part.nbytes and memory.data_ptr() != mat.untyped_storage().data_ptr():
            return part
    return torch.zeros_like(mat) + part


def loss_hessian(frame: Frame, tangents: dict[Wrt, Tensor]) -> dict[Wrt, Tensor]:
    """The loss Hessian (with its scalar factor) times tangents, by input; also where only some samples count."""
    assert isinstance(frame.rule, Loss)
    joint, samples = frame.rule.joint(frame.call, tuple(frame.feeds)), frame.samples
    tangent = joint.merge({wrt: mat for wrt, mat in tangents.items() if isinstance(wrt, int)})
    full = tangent if samples is None else over_batch(tangent, samples, len(joint.call.inputs[0]))
    product = joint.rule.hessian_mat_prod(joint.call, full) * frame.grad
    if samples is not None:
        product = of_samples(product, samples)
    elif frame.terms is not None:
        product = product * along_rows(frame.terms, product, 1)
    return dict(joint.split(product).items())
