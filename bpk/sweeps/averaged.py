"""The sweep of KFRA: matrices, averaged over the batch, travel backwards from layer to layer.

Along a chain, `G <- mean_n J_n^T G J_n` (Botev, Ritter, Barber, 2017). On any graph the same recursion holds for all
*open* tensors side by side: those that something visited has read, and whose producers have not been visited. With
`T_n` the Jacobian `J_n` of the visited layer in the rows of its output, and the identity in those of the other
open tensors,

    G <- mean_n T_n^T G T_n.

In blocks `G_ab` `[D_a, D_b]`, for a layer with output `y` and inputs `x_i`, and every other open tensor `b`:

    G_{x_i x_j} += mean_n J_in^T G_yy J_jn        G_{x_i b} += (mean_n J_in)^T G_yb

Contributions to a tensor that several layers read add up in both indices, cross terms included. So `G` stays positive
semi-definite, and is exact where Jacobians are the same for all samples. Plain autograd between two recorded calls
counts as one layer, and a parameter that several calls use as a tensor that all of them read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.room import require_room
from bpk.jacobians.losses.joint import Joint
from bpk.jacobians.losses.loss import Loss
from bpk.plan.graph import Source
from bpk.recording.record import Record, is_awaited
from bpk.sweeps.means import mean_between, pull_mean
from bpk.sweeps.sweeps import DIRECT, Direct, Step, Sweep, apart, matched, positive_scale


@dataclass
class Averages:
    """What arrives at a call: `G_yy` `[D, D]`, and by parameter the cross terms of this use with those before.

    For a parameter that plain functions use there is no `matrix`, and `shared` has its whole `G_pp`.
    """

    matrix: Tensor | None
    shared: dict[str, Tensor] = field(default_factory=dict)


class Averaged(Sweep):
    """The recursion of KFRA, started with the sum over samples of the loss Hessian, or of its sampled square.

    `waiting` holds the blocks `G_ab` by the `id` of both tensors' owners: a call stands for its output, a source for
    the end of its stretch, a parameter (one of `params`, or of the `leaves` that functions use) for itself. Missing
    blocks are zero.
    """

    needs_root = True

    def __init__(self, mc_samples: int | None = None, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(samples)
        self.mc_samples = mc_samples
        self.params: set[int] = set()
        self.whole: dict[int, bool] = {}
        self.leaves: set[int] = set()

    @property
    def key(self) -> Hashable:
        return ("averaged", self.mc_samples, self.samples)

    def start(self, step: Step, loss: Loss) -> None:
        scale, joint, samples = positive_scale(step), step.joint(loss), step.samples_of_rows
        rule, call = joint.rule, joint.call
        if self.mc_samples is None and self.samples is None and samples is None:
            self.begin_joint(step, joint, rule.sum_hessian(call) * scale)
            return
        exact = self.mc_samples is None
        root = rule.sqrt_hessian(call) if exact else rule.sqrt_hessian_sampled(call, self.mc_samples or 1)
        if samples is None:
            flat = self.rows(root, 1).flatten(0, 1).reshape(-1, root[0, 0].numel())
            self.begin_joint(step, joint, flat.T @ flat * scale)
            return
        columns = joint.split((apart(root, samples) if exact else root) * scale.sqrt())
        pulled = [found for index, part in columns.items() for found in step.sources[index].pull(part)]
        for first, half in pulled:  # the loss has several rows per sample: begin where they are together
            require_samples(first, half.shape[1] == step.batch_size)
            for second, other in pulled:
                block = half.reshape(-1, half[0, 0].numel()).T @ other.reshape(-1, other[0, 0].numel())
                self.add(id(first), id(second), block)

    def visit(self, step: Step) -> Averages:
        require_samples(step.record, step.samples_of_rows is None)
        row = {key: matched(block, step.full) for key, block in self.close(id(step.record), self.arrived(step)).items()}
        matrix = row.pop(id(step.record))
        averages = Averages(matrix, self.meet(step, row))
        self.keep(step, matrix, row)
        for index, source in step.sources.items():
            self.add(end(source), end(source), step.rule.congruence(step.call, matrix, index))
            for other, before in step.sources.items():
                if other < index:
                    self.link(end(source), end(before), mean_between(step, matrix, index, other))
        if row:
            others = stacked(row)
            self.cross(row, [(end(source), pull_mean(step, others, i)) for i, source in step.sources.items()])
        self.bend(step)
        for source in step.sources.values():
            self.pass_stretch(source)
            self.bend_stretch(step, source)
        return averages

    def bend(self, step: Step) -> None:
        """Add the second derivative of a call, for curvatures that have it."""

    def bend_stretch(self, step: Step, source: Source) -> None:
        """Add that of the plain autograd before an input."""

    def hand_over(self, record: Record) -> Tensor:
        return self.waiting[id(record)][id(record)]

    def take_back(self, record: Record, sources: dict[int, Source], sent: Tensor | Sequence[Tensor]) -> None:
        row = self.close(id(record), self.waiting.pop(id(record)))
        if len(row) > 1 or len(sources) > 1:
            raise self.no_module_extension(record)
        for index, source in sources.items():
            self.begin(source, sent if isinstance(sent, Tensor) else sent[index])

    # ---- blocks ----------------------------------------------------------------------------------
    def begin(self, source: Source, matrix: Tensor) -> None:
        """Add a matrix at an input of a call."""
        self.add(end(source), end(source), matrix)
        self.pass_stretch(source)

    def begin_joint(self, step: Step, joint: Joint, matrix: Tensor) -> None:
        """Add a matrix over all predictions of a loss, side by side."""
        for (i, j), block in joint.blocks(matrix).items():
            self.add(end(step.sources[i]), end(step.sources[j]), block)
        for source in step.sources.values():
            self.pass_stretch(source)
            self.bend_stretch(step, source)

    def add(self, a: int, b: int, block: Tensor) -> None:
        """Add to `G_ab`."""
        row: dict[int, Tensor] = self.waiting.setdefault(a, {})
        row[b] = row[b] + block if b in row else block

    def link(self, a: int, b: int, block: Tensor) -> None:
        """Add to `G_ab`, and the transpose to `G_ba`."""
        self.add(a, b, block)
        self.add(b, a, block.T)

    def close(self, key: int, row: dict[int, Tensor]) -> dict[int, Tensor]:
        """A tensor, whose row was taken out, is no longer open: drop its column."""
        for other in row:
            if other != key:
                del self.waiting[other][key]
        return row

    def cross(self, row: dict[int, Tensor], pulled: Iterable[tuple[int, Tensor]]) -> None:
        """`G_ib += (mean_n J_in)^T G_yb`, from products of the `stacked` row with mean Jacobians, by tensor `i`."""
        for key, mat in pulled:
            for other, block in zip(row, mat.split([b.shape[1] for b in row.values()]), strict=True):
                self.link(key, other, block.T)

    # ---- plain autograd between two calls -----------------------------------------------------------
    def pass_stretch(self, source: Source) -> None:
        """One layer of the recursion: from an input of a call to the outputs of its producers.

        Without a stretch only the layout changes, in the same way for all samples.
        """
        if end(source) != id(source):
            return
        require_functions_only(source, self.params)
        for leaf in source.trained:
            require_room(leaf.numel(), leaf)
        row = self.close(id(source), self.waiting.pop(id(source)))
        matrix = row.pop(id(source))
        shape = source.consumer.call().inputs[source.index].shape
        n = 1 if source.stretch is None else shape[0]

        def pull(mat: Tensor) -> list[tuple[int, Tensor]]:
            """`[V, N or 1, D] -> [V, N, D_target]`."""
            pulled = source.pull(mat.expand(-1, n, -1).reshape(-1, n, *shape[1:]))
            for record, part in pulled:
                require_samples(record, part.shape[1] == n)
            parts = [(id(record), part) for record, part in pulled]
            if source.trained:
                parts += [(id(p), rows) for p, rows in source.rows(mat.expand(-1, n, -1).reshape(-1, n, *shape[1:]))]
            return [(key, part.reshape(*part.shape[:2], -1)) for key, part in parts]

        def mean(mat: Tensor) -> list[tuple[int, Tensor]]:
            """`[V, N or 1, D] -> [V, D_target]`."""
            return [(key, (part if n == 1 else self.rows(part, 1)).mean(1)) for key, part in pull(mat)]

        for first, half in pull(matrix[:, None]):
            for second, block in mean(half.permute(2, 1, 0)):
                self.add(first, second, block)
        if row:
            self.cross(row, mean(stacked(row)[:, None]))
        for leaf in source.trained:
            self.leaves.add(id(leaf))
            averages = Averages(None, {DIRECT: self.waiting[id(leaf)][id(leaf)]})
            self.direct[leaf] = Direct(averages, self.attribution.batch_size(source.consumer))

    # ---- parameters with several uses -----------------------------------------------------------------
    def meet(self, step: Step, row: dict[int, Tensor]) -> dict[str, Tensor]:
        """Cross terms of this use of a parameter with those visited before; after the last use it is closed."""
        found = {}
        for name in step.record.params:
            key = owner(step, name)
            block = row.get(key)
            if block is not None:
                pulled = pull_mean(step, block.T, name)
                if pulled.shape[0] != pulled.shape[1] or self.whole[key] != whole(step, name, len(pulled)):
                    kind = type(step.record.module).__name__
                    used = f"'{step.record.path}' ({kind}) uses, and a function or a layer of another kind, too"
                    raise uses_of_two_kinds(step.record.params[name], used)
                found[name] = pulled + pulled.T
                if name not in step.reused:
                    del row[key]
                    self.close(key, self.waiting.pop(key))
        return found

    def keep(self, step: Step, matrix: Tensor, row: dict[int, Tensor]) -> None:
        """Open parameters that calls further up use as well: `mean_n J_wn^T G_yy J_in` and `(mean_n J_wn)^T G_yb`."""
        self.params.update(owner(step, name) for name in step.reused)
        outputs = {key: block for key, block in row.items() if key not in self.params | self.leaves}
        for name in step.reused:
            key = owner(step, name)
            for index, source in step.sources.items():
                between = mean_between(step, matrix, index, name)
                self.whole[key] = whole(step, name, between.shape[1])
                self.link(end(source), key, between)
            if outputs:
                pulled = pull_mean(step, stacked(outputs), name)
                self.whole[key] = whole(step, name, pulled.shape[1])
                self.cross(outputs, [(key, pulled)])


def owner(step: Step, name: str) -> int:
    """What a parameter is called in the blocks; uses that see it transposed have blocks of their own."""
    return ~id(step.record.params[name]) if step.rule.transposes(name) else id(step.record.params[name])


def whole(step: Step, name: str, width: int) -> bool:
    """Whether the block of a parameter, of this width, is that of all its entries, and no Kronecker factor."""
    return width == step.record.params[name].numel() and step.rule.kron_input(step.call, name) is None


def end(source: Source) -> int:
    """What an input of a call is called in the blocks: its producer, if that sees the same tensor."""
    same = source.stretch is None and source.exits[0] == source.entrance
    return id(source.targets[0][0]) if same else id(source)


def stacked(row: dict[int, Tensor]) -> Tensor:
    """The blocks `G_yb` of a row as rows `[sum D_b, D_y]`."""
    return torch.cat([block.T for block in row.values()])


def require_functions_only(source: Source, params: set[int]) -> None:
    """A parameter of a layer has a Kronecker factor, one that functions use its whole block: they cannot be added."""
    for leaf in source.trained:
        if id(leaf) in params or is_awaited(leaf):
            consumer = f"'{source.consumer.path}' ({type(source.consumer.module).__name__})"
            raise uses_of_two_kinds(leaf, f"a layer uses, and plain functions before {consumer}, too")


def uses_of_two_kinds(param: Tensor, used: str) -> UnsupportedLayer:
    """The error where one use of a parameter has a Kronecker factor, and another one does not."""
    return UnsupportedLayer(
        explain(
            f"KFRA cannot be computed for a parameter of shape {list(param.shape)}, which {used}.",
            "the recursion gives one of these uses a Kronecker factor, and the other one a whole block.",
            "use KFLR or KFAC.",
        )
    )


def require_samples(record: Record, apart: bool) -> None:
    """Means run over samples, which have to be the rows of every call."""
    if not apart:
        raise UnsupportedLayer(
            explain(
                f"KFRA cannot pass '{record.path}' ({type(record.module).__name__}).",
                "its recursion averages over samples, and the rows of this call are not the samples: the model merges "
                "the batch axis with another one.",
                "use KFLR or KFAC, which tell rows and samples apart.",
            )
        )
