"""Graph nodes own the records of calls: how a node gets one, gives it to backward passes that arrive, and loses it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.activations import forget
from bpk.recording.context.state import CTX, EVERY_CALL
from bpk.recording.record import Record

OWNER = "bpk.record"
"""Key under which a graph node owns the record of the layer call that produced it."""

LEFT = "bpk.left"
"""Key under which a graph node says that its call was left to autograd, and whether the call had a rule."""

DISSOLVED = nn.Identity()
"""The module of a record that was dissolved."""


def give(node: Node, record: Record) -> None:
    """Let a node own the record of the call whose output is there, and hand it to backward passes that arrive."""
    engine.belongings(node)[OWNER] = record
    node.register_prehook(partial(visit, record))


def owner_of(node: Node) -> Record | None:
    """The recorded call that a graph node belongs to."""
    record: Record | None = engine.belongings(node).get(OWNER)
    return record


def leave_to_autograd(record: Record, node: Node) -> None:
    """Forget a call: it becomes part of the plain autograd between two recorded calls."""
    record.close()
    if record.rule is not None and record.params:
        for inner in between(node, {edge[0] for edge in record.edges}.__contains__):
            engine.belongings(inner)[LEFT] = True
    del engine.belongings(node)[OWNER]
    engine.belongings(node)[LEFT] = record.rule is not None
    if record.stored is not None:
        node.register_prehook(TakingAway(record.module, record.stored))
    record.module = DISSOLVED


def visit(record: Record, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """The hook on a layer's output node: hands the layer's gradient to the active context."""
    if CTX.passing is record or CTX.passing is EVERY_CALL or record.module is DISSOLVED:
        return None
    if CTX.quiet:  # a product with a stretch of the graph that ends here: go no further
        return (None,) * len(grads)
    for nr in record.places if CTX.stack else ():
        if grads[nr] is not None:
            opened = CTX.stack[-1]
            under_way = opened.backwards.get(engine.current_task()) or opened.start_at(CTX.called, record, grads)
            if under_way is None:
                break
            return under_way.visit(record, grads)
    pass_by(record)
    return None


def pass_by(record: Record) -> None:
    """A backward pass has reached a recorded call, and there is no context to work on it."""
    if record.contexts is not CTX.entered:
        for opened in record.contexts[-1:]:  # the thread that wrote the call down waits for it in a context
            opened.elsewhere = True
    if not engine.keeps_graph():
        record.release()


@dataclass(eq=False, slots=True)
class TakingAway:
    """The hook on the output of a call that is not recorded: a backward pass takes away what was left on the module.

    An extension hook that may read it comes first. It does not look at gradients.
    """

    module: nn.Module
    output: Tensor

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if CTX.quiet or CTX.get_retain_graph() or engine.keeps_graph():
            return
        if CTX.get_extension_hook() is not None:
            engine.when_finished(partial(forget, self.module, self.output))
        else:
            forget(self.module, self.output)
