"""Which sample does a row belong to, where a model merges its batch axis with another one?

Windows, heads or time steps may be folded into the batch axis (`[N, T, D] -> [N*T, D]`), in any order. The graph
tells: two gradients are sent back from the loss, one of them scaled by the number of its sample. At a row that feeds
one sample only, they differ by exactly that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bpk.context import CTX
from bpk.graph import Source, gradient_edge
from bpk.jacobians.errors import UnsupportedLayer, explain
from bpk.records import Edge, Record

SourcesOf = Mapping[int, dict[int, Source]]


def attribute(loss: Record, above: list[Record], sources: SourcesOf) -> dict[int, Tensor]:
    """By `id` of a record: the sample `[R]` of every row, where rows are not simply the samples in order.

    Raises:
        UnsupportedLayer: If a row feeds several samples.
    """
    n = loss.batch_size
    number = torch.arange(1, n + 1, dtype=torch.float64)
    found: dict[int, Tensor] = {}
    for record, mat in sweep(loss, above, sources, torch.stack([torch.ones(n, dtype=torch.float64), number])):
        samples = decode(record, mat, n)
        found[id(record)] = samples
    for record in above:
        if id(record) not in found and record.batch_size != n and record.params:
            raise mixed(f"those of '{record.path}' ({type(record.module).__name__}) cannot be followed to the {n}")
    return {k: rows for k, rows in found.items() if not torch.equal(rows, torch.arange(n, device=rows.device))}


def require_separate_rows(loss: Record, above: list[Record], sources: SourcesOf) -> None:
    """Where a loss has more rows than the layers have, make sure that none of its rows is fed by several of theirs.

    Then the rows of the layers are the samples (a language model whose loss sees `[N*T, C]`). Looks at some rows of
    the loss, spread evenly.

    Raises:
        UnsupportedLayer: If a row of the loss is fed by several rows of a layer.
    """
    n = loss.batch_size
    some = torch.linspace(0, n - 1, min(n, 8)).long()
    for record, mat in sweep(loss, above, sources, torch.eye(n, dtype=torch.float64)[some]):
        reached = mat.reshape(*mat.shape[:2], -1).nan_to_num(0.0).ne(0).any(2).sum(1)
        if record.params and int(reached.max()) > 1:
            raise mixed(
                f"{int(reached.max())} rows at '{record.path}' ({type(record.module).__name__}) feed one sample"
            )


def sweep(loss: Record, above: list[Record], sources: SourcesOf, weights: Tensor) -> Iterator[tuple[Record, Tensor]]:
    """Send gradients `[V, N]`, spread over each sample's prediction, back; yield what reaches each call."""
    prediction = loss.inputs[0]
    probe = torch.arange(prediction.numel(), device=prediction.device).add(1.0).cos().add(1.5).reshape(prediction.shape)
    spread = weights.to(prediction.device).reshape(*weights.shape, *[1] * (prediction.dim() - 1))
    arrived: dict[int, Tensor] = {}
    send(sources[id(loss)].get(0), (probe * spread).to(wide(prediction.dtype)), arrived)
    edges = {id(r): edge for source in sources.values() for s in source.values() for r, edge in s.targets}
    with torch.no_grad():
        for record in consumers_first(loss, above, sources):
            mat = arrived.pop(id(record), None)
            if mat is not None:
                yield record, mat
                pass_on(record, edges[id(record)], mat, sources[id(record)], arrived)


def pass_on(record: Record, edge: Edge, mat: Tensor, sources: dict[int, Source], arrived: dict[int, Tensor]) -> None:
    """Send the two gradients through a call's rule to what feeds it."""
    if record.rule is None:
        return

    def pull(vector: Tensor) -> Tensor:
        with CTX.quietly(record):
            ends, inputs = (gradient_edge(edge),), (gradient_edge(record.edges[0]),)
            return torch.autograd.grad(ends, inputs, (vector,), retain_graph=True)[0]

    call = record.call()
    if record.rule.obstacle(call) is not None:
        raise mixed(f"'{record.path}' ({type(record.module).__name__}) mixes or moves those")
    call.pull = pull
    record.rule.capture(call)
    call = call.cast(mat.dtype)
    for index, source in sources.items():
        send(source, record.rule.jac_t_mat_prod(call, mat, index), arrived)


def send(source: Source | None, mat: Tensor, arrived: dict[int, Tensor]) -> None:
    """Add up what reaches each producer."""
    for record, part in source.pull(mat) if source is not None and source.targets else ():
        arrived[id(record)] = arrived[id(record)] + part if id(record) in arrived else part


def decode(record: Record, mat: Tensor, n: int) -> Tensor:
    """The sample `[R]` of every row from the two gradients `[2, R, *out]` (rows that feed nothing: sample 0)."""
    plain, scaled = mat.flatten(2).double().nan_to_num(0.0) if mat.dim() > 2 else mat[..., None].double()
    size = plain.square().sum(1)
    number = (plain * scaled).sum(1) / torch.where(size > 0, size, 1.0)
    off = (scaled - number[:, None] * plain).norm(dim=1) > 1e-3 * scaled.norm(dim=1)
    off |= (size > 0) & ((number - number.round()).abs() > 0.2)
    if off.any():
        row = f"row {int(off.nonzero()[0])} of {len(off)}"
        raise mixed(f"{row} at '{record.path}' ({type(record.module).__name__}) feeds several of the {n} samples")
    return (number.round().long() - 1).clamp(0, n - 1)


def mixed(what: str) -> UnsupportedLayer:
    """The refusal of graphs in which samples cannot be told apart by rows."""
    return UnsupportedLayer(
        explain(
            f"Rows are not samples: {what} of the loss.",
            "the batch axis was moved or merged with another one, and samples cannot be told apart.",
            "keep the batch axis first and apart: layers take extra axes ([N, T, D]), losses take [N, C, T].",
        )
    )


def consumers_first(loss: Record, above: list[Record], sources: SourcesOf) -> list[Record]:
    """The records behind a loss, each after all that it feeds."""
    feeds = {id(r): 0 for r in above}
    for record in (*above, loss):
        for source in sources[id(record)].values():
            for producer, _ in source.targets:
                feeds[id(producer)] += 1
    order: list[Record] = []
    waiting = [loss]
    while waiting:
        record = waiting.pop()
        order.append(record)
        for source in sources[id(record)].values():
            for producer, _ in source.targets:
                feeds[id(producer)] -= 1
                if feeds[id(producer)] == 0:
                    waiting.append(producer)
    return order[1:]


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least single precision, to tell many samples apart."""
    return torch.promote_types(dtype, torch.float32)


def slots(samples: Tensor) -> Tensor:
    """`[R]`: the how-manieth row of its sample each row is."""
    order = torch.argsort(samples, stable=True)
    ranked = samples[order]
    first = torch.searchsorted(ranked, ranked)
    result = torch.empty_like(samples)
    result[order] = torch.arange(len(samples), device=samples.device) - first
    return result


def to_samples(rows: Tensor, samples: Tensor, n: int) -> Tensor:
    """Sum rows `[V, R, ...]` that belong to one sample: `[V, N, ...]`."""
    return rows.new_zeros(rows.shape[0], n, *rows.shape[2:]).index_add(1, samples, rows)
