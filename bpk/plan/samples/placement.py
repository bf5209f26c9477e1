"""Before a backward pass: where samples are in each call behind a loss."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import UnsupportedLayer, warn
from bpk.jacobians.core.function_module import Plain
from bpk.plan.samples.as_told import attribute_as_told
from bpk.plan.samples.attribution import attribute
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.checking import may_be_apart
from bpk.plan.samples.findings import AllSamplesInside, NotInFront
from bpk.plan.samples.forms import Form, confirms, connections, form_of, recall, remember
from bpk.plan.samples.given import of_what_was_given
from bpk.plan.samples.hypotheses import are_pieces, has_no_axis, is_given_parameters, mixed, uses_parameters
from bpk.plan.samples.proofs import prove
from bpk.plan.sources import Sources
from bpk.plan.survey import mixes
from bpk.recording.context.told import Told
from bpk.recording.graph.nodes import is_of_leaves
from bpk.recording.graph.ownership import DISSOLVED, leave_to_autograd
from bpk.recording.graph.side_effects import beyond
from bpk.recording.record import Record


@dataclass(eq=False)
class Placement(Behind):
    """What was found: calls behind the root, the number of samples, and rows that are not the samples in order.

    `rows` says, by record, which sample each of its rows belongs to, `axes` along which axis rows are if not in front.
    `left` are modules whose calls were left to autograd, now or in an earlier pass over the same graph.
    """

    n: int
    rows: dict[Record, Tensor] = field(default_factory=dict)
    axes: dict[Record, int] = field(default_factory=dict)
    left: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left += self.root.left

    def leave(self, records: Collection[Record]) -> None:
        """Leave calls to autograd; inputs come from elsewhere then, and other calls may come to light."""
        if not records:
            return
        self.left += [record.module for record in records]
        for consumer in self.records:
            for source in self.sources[consumer].values():
                for target, (node, _) in source.targets:
                    if target in records and node is not None and target.module is not DISSOLVED:
                        leave_to_autograd(target, node)
        self.sources.clear()
        self.above, self.followed = self.sources.upstream(self.root), None

    def take(self, known: Form) -> bool:
        """Take what an earlier pass has found, if it holds here; whether it does."""
        records = self.records
        if known.mixed:
            return True
        for record, axis in zip(records, known.axes, strict=True):
            if record.shifted != axis:
                record.shift(axis)
        rows = {record: each for record, each in zip(records, known.rows, strict=True) if each is not None}
        found = rows if known.proven else self.holding(known.n, rows)
        if found is not None:
            self.n, self.rows = known.n, found
            return True
        for record in records:
            record.shift(0)
        return False

    def holding(self, n: int, rows: dict[Record, Tensor]) -> dict[Record, Tensor] | None:
        """Where samples are, if they are where they were: by the form and what data pick, or else by gradients."""
        proof = prove(self, n, rows, now=True)
        if proof is None:
            return rows if confirms(self, n, rows) else None
        return {record: each for record, each in zip(self.records, proof, strict=True) if each is not None}


def place(
    root: Record,
    sources: Sources,
    second_order: bool,
    has_module_extension: Callable[[Record], bool] = lambda record: False,
    independent: bool = False,
    twice: bool = False,
    told: Told | None = None,
) -> Placement:
    """Find the batch axis throughout the graph behind `root`, and put it in front of what rules see.

    Left to autograd are layers without a rule (unless a module extension serves them), calls whose input has no axis
    for samples (a layer that is given a parameter), and layers without parameters whose rule cannot have the batch axis
    where it is. Where samples mix, quantities of second order are refused, and those that need `independent` samples;
    for others of first order the user is told once. Attention that has samples inside of its rows is refused where
    autograd would have to differentiate it `twice`, because only the rule can do that with a fused kernel. The user may
    have `told` of which samples the rows of the root are.
    """
    found = Placement(root, sources, sources.upstream(root), root.batch_size)
    while unserved := [r for r in left_at_once(found) if not has_module_extension(r)]:
        found.leave(unserved)
    above = found.above
    plain = told is None or told.is_plain(root.batch_size)
    moved = not plain or is_moved(found, second_order)
    stuck = tuple([k for k, record in enumerate(above) if (second_order or moved) and is_stuck(record)])
    if not stuck and not moved:
        return found
    form = form_of((*above, root), sources, second_order, twice, stuck, told and told.said)
    known = recall(root, form)
    found.leave([above[k] for k in stuck])
    if known is not None and known.mixed and (independent or may_be_apart(found)):
        known = None
    found.leave([above[k] for k in (known.left if known is not None else ()) if k not in stuck])
    behind = connections(found.records, sources) if known is not None and known.left else None
    if known is None or not (known.mixed or known.behind == behind) or not found.take(known):
        refuses = second_order or independent or not (told is None or (plain and any(map(mixes, above))))
        what = search(found, refuses, twice, told)
        remaining = set(found.above)
        left = tuple([k for k, record in enumerate(above) if record not in remaining])
        behind = connections(found.records, sources) if left else None
        remember(root, form, replace(what, left=left, behind=behind))
    found.axes = {record: record.shifted for record in found.above}  # another loss may move them
    return found


def search(found: Placement, refuses: bool, twice: bool, told: Told | None) -> Form:
    """Test hypotheses until one holds, and leave calls that have no batch axis; returns what is to be remembered.

    Where samples mix, this `refuses`, or else warns and takes rows for samples.
    """
    root, sources = found.root, found.sources
    found.put_back()  # a pass over the same graph before, or another loss, may have moved some
    while True:
        try:
            if told is None:
                found.n, found.rows = attribute(found)
            else:
                found.n, found.rows = attribute_as_told(found, told)
            break
        except NotInFront as stop:
            if twice and isinstance(stop, AllSamplesInside):
                raise mixed(f"one row of '{stop}' has entries of several samples") from None
            found.leave(stop.records)
        except UnsupportedLayer as error:
            if functions := [record for record in found.above if needs_batch_in_front(record)]:
                found.leave(functions)
                continue
            if refuses or any(r.batch_size != root.batch_size for r in found.above if uses_parameters(r, sources)):
                raise
            warn(f"{error} First-order quantities are those of the chain rule.")
            return Form((), (), root.batch_size, (), proven=False, mixed=True)
    records = found.records
    proof = prove(found, found.n, found.rows)
    if proof is not None:  # it knows of rows without a gradient, too, such as those at a point of rest
        found.rows = {r: each for r, each in zip(records, proof, strict=True) if each is not None}
    if told is None and are_pieces(found.above, found.rows, found.n):
        # what dropout has silenced in the only sample looked like another
        found.put_back()
        found.n, found.rows = 1, {record: one_sample(record) for record in records if record.batch_size > 1}
        proof = prove(found, found.n, found.rows)
    axes = tuple([record.shifted for record in records])
    return Form((), axes, found.n, tuple([found.rows.get(record) for record in records]), proof is not None)


def needs_batch_in_front(record: Record) -> bool:
    """Whether a call is that of a function with parameters, such as `F.batch_norm`, whose rule sees samples in front.

    To autograd, it is the same where they are.
    """
    if not record.params or not isinstance(record.module, Plain) or record.rule is None:
        return False
    return record.rule.acts_on(record.call()) is None


def one_sample(record: Record) -> Tensor:
    """The sample `[R]` of each row: the only one there is."""
    return torch.zeros(record.batch_size, dtype=torch.long, device=record.output.device)


def is_stuck(record: Record) -> bool:
    """Whether a layer without parameters rearranges the batch axis, so that autograd rather than its rule passes it."""
    if record.params or record.rule is None or not record.rule.may_refuse or record.is_loss or record.problem:
        return False
    call = record.call()
    return record.rule.obstacle(call) is not None and record.rule.mixing(call) is None


def left_at_once(behind: Behind) -> list[Record]:
    """The calls that autograd passes wherever the samples are: those without a rule, and without a batch axis."""
    one = behind.root.batch_size == 1  # to one sample, all belongs
    left = list[Record]()
    for record in behind.above:
        fed = False
        for source in behind.sources[record].values():
            fed = fed or bool(source.targets)
        if record.rule is None:
            left.append(record)
        elif not fed or one:
            given = (one or is_given_parameters(record)) and has_no_axis(record)
            if given or (not fed and computes_parameter(record)):
                left.append(record)
    return left


def computes_parameter(record: Record) -> bool:
    """Whether a layer without parameters is given what is made of parameters alone: its rows are no samples."""
    return not record.params and bool(record.edges) and all(is_of_leaves(beyond(edge)[0]) for edge in record.edges)


def is_moved(behind: Behind, second_order: bool) -> bool:
    """Whether anything in the graph might have moved or merged the batch axis."""
    n, calls, sources = behind.root.batch_size, behind.calls, behind.sources
    before = False  # whether there are functions in front of all layers
    for record in calls:
        if record.batch_size != n and (second_order or uses_parameters(record, sources)):
            return True
        before = before or bool(record.given and record.given[0][:1] != (n,) and uses_parameters(record, sources))
    for record in behind.records:
        for index, source in sources[record].items():
            if source.targets and (source.stretch is not None or (not record.aligned and record.axis(index))):
                return True
            for producer, edge in source.targets:
                if not producer.aligned and producer.out_axis(producer.places[edge[1]]):
                    return True
    return before and bool(of_what_was_given(behind.root, calls))
