"""A single column of a loss: autograd brings it to all calls at once, as it does a gradient.

It is the gradient of another loss. Where it takes little memory at all calls, autograd has carried it there before
rules would have, one call after the other. Squares, rows and factors of it are the rules' in any case.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import Tensor
from torch.autograd.graph import GradientEdge

from bpk.fields.arrived import Columns
from bpk.jacobians.attention.weights import LinearInside
from bpk.jacobians.core.call import Wrt
from bpk.plan.graph import Source, gradient_edge
from bpk.plan.plan import Plan
from bpk.plan.step import Step
from bpk.recording import engine
from bpk.recording.changed import Changed
from bpk.recording.graph.inner_products import InnerProduct, inner_products
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.side_effects import beyond
from bpk.sweeps.columns.diagonals import EXACT

FEW_CALLS = 8
"""Up to so many calls, rules take no more time than asking autograd does."""


class Places:
    """Where a column is wanted: at calls whose parameters wait for it, and where functions of parameters end.

    `served` says whether autograd can bring a column of up to so many numbers in all (`room`). Products of linear
    layers `inside` of a call are asked themselves, so that its rule need not pull the column there; `left` has the
    parameters of such a call that are in none. Several calls may read what functions return: `ends` has one of these
    stretches for each, which gets the column of all.
    """

    def __init__(self, plan: Plan, room: int) -> None:
        self.plan = plan
        self.steps: list[Step] = []
        self.inside: dict[Step, list[InnerProduct]] = {}
        self.left: dict[Step, list[str]] = {}
        self.ends: dict[Edge, Step] = {}
        self.room = room
        self.served = len(plan.steps) > FEW_CALLS and all(map(self.can_pass, plan.steps))

    def can_pass(self, step: Step) -> bool:
        """Whether a column may pass a call on its way without the call's rule; what is wanted there is noted."""
        if step.source is not None:
            return not step.params or self.look_at_end(step, step.source)
        if step.is_loss or not step.runs:
            return True
        rule, record, call = step.rule, step.record, step.call
        if rule is None or rule.inputs_first or record.recomputed is not None:
            return False  # what the rule does for inputs serves parameters, or all would be computed once more
        if call.output.dtype not in EXACT or call.output.dtype is not record.output.dtype:
            return False  # rules compute in a wider format
        if not step.params:
            return True
        self.room -= call.output.numel()
        self.steps.append(step)
        if isinstance(rule, LinearInside) and not (self.plan.is_whole and self.look_inside(step, rule)):
            return False  # of several losses, uses of a parameter are put together: each must be that of the whole call
        return self.room >= 0 and not any(isinstance(p, Changed) for p in call.params.values())

    def look_at_end(self, stretch: Step, source: Source) -> bool:
        """Note where functions of parameters end; says whether what comes there belongs to this end alone.

        It does not, where other functions lead there, or it is a parameter itself, which layers may use, too.
        """
        end, out = source.stretch, stretch.call.output
        if end is None or end[0] is None or end[0].name() == engine.ACCUMULATE or out.dtype not in EXACT:
            return False
        if stretch.consumer is None or not stretch.consumer.runs:
            return False
        if end in self.ends:
            return list(map(id, self.ends[end].params.values())) == list(map(id, stretch.params.values()))
        others = [step.source for step in self.plan.steps if step.source is not None]
        self.ends[end] = stretch
        self.room -= out.numel()
        return self.room >= 0 and not any(end[0] in other.nodes for other in others if other.stretch != end)

    def look_inside(self, step: Step, rule: LinearInside) -> bool:
        """Find products inside of a call; says whether these are all in which its weights are."""
        assert step.node is not None
        found = inner_products(step.record, step.call, step.node)
        known = {name for product in found for name in product.names.values()}
        self.inside[step] = found
        self.left[step] = [name for name in step.params if name not in known]
        self.room -= sum([product.call.output.numel() for product in found])
        return rule.inside.keys().isdisjoint(self.left[step])

    @property
    def edges(self) -> list[GradientEdge]:
        """Where they are in autograd's graph: those of calls, then ends of functions, then products inside of calls."""
        edges = [edge for step in self.steps for edge in step.edges]
        edges += map(gradient_edge, self.ends)
        products = [product for found in self.inside.values() for product in found if not product.is_output]
        return edges + [GradientEdge(product.node, 0) for product in products]


class Brought:
    """What autograd has brought of a single column: to calls and ends of functions (`columns`), and `inside` of calls.

    `left` has the parameters of these calls that wait for the column at the output; `is_everywhere` says whether
    something has come to all places.
    """

    def __init__(self, places: Places, loss: Step, key: Hashable, mats: Mapping[Wrt, Tensor]) -> None:
        record, self.left = loss.record, places.left
        ends = [gradient_edge(beyond(record.edges[int(index)])) for index in mats]
        vectors = [record.entrance(int(index)).to_graph(mat)[0] for index, mat in mats.items()]
        edges = places.edges
        found = iter(places.plan.pull(ends, vectors, edges) if edges else ())
        self.is_everywhere = True
        self.columns: dict[Step, Columns] = {}
        self.inside: dict[Step, list[tuple[InnerProduct, Columns]]] = {}
        for step in places.steps:
            if (grad := step.gradient_of(found)) is not None:
                self.columns[step] = one(key, grad)
            self.is_everywhere &= grad is not None
        for stretch in places.ends.values():
            if (grad := next(found)) is not None:
                self.columns[stretch] = one(key, stretch.record.entrance(stretch.index).one_to_rule(grad))
            self.is_everywhere &= grad is not None
        for step, products in places.inside.items():
            at_output = self.columns.get(step)
            if not self.left[step]:
                self.columns.pop(step, None)
            each = [at_output if x.is_output else rows_of(x, key, next(found)) for x in products]
            self.inside[step] = [(x, mine) for x, mine in zip(products, each, strict=True) if mine is not None]
            self.is_everywhere &= len(self.inside[step]) == len(products)

    @classmethod
    def begin(cls, plan: Plan, room: int, loss: Step, key: Hashable, mats: Mapping[Wrt, Tensor]) -> Brought | None:
        """The column `mats` at the inputs of a loss, taken on (`None`: rules have to, or it has no `room`).

        Where nothing has come to a place, a rule may still know of one: it has spread a mask over heads itself, which
        is no part of the graph.
        """
        places = Places(plan, room)
        found = cls(places, loss, key, mats) if places.served else None
        return found if found is not None and found.is_everywhere else None


def one(key: Hashable, column: Tensor) -> Columns:
    """A single column."""
    return Columns({key: column[None]}, signs={key: None})


def rows_of(product: InnerProduct, key: Hashable, grad: Tensor | None) -> Columns | None:
    """The gradient at a product inside of a call as the product's rule sees it."""
    return None if grad is None else one(key, product.rows(grad))
