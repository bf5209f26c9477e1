"""What is differentiated: a linear combination of extended losses, and nothing else?

Quantities of second order are those of the extended losses. Another function of a loss (`loss.sqrt()`), or a penalty
beside it (`loss + w.norm()`), has curvature of its own that nobody sends back; a penalty on a parameter also has a
gradient that belongs to no sample. Autograd's graph tells, from the tensors that are differentiated down to the
extended losses: it is read anew in every backward pass, and usually has no node beside that of the loss.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.errors import UnsupportedLayer, explain, runtime_error, warn
from bpk.plan.quantity import FAIL_ERROR, FAIL_WARN, Quantity
from bpk.plan.sources import Sources
from bpk.recording import engine
from bpk.recording.graph.losses import is_awaited, write_losses
from bpk.recording.graph.nodes import Edge, is_linear
from bpk.recording.graph.ownership import owner_of
from bpk.recording.graph.side_effects import beyond
from bpk.recording.record import Record

TOLD: WeakKeyDictionary[nn.Module, set[tuple[str, ...]]] = WeakKeyDictionary()
"""By model: of which of its parameters the user knows that they get no fields, and which (names of both)."""

NO_FIELD = "_bpk_no_field"
"""Under which name a parameter keeps why a pass has left it without fields, by field: for those who ask for one."""


@dataclass
class Outside:
    """What a backward pass reaches without passing an extended loss.

    `calls` are recorded calls, `leaves` tensors that collect a gradient, `curved` names functions of losses that are
    not linear; `losses` are the extended losses, with their nodes. `seen` says whether it is known where the pass has
    started.
    """

    seen: bool = True
    losses: dict[Record, Node] = field(default_factory=dict)

    calls: set[Record] = field(default_factory=set)
    leaves: list[Tensor] = field(default_factory=list)
    curved: set[str] = field(default_factory=set)

    def ends_at(self, node: Node) -> bool:
        """Note a recorded call or a leaf; the way ends there."""
        call, leaf = owner_of(node), node.name() == engine.ACCUMULATE
        if call is not None:
            self.calls.add(call)
        elif leaf:
            self.leaves.append(node.variable)  # type: ignore[attr-defined]
        return leaf or call is not None


def outside_of_losses(roots: Iterable[Edge] | None) -> Outside:
    """Follow autograd's graph from what is differentiated to the recorded calls, and look at what lies in between.

    Losses that a model has computed itself are written down.
    """
    found, losses = Outside(seen=roots is not None), list[Node]()
    starts = [beyond(root)[0] for root in roots or ()]
    consumers: dict[Node, list[Node]] = {root: [] for root in starts if root is not None}
    waiting = list(consumers)
    while waiting:
        node = waiting.pop()
        if is_awaited(node):
            write_losses(node)
        call = owner_of(node)
        if call is not None and call.is_loss:
            losses.append(node)
            found.losses[call] = node
        elif not found.ends_at(node):
            for above, _ in map(beyond, node.next_functions):
                if above is not None and above not in consumers:
                    consumers[above] = []
                    waiting.append(above)
                if above is not None:
                    consumers[above].append(node)
    reading = set(losses)
    while losses:  # back to the roots: all these functions read a loss
        more = [node for node in consumers[losses.pop()] if node not in reading]
        reading.update(more)
        losses.extend(more)

    def reads_loss(edge: Edge) -> bool:  # others are weights, which parameters outside of the models may scale
        return beyond(edge)[0] in reading

    behind = reading.difference(found.losses.values())
    found.curved = {node.name() for node in behind if not is_linear(node, reads_loss)}
    return found


def inside_of_loss(loss: Record, node: Node) -> Outside:
    """What a loss reaches from its `node` by itself, beside the inputs of its call."""
    found, inputs = Outside(), set(map(beyond, loss.edges))
    waiting, seen = [node], {node}
    while waiting:
        for edge in map(beyond, waiting.pop().next_functions):
            above = edge[0]
            if above is not None and edge not in inputs and above not in seen:
                seen.add(above)
                if not found.ends_at(above):
                    waiting.append(above)
    return found


def require_linear(loss: Record, outside: Outside) -> None:
    """Refuse second order where the objective is a nonlinear function of losses."""
    if not outside.seen:
        raise UnsupportedLayer(
            f"What is differentiated behind the loss {loss.where} cannot be seen.",
            "the backward pass was started by none of autograd's functions; there might be other parts of the "
            "objective, whose curvature would be missing.",
            "call loss.backward(), or use first-order extensions.",
        )
    if outside.curved:
        names = ", ".join(sorted(name.removesuffix("0") for name in outside.curved))
        raise UnsupportedLayer(
            f"The objective is a nonlinear function of the loss {loss.where}.",
            f"quantities of second order are those of the loss; the curvature of what follows it ({names}) would "
            "be missing.",
            "write the whole objective as one module and extend that, or use first-order extensions.",
        )


def require_losses_only(above: Iterable[Record], outside: Outside) -> None:
    """Refuse second order where something beside the extended losses reads the output of a call behind them."""
    touched = next((record for record in above if record in outside.calls), None)
    if touched is not None:
        raise UnsupportedLayer(
            f"The gradient at {touched.where} is not that of the extended losses.",
            "something else is part of the objective (a loss that is not extended, a penalty by plain functions), "
            "and its curvature would be missing.",
            "extend every loss (bpk.extend), or write the whole objective as one module and extend that, or use "
            "first-order extensions.",
        )


def require_no_penalty(records: Iterable[Record], sources: Sources, outside: Outside) -> None:
    """Refuse penalties on parameters: their gradient belongs to no sample, and would be missing in every quantity."""
    leaves = {id(leaf) for leaf in outside.leaves if leaf.requires_grad}
    for record in records if leaves else ():
        named = {f"'{record.path}.{name}'": p for name, p in record.params.items()}
        named.update({f"of shape {list(p.shape)}": p for source in sources[record].values() for p in source.trained})
        for name, p in named.items():
            if id(p) in leaves:
                raise UnsupportedLayer(
                    f"The parameter {name} is part of the objective by itself: in a penalty, or an input gradient.",
                    "that share of its gradient passes no extended loss and belongs to no sample: individual "
                    "gradients, and all that follows from them, would not be those of the objective.",
                    "extend every loss, also one that reads an input gradient; of a penalty on parameters, call "
                    "backward() outside of backpack(...): .grad adds up.",
                )


def require_fields(models: Iterable[nn.Module], lost: Container[int], extensions: Iterable[Quantity]) -> None:
    """Refuse, or tell of once, parameters of extended models that get a gradient, but pass no extended loss.

    In later passes, `bpk.fields_of` says why they have no field.

    Args:
        models: The outermost extended modules.
        lost: By `id`: the parameters that get no fields, which the objective has beside extended losses.
        extensions: The active ones.
    """
    for model in models:
        missing = {name: p for name, p in model.named_parameters() if id(p) in lost}
        stops = [e for e in extensions if e.fail_mode == FAIL_ERROR]
        warns = [e for e in extensions if e.fail_mode == FAIL_WARN]
        if not missing or not (stops or warns):
            continue
        one = len(missing) == 1
        who = f"{'Parameter' if one else 'Parameters'} {', '.join(map(repr, missing))}"
        fields = ", ".join(map(str, stops or warns))
        what = f"{who} of {type(model).__name__} {'gets' if one else 'get'} no field of {fields}."
        if stops:
            raise UnsupportedLayer(explain(what, *beside_losses(one)))
        why = dict.fromkeys([e.savefield for e in warns], beside_losses(one=True))
        for param in missing.values():
            vars(param).setdefault(NO_FIELD, {}).update(why)
        case, told = (*missing, *sorted(e.savefield for e in warns)), TOLD.setdefault(model, set())
        if case not in told:
            told.add(case)
            warn(explain(what, *beside_losses(one)))


def beside_losses(one: bool) -> tuple[str, str]:
    """Why parameters (or the `one`) get no fields, and what to do."""
    return (
        f"the objective uses {'it' if one else 'them'} behind or beside the extended losses (a weight of the loss, "
        "a penalty, a loss inside of the model that is a function); that gradient passes none of them, and is not "
        "split into samples.",
        "write the whole objective as one loss module behind the model that is given the parameter as a part of "
        f"the prediction, or do without {'its' if one else 'their'} fields (first order of all others is right; so is "
        "second order if it weighs losses, and only these and the model are extended, not what holds it).",
    )


def require_scaled(scale: float, grad: Tensor) -> None:
    """Refuse a pass that has not begun at a product with the scale. `grad` has arrived at the first recorded call.

    The other factor is gone by now. Right below the product, `grad` is the scale itself; it is not known farther down.
    """
    for root, _ in engine.roots() or () if scale != 1 else ():
        below = any(node is engine.current_node() for node, _ in root.next_functions)
        other = below and grad.numel() == 1 and bool(grad.isfinite()) and float(grad) != scale
        if root.name() != "MulBackward0" or other:
            raise runtime_error(
                f"The backward pass did not begin at a loss times {scale:g}, the scale of grad_scaler.",
                "fields are divided by powers of it, and would be too small.",
                "write grad_scaler.scale(loss).backward(), and grad_scaler.update() after it.",
            )
