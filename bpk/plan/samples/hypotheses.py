"""Where the batch axis of a graph may be: hypotheses, the simplest first, for `attribution.py` to test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.graph import VIEWS
from bpk.plan.samples.given import free_axes, is_given_data, is_told
from bpk.plan.samples.listed import are_joined, are_listed, are_nodes, one_by_one
from bpk.plan.sources import Sources
from bpk.recording.context.state import CTX
from bpk.recording.graph.nodes import leaf_of
from bpk.recording.graph.side_effects import beyond
from bpk.recording.record import Record


def hypotheses(root: Record, above: list[Record]) -> list[tuple[int, bool, bool]]:
    """What `N` may be, whether the batch axis may be moved, and whether it comes first among the rows of the root.

    The simplest hypotheses come first. With one row in front of everything, moving the batch axis is not simpler than
    merging it. That all rows are those of one sample agrees with any graph: it is none where what the model was given
    says otherwise, and comes last if a layer knows better.
    """
    sizes = numbers_of_samples(root, above)
    if root.batch_size > 1 and are_listed(above, root.batch_size):
        return [(n, movable, True) for movable in (False, True) for n in sizes if n == root.batch_size]
    if root.batch_size > 1 and not may_be_one_sample(above):
        sizes = [n for n in sizes if n != 1]
    axes = axes_of_one_row(above)
    one_after_the_other = one_by_one(root, above) or are_joined(above, root.batch_size)
    if axes and not (one_after_the_other or are_nodes(root, above)):
        sizes = sorted({1, *axes.intersection(sizes)}, reverse=True)
    last = [n for n in sizes if n == 1 and any(r.binding.axes and r.batch_size > 1 for r in above)]
    sizes = [n for n in sizes if n not in last]
    whole = [n for n in sizes if n == root.batch_size]
    several = any(has_axis(record, root.batch_size) for record in above)
    settled = 1 in sizes[1:] and several and not one_by_one(root, above)
    ordered = [(n, movable, True) for movable in (False, True) for n in whole if not (movable and settled)]
    for movable in (False, True):
        found = [(n, movable, in_front) for in_front in (True, False) for n in sizes]
        ordered += [hypothesis for hypothesis in found if hypothesis not in ordered]
    return ordered + [(n, True, True) for n in last]


def may_be_one_sample(above: list[Record]) -> bool:
    """Whether what was called may have been given a batch of one: its first tensor, or a layer that knows, says so."""
    if any(record.binding.axes and record.batch_size == 1 for record in above):
        return True
    first = [shapes[0] for shapes in {record.given for record in above} if shapes]
    tables = [shape for shape in first if len(shape) < 2]  # of positions, maybe, where parts of a model are called
    return all(shape[:1] in ((), (1,)) for shape in first if shape not in tables or len(tables) == len(first))


def axes_of_one_row(above: list[Record]) -> set[int]:
    """If the first tensor with which a model was called has one row: how many samples there may be all the same.

    The batch axis may come second, behind time.
    """
    given = {record.given for record in above if record.given}
    if not all(shapes[0][:1] == (1,) for shapes in given):
        return set()
    return {size for shapes in given for shape in shapes for size in shape[:2]}


def reads_all(above: list[Record], rows: Mapping[Record, Tensor], n: int) -> bool:
    """Whether the calls that are given data may together have been given that of all `n` samples.

    A row without a gradient may be any sample's, and another one's each time that the model was called.
    """
    calls = [record for record in above if is_given_data(record)]
    told = {number for record in calls for number in (rows[record].tolist() if record in rows else range(n))}
    silent = [record for record in calls if record in rows and -1 in rows[record]]
    times = len({id(record.given) for record in silent if record.given}) + sum(not record.given for record in silent)
    return not calls or len(told - {-1}) + times >= n


def are_pieces(above: list[Record], rows: Mapping[Record, Tensor], n: int) -> bool:
    """Whether these `n` samples can only be pieces of the one that a model was given."""
    return n > 1 and bool(axes_of_one_row(above)) and not reads_all(above, rows, n)


def has_axis(record: Record, n: int) -> bool:
    """Whether `n` samples may be behind the first axis of a call that has one row."""
    if record.batch_size != 1 or not record.inputs:
        return False
    free = free_axes(record)
    return n in (record.inputs[0].shape[1:] if free is None else free)


def numbers_of_samples(root: Record, above: Iterable[Record]) -> list[int]:
    """Hypotheses about `N`: the rows of the root, or fewer; layers that know their batch axis have multiples of it.

    Such layers may have been given some of them, where the model was given as many samples as the root has rows.
    """
    records = list(above)
    known = {record.batch_size for record in records if record.knows_batch}
    counted = [r for r in records if r.params and r.batch_size < root.batch_size and not is_given_parameters(r)]
    rows = {r.batch_size for r in counted} | {root.batch_size} | known | set().union(*map(behind_first_axis, records))
    told = is_told(root, records) or are_joined(records, root.batch_size)
    found = [n for n in rows if n and (all(k % n == 0 for k in known) or (told and n == root.batch_size))]
    if not found:
        raise mixed(f"layers that know their batch axis have batches of {sorted(known)}, which are no samples")
    return sorted(found, reverse=True)


def behind_first_axis(record: Record) -> set[int]:
    """The sizes of axes of data, or of what has its first axes, other than the first, where the batch axis may be."""
    if not record.inputs or not record.inputs[0].is_floating_point():
        return set()
    if not is_given_data(record) and (not record.given or record.inputs[0].shape[:2] != record.given[0][:2]):
        return set()
    return {*(free_axes(record) or ())} - {1}


def has_no_axis(record: Record) -> bool:
    """Whether a call's input has axes only that its layer looks at.

    A parameter or a constant needs no others. What the model was given does: it is left to those who refuse it.
    """
    if record.rule is None or record.problem or not record.inputs:
        return False
    looks_at = record.rule.acts_on(record.call_on(list(record.inputs)))  # whatever was changed in place since
    if looks_at is None or record.inputs[0].dim() > looks_at:
        return False
    if not record.inputs[0].dim():  # an index: nobody refuses it
        return True
    return not is_given_data(record) or any(len(shape) > looks_at for shape in record.given[:1])


def are_held(data: Sequence[Tensor]) -> bool:
    """Whether all tensors are buffers or frozen parameters of extended modules, or views of some."""
    held = [x.untyped_storage() for module in CTX.all_modules() for x in constants_of(module)]
    return all(any(x.untyped_storage() is storage for storage in held) for x in data)


def constants_of(module: nn.Module) -> Iterator[Tensor]:
    """What a module holds itself and does not train."""
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    yield from (p for p in module._parameters.values() if p is not None and not p.requires_grad and not is_lazy(p))


def uses_parameters(record: Record, sources: Sources) -> bool:
    """Whether a call, or a function in front of it, uses parameters that are trained."""
    return bool(record.params) or any(source.trained for source in sources[record].values())


def reads_tables(record: Record, sources: Sources) -> bool:
    """Whether all that a call sees is a table that all samples share: parameters, and buffers of extended modules."""
    return all(is_given_tables(call, sources) for call in (record, *sources.upstream(record)))


def is_given_tables(call: Record, sources: Sources) -> bool:
    """The same of what a call is given by no other."""
    fed = sum(bool(source.targets) for source in sources[call].values())
    data = [x for x, (node, _) in zip(call.inputs, call.edges, strict=True) if node is None]
    params = sum(is_parameter(beyond(edge)[0]) for edge in call.edges if edge[0] is not None)
    return len(data) + params + fed >= len(call.inputs) and (not data or are_held(data))


def is_given_parameters(record: Record) -> bool:
    """Whether a call's inputs are parameters, or views of them: it has no samples."""
    return bool(record.edges) and all(is_parameter(node) for node, _ in map(beyond, record.edges))


def is_parameter(node: Node | None) -> bool:
    """Whether a node of the graph hands out a parameter, or a view of one."""
    while node is not None and node.name() in VIEWS:
        node, _ = beyond(node.next_functions[0])
    return leaf_of(node) is not None


def numberings(rows: int, n: int, in_front: bool) -> Iterator[Tensor]:
    """Hypotheses about which sample `0 .. n - 1` each row is of: samples first, or last and between other axes."""
    if n == 0 or rows % n:
        return
    number, share = torch.arange(rows, device="cpu"), rows // n
    behind = sorted((d for d in range(1, share) if share % d == 0), reverse=True)
    for inner in [share] if in_front else behind:
        yield (number // inner) % n


def all_numberings(rows: int, n: int) -> Iterator[Tensor]:
    """All of them, each once: those of a single sample are one and the same."""
    yield from numberings(rows, n, in_front=True)
    yield from numberings(rows, n, in_front=False) if n > 1 else ()


def require_separate_samples(
    records: Iterable[Record], sources: Sources, rows: Mapping[Record, Tensor], n: int
) -> None:
    """Refuse samples inside of the only row of a layer with parameters, unless such a layer before it tells them apart.

    Nothing else would notice that the layer mixes them.
    """
    telling = {r for r, each in rows.items() if r.params and len(each.unique()) == n}
    for record in records:
        if record.params and telling.isdisjoint(sources.upstream(record)):
            raise mixed(f"{record.where} has one for {n} samples")


def require_rows(root: Record, sources: Sources) -> None:
    """Refuse a loss of several tensors that have no rows in common (one of classes, and one of samples)."""
    fed = {k: root.inputs[k] for k, source in sources[root].items() if source.targets}
    counts = {x.shape[root.axis(k)] if x.dim() else 0 for k, x in fed.items()}
    if len(counts) > 1:
        shapes = ", ".join(str(list(x.shape)) for x in fed.values())
        raise mixed(f"'{root.path}' is given tensors with different numbers of rows ({shapes})")


def mixed(what: str) -> UnsupportedLayer:
    """The refusal of graphs in which samples cannot be told apart by rows."""
    return UnsupportedLayer(
        f"Rows are not samples: {what}.",
        "a function or a layer mixes samples, or the batch axis was moved or merged so that they cannot be told apart.",
        "compute statistics per sample; keep the batch axis first and apart: layers take extra axes ([N, T, D]), "
        "losses take [N, C, T]. Rows of a loss may be of any samples: say which, backpack(..., samples=...). Of "
        "contrastive losses there are only sums over the batch (DiagGGNExact, HMP, ...).",
    )
