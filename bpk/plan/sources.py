"""Who feeds whom: autograd's graph is followed from the inputs of recorded calls up to other recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from bpk.plan.graph import Source
from bpk.plan.passes_inside import require_no_pass_inside
from bpk.recording import engine
from bpk.recording.context.surroundings import reentrant
from bpk.recording.data import GIVEN, NOTHING_GIVEN, Given
from bpk.recording.graph.nodes import Edge, leaf_of
from bpk.recording.graph.ownership import owner_of
from bpk.recording.graph.recovery import recover
from bpk.recording.graph.side_effects import beyond, make_quiet
from bpk.recording.membership import ExtendedParameters
from bpk.recording.record import Record

REENTRANT = f"{CheckpointFunction.__name__}Backward"
"""What a node is called behind which a checkpoint starts a backward pass of its own."""


class Sources(dict[Record, dict[int, Source]]):
    """By call, and by input index: where inputs come from. The graph is looked at when a call is asked for first.

    `looks` says how often it was; `with_parameters` are those where functions use parameters, and the calls that read
    what they return. `again` tells whether calls inside of checkpoints are written down of which only autograd knows.
    """

    def __init__(self, again: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.again = again
        self.extended = ExtendedParameters()
        self.descent: dict[Record, list[Record]] = {}
        self.with_parameters: list[tuple[Record, Source]] = []
        self.looks = 0

    def __missing__(self, record: Record) -> dict[int, Source]:
        self.looks += 1
        found: dict[int, Source] = {}
        for index in range(len(record.edges)):
            source = trace(record, index, self.extended, self.again)
            if source is not None:
                found[index] = source
                if source.trained:
                    self.with_parameters.append((record, source))
        self[record] = found
        return found

    def feed(self, record: Record) -> bool:
        """Whether recorded calls, or functions of parameters, wait for what travels through a call."""
        return any(source.targets or source.trained for source in self[record].values())

    def producers(self, record: Record) -> list[Record]:
        """The recorded calls that feed a call, as often as they do."""
        return [producer for source in self[record].values() for producer, _ in source.targets]

    def upstream(self, record: Record) -> list[Record]:
        """All recorded calls from which `record` descends."""
        if record not in self.descent:
            found: dict[Record, None] = {}
            waiting = [record]
            while waiting:
                for source in self[waiting.pop()].values():
                    for producer, _ in source.targets:
                        if producer not in found:
                            found[producer] = None
                            waiting.append(producer)
            self.descent[record] = list(found)
        return self.descent[record].copy()

    def clear(self) -> None:
        """Forget what was found: calls were left to autograd, so that inputs come from elsewhere."""
        super().clear()
        self.descent.clear()
        self.with_parameters.clear()

    def in_backward_order(self, root: Record, above: Sequence[Record]) -> list[Record]:
        """The records behind a root, each after all that it feeds."""
        feeds = dict.fromkeys(above, 0)
        for record in (*above, root):
            for producer in self.producers(record):
                feeds[producer] += 1
        order: list[Record] = []
        waiting = [root]
        while waiting:
            record = waiting.pop()
            order.append(record)
            for producer in self.producers(record):
                feeds[producer] -= 1
                if feeds[producer] == 0:
                    waiting.append(producer)
        return order[1:]


def owner(edge: Edge) -> Record | None:
    """The recorded call whose output this edge leads to."""
    node, nr = edge
    record = None if node is None else owner_of(node)
    if node is None or record is None or nr not in record.places:
        return None
    if record.module._backward_hooks:  # those of `register_backward_hook` are at the output's own node
        make_quiet(engine.hooks_at(node.register_hook))
    return record


def trace(consumer: Record, index: int, extended: ExtendedParameters, again: Callable[[], bool]) -> Source | None:
    """Follow the edge of an input upwards to the recorded calls that feed it (`None`: there are none).

    `extended` are the parameters that get fields; `again` is that of `Sources`.

    Raises:
        RuntimeError: If autograd cannot be asked for products with what lies between: a reentrant checkpoint, or a
            function like it.
    """
    edge = beyond(consumer.edges[index])
    node = edge[0]
    if node is None:
        return None
    direct = owner(edge)
    given = NOTHING_GIVEN
    if direct is None:
        extended.look_at(consumer.module)
        given = engine.belongings(node).get(GIVEN) or (NOTHING_GIVEN if consumer.is_loss else consumer.given)
        direct = recover(edge, extended, again, given=given)
    if direct is not None:
        number = direct.places[edge[1]]
        if number not in direct.used:
            direct.use(number)
        return Source(consumer, index, ((direct, edge),))
    targets: dict[tuple[int, int], tuple[Record, Edge]] = {}
    leaves: list[Tensor] = []
    seen: dict[Node, Given] = {node: given}
    waiting = [node]
    if (own := leaf_of(node)) is not None and own in extended:  # the call is given a parameter as it is
        leaves.append(own)
        make_quiet(own._backward_hooks, inside=False)
    while waiting:
        here = waiting.pop()
        for upstream in here.next_functions:
            if type(upstream[0]) in engine.PASSING_ON:
                upstream = beyond(upstream)
            above = upstream[0]
            if above is None:
                continue
            known = above in seen
            given = engine.belongings(above).get(GIVEN) or seen[here]
            found = owner(upstream) or (None if known else recover(upstream, extended, again, here, given))
            if found is not None:
                targets[id(found), upstream[1]] = (found, upstream)
                found.use(found.places[upstream[1]])
            elif not known:
                seen[above] = given
                waiting.append(above)
                if above.name() == engine.ACCUMULATE:
                    leaves.append(above.variable)  # type: ignore[attr-defined]
                    make_quiet(leaves[-1]._backward_hooks, inside=False)
    if not targets and not leaves:
        return None
    for target, _ in targets.values() if leaves else ():
        extended.look_at(target.module)
    trained = tuple([leaf for leaf in leaves if leaf in extended])
    if (targets or trained) and REENTRANT in [each.name() for each in seen]:
        raise reentrant(f"'{consumer.path}' is given what comes out of")
    source = Source(consumer, index, tuple(targets.values()), edge, tuple(leaves), trained, tuple(seen))
    require_no_pass_inside(source, extended)
    return source
