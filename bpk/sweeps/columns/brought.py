"""A single column of a loss: autograd brings it to all calls at once, as it does a gradient.

It is the gradient of another loss. Where it takes little memory at all calls, autograd has carried it there before
rules would have, one call after the other. Squares, rows and factors of it are the rules' in any case.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge

from bpk.fields.arrived import Columns
from bpk.jacobians.attention.weights import LinearInside
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.rule import Rule
from bpk.plan.graph import gradient_edge
from bpk.plan.plan import Plan
from bpk.plan.step import Step
from bpk.recording.changed import Changed
from bpk.recording.graph.inner_products import InnerProduct, inner_products
from bpk.recording.graph.side_effects import beyond
from bpk.sweeps.columns.diagonals import EXACT


@dataclass
class Share:
    """What a column is at the output of a call, for parameters of a step: `names` has theirs by those in the call."""

    call: Call
    rule: Rule
    names: dict[str, str]
    columns: Columns


class Place:
    """A call whose parameters wait for a column, or functions of parameters in front of it.

    Products of linear layers `inside` of it are asked themselves, so that its rule need not pull the column there.
    """

    def __init__(self, step: Step) -> None:
        assert step.node is not None
        self.step = step
        self.inside = inner_products(step.record, step.call, step.node)
        served = {name for product in self.inside for name in product.names.values()}
        self.names = {name: name for name in step.params if name not in served}

    @property
    def needs_rule(self) -> bool:
        """Whether the rule has to pull the column to where it would be after its products, too."""
        return isinstance(self.step.rule, LinearInside) and not self.names.keys().isdisjoint(self.step.rule.inside)

    @property
    def size(self) -> int:
        """How many numbers the column has there."""
        return self.step.call.output.numel() + sum([x.call.output.numel() for x in self.inside])

    @property
    def edges(self) -> list[GradientEdge]:
        """Where it is in autograd's graph."""
        return [*self.step.edges, *[GradientEdge(x.node, 0) for x in self.inside if not x.is_output]]

    def shares(self, key: Hashable, found: Iterator[Tensor | None]) -> list[Share]:
        """What has come to its edges."""
        at_output, step, shares = self.step.gradient_of(found), self.step, list[Share]()
        for x in self.inside:
            grad = at_output if x.is_output else rows_of(x, next(found))
            if grad is not None:
                shares.append(Share(x.call, x.rule, x.names, one(key, grad)))
        if at_output is not None and (self.names or step.behind_parameters):
            shares.append(Share(step.view(None), step.rule_at(None), self.names, one(key, at_output)))
        return shares


def rows_of(product: InnerProduct, grad: Tensor | None) -> Tensor | None:
    """The gradient at a product inside of a call as the product's rule sees it."""
    return None if grad is None else product.rows(grad)


def one(key: Hashable, column: Tensor) -> Columns:
    """A single column."""
    return Columns({key: column[None]}, signs={key: None})


class Brought:
    """What autograd has brought of the only column of a loss, by call."""

    def __init__(self, plan: Plan, places: list[Place], loss: Step, key: Hashable, mats: Mapping[Wrt, Tensor]) -> None:
        record = loss.record
        ends = [gradient_edge(beyond(record.edges[int(index)])) for index in mats]
        vectors = [record.entrance(int(index)).to_graph(mat)[0] for index, mat in mats.items()]
        edges = [edge for place in places for edge in place.edges]
        found = iter(plan.pull(ends, vectors, edges) if edges else ())
        self.shares = {place.step: place.shares(key, found) for place in places}

    @classmethod
    def begin(cls, plan: Plan, room: int, loss: Step, key: Hashable, mats: Mapping[Wrt, Tensor]) -> Brought | None:
        """The column `mats` at the inputs of a loss, taken on (`None`: rules have to, or it has no `room`)."""
        places = places_of(plan, room)
        return None if places is None else cls(plan, places, loss, key, mats)

    def at(self, step: Step) -> list[Share]:
        """What there is at a call; it is let go of."""
        return self.shares.pop(step, [])


def places_of(plan: Plan, room: int) -> list[Place] | None:
    """Where a column, of up to so many numbers in all, is wanted (`None`: autograd is not to bring it)."""
    found: list[Place] = []
    for step in plan.steps:
        rule, record, call = step.rule, step.record, step.call
        if not step.runs or step.is_loss or step.consumer is not None:
            continue
        if rule is None or rule.inputs_first or record.recomputed is not None:
            return None  # what the rule does for inputs serves parameters, or all would be computed once more
        if call.output.dtype not in EXACT or call.output.dtype is not record.output.dtype:
            return None  # rules compute in a wider format
        if step.params or step.behind_parameters:
            place = Place(step)
            room -= place.size
            if room < 0 or place.needs_rule or any(isinstance(p, Changed) for p in call.params.values()):
                return None
            found.append(place)
    return found
