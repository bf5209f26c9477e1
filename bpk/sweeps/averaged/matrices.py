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

from collections.abc import Iterable

import torch
from torch import Tensor

from bpk.fields.arrived import Averages
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.step import Link, Step
from bpk.plan.stretch import STRETCH
from bpk.sweeps.averaged.products import (
    as_precise,
    blocks_between,
    in_one_precision,
    mean_between,
    pull_mean,
    pull_means,
    require_one_name,
    require_samples,
    uses_of_two_kinds,
)
from bpk.sweeps.columns.lazy import as_lazy, split_rows
from bpk.sweeps.sweep import Player, UsesById, module_extension_refused, positive_factor, times_root_of_factor

Tensors = Step | tuple[int, bool]
"""What blocks belong to: the output of a call, or a parameter (by `id`, and whether its uses see it transposed)."""


class Averaged(Player):
    """The recursion of KFRA, started with the sum over samples of the loss Hessian, or of its sampled square.

    `waiting` holds the blocks `G_ab` by both tensors. Missing blocks are zero.
    """

    needs_root = True

    def __init__(self, mc_samples: int | None = None, samples: tuple[int, ...] | None = None) -> None:
        super().__init__(samples, mc_samples)
        self.mc_samples = mc_samples

    def prepare(self) -> None:
        self.waiting: dict[Tensors, dict[Tensors, Tensor]] = {}
        self.uses: UsesById = {}
        self.kinds: dict[Tensors, tuple[bool, bool]] = {}

    def visit(self, step: Step) -> None:
        if step.is_loss or step in self.waiting:
            step.reached = True
            (self.start if step.is_loss else self.pass_call)(step)

    def start(self, step: Step) -> None:
        """Begin at a loss."""
        if self.module_extensions is not None and self.module_extensions.serves(step):
            raise module_extension_refused(step.where)
        positive_factor(step)
        joint = step.joint
        rule, call = joint.rule, joint.call
        exact = self.mc_samples is None
        if step.samples_of_rows is not None:
            self.start_behind_rows(step)
            return
        if exact and self.samples is None:
            matrix = rule.sum_hessian(call)
        else:
            root = rule.sqrt_hessian(call) if exact else rule.sqrt_hessian_sampled(call, self.mc_samples or 1)
            flat = self.rows(root, 1).flatten(0, 1).reshape(-1, root[0, 0].numel())
            matrix = flat.T @ flat
        for (i, j), block in joint.blocks(matrix * step.grad).items():
            self.add_between(step.links[i], step.links[j], block)

    def start_behind_rows(self, step: Step) -> None:
        """The loss has several rows per sample: begin where these are together."""
        joint, exact = step.joint, self.mc_samples is None
        assert step.samples_of_rows is not None
        root = joint.rule.sqrt_hessian(joint.call) if exact else None
        if root is not None:
            root = split_rows(as_lazy({0: root}, None), step.samples_of_rows, step.batch_size).all()[0][0]
        else:
            root = joint.rule.sqrt_hessian_sampled(joint.call, self.mc_samples or 1)
        pulled: list[tuple[Step, Tensor]] = []
        for index, part in joint.split(times_root_of_factor(root, step)).items():
            pulled += at_producers(step.links[index], part)
        for first, half in pulled:
            require_samples(first, half.shape[1] == step.batch_size)
            for second, other in pulled:
                block = half.reshape(-1, half[0, 0].numel()).T @ other.reshape(-1, other[0, 0].numel())
                self.add(first, second, block)

    def pass_call(self, step: Step) -> None:
        """One layer of the recursion."""
        row = in_one_precision(self.close(step, self.waiting.pop(step)), step.call.output)
        matrix = row.pop(step)
        if self.module_extensions is not None and self.module_extensions.serves(step):
            self.apply_module_extension(step, matrix, row)
            return
        require_samples(step, step.samples_of_rows is None)
        for link in step.links.values() if step.rule is STRETCH else ():
            require_samples(link.producer, link.producer.samples_of_rows is None)
        require_one_name(step)
        view = as_precise(step, step.view(self.samples), matrix)
        arrived = Averages(matrix, self.meet(step, row))
        self.note(self.uses, step, arrived)
        self.settle_last(self.uses, step)
        self.keep(step, matrix, row)
        for (i, j), block in blocks_between(step, view, matrix).items():
            self.add_between(step.links[i], step.links[j], block)
        if row:
            found = pull_means(step, view, stacked(row))
            self.cross(row, [(step.links[i].producer, step.links[i].rows_back(mat)) for i, mat in found.items()])
        self.add_residual(step)

    def add_residual(self, step: Step) -> None:
        """Add the second derivative of a call, for curvatures that have it."""

    def apply_module_extension(self, step: Step, matrix: Tensor, row: dict[Tensors, Tensor]) -> None:
        """Let a user's module extension pass a call."""
        assert self.module_extensions is not None
        if row or len(step.links) > 1:
            raise module_extension_refused(step.where)
        sizes = {index: step.call.inputs[index].shape[1:].numel() for index in step.links}
        mats = self.module_extensions.pass_tensors(step, matrix, {index: (d, d) for index, d in sizes.items()})
        for index, link in step.links.items():
            self.add_between(link, link, mats[index])

    # ---- blocks ----------------------------------------------------------------------------------
    def add_between(self, first: Link, second: Link, block: Tensor) -> None:
        """Add a block that belongs to two inputs of a call."""
        self.add(first.producer, second.producer, second.rows_back(first.rows_back(block.T).T))

    def add(self, a: Tensors, b: Tensors, block: Tensor) -> None:
        """Add to `G_ab`."""
        row = self.waiting.setdefault(a, {})
        row[b] = row[b] + block if b in row else block

    def link(self, a: Tensors, b: Tensors, block: Tensor) -> None:
        """Add to `G_ab`, and the transpose to `G_ba`."""
        self.add(a, b, block)
        self.add(b, a, block.T)

    def close(self, key: Tensors, row: dict[Tensors, Tensor]) -> dict[Tensors, Tensor]:
        """A tensor, whose row was taken out, is no longer open: drop its column."""
        for other in row:
            if other != key:
                del self.waiting[other][key]
        return row

    def cross(self, row: dict[Tensors, Tensor], pulled: Iterable[tuple[Tensors, Tensor]]) -> None:
        """`G_ib += (mean_n J_in)^T G_yb`, from products of the `stacked` row with mean Jacobians, by tensor `i`."""
        for key, mat in pulled:
            for other, block in zip(row, mat.split([b.shape[1] for b in row.values()]), strict=True):
                self.link(key, other, block.T)

    # ---- parameters with several uses -----------------------------------------------------------------
    def meet(self, step: Step, row: dict[Tensors, Tensor]) -> dict[str, Tensor]:
        """Cross terms of this use of a parameter with those visited before; after the last use it is closed."""
        found = {}
        for name, param in step.params.items():
            key = self.owner(step, name)
            block = row.get(key)
            if block is not None:
                assert step.rule is not None
                pulled = pull_mean(step.rule, step.view(self.samples), block.T, name)
                if pulled.shape[0] != pulled.shape[1] or self.kinds[key] != kind(step, name, len(pulled)):
                    raise uses_of_two_kinds(param, step)
                found[name] = pulled + pulled.T
                if name not in step.reused:
                    del row[key]
                    self.close(key, self.waiting.pop(key))
        return found

    def keep(self, step: Step, matrix: Tensor, row: dict[Tensors, Tensor]) -> None:
        """Open parameters that calls further up use as well: `mean_n J_wn^T G_yy J_in` and `(mean_n J_wn)^T G_yb`."""
        outputs: dict[Tensors, Tensor] = {key: block for key, block in row.items() if isinstance(key, Step)}
        view, rule = step.view(self.samples), step.rule
        for name in step.reused:
            assert rule is not None
            key = self.owner(step, name)
            for index, link in step.links.items():
                between = mean_between(rule, view, matrix, index, name)
                self.kinds[key] = kind(step, name, between.shape[1])
                self.link(link.producer, key, link.rows_back(between.T).T)
            if outputs:
                pulled = pull_mean(rule, view, stacked(outputs), name)
                self.kinds[key] = kind(step, name, pulled.shape[1])
                self.cross(outputs, [(key, pulled)])

    def owner(self, step: Step, name: str) -> tuple[int, bool]:
        """What a parameter is called in the blocks; uses that see it transposed have blocks of their own."""
        return id(step.params[name]), step.rule is not None and step.rule.transposes(name)


def at_producers(link: Link, mat: Tensor) -> list[tuple[Step, Tensor]]:
    """Columns at an input, at the recorded calls that feed it, through the stretch in between if there is one."""
    step = link.producer
    if step.rule is not STRETCH:
        return [(step, link.back(mat))]
    if step.params or step.source is None:
        raise UnsupportedLayer(
            f"KFRA cannot start behind {step.where}, which uses parameters.",
            "the loss has several rows for each sample there.",
            "use KFLR or KFAC, which tell rows and samples apart.",
        )
    step.reached = True
    return [(step.links[k].producer, part) for k, part in step.source.pull(mat).items()]


def stacked(row: dict[Tensors, Tensor]) -> Tensor:
    """The blocks `G_yb` of a row as rows `[sum D_b, D_y]`."""
    return torch.cat([block.T for block in row.values()])


def kind(step: Step, name: str, width: int) -> tuple[bool, bool]:
    """Whether the block of a parameter, of this width, is that of all its entries, and whether channels are swapped."""
    rule = step.rule
    assert rule is not None
    whole = width == step.params[name].numel() and rule.kron_input(step.call, name) is None
    return whole, rule.swaps_channels(name)
