"""Models sharded by FSDP2 over the processes of a run: all pass batches at the same time, and add up in shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from bpk.dataset.adding_up import Progress, skip_passed
from bpk.dataset.batches import Batches, nothing
from bpk.dataset.keeper import Keeper
from bpk.dataset.run import OneBatch, Runner, all_finite, not_finite
from bpk.dataset.totals import GRADIENT
from bpk.distributed.processes import Processes, are_there, lost
from bpk.distributed.sharded import Sharded
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.over_batches import Parts, Sums
from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import value_error
from bpk.recording.context.surroundings import is_managed, is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Total(GradientExtension):
    """The gradient: FSDP2 itself takes the mean over ranks, whose batches need not be equally large."""

    field = "accumulated_gradient"
    needs_gradient = True
    over_batches = Sums()

    def value(self, uses: Uses) -> Tensor:
        return uses.summed()


def in_shards(model: nn.Module) -> bool:
    """Whether a model is sharded, all of it over all processes; it is put back into shards. Refuses what is neither."""
    managed: list[FSDPModule] = [module for module in model.modules() if is_managed(module)]  # type: ignore[misc]
    for module in managed:
        module.reshard()  # a forward pass leaves the outermost one whole
    params = {name: p for name, p in model.named_parameters() if p.requires_grad} if managed else {}
    whole = next((name for name, p in params.items() if not is_sharded(p)), None)
    world = dist.get_world_size() if are_there() else 1
    meshes = {str(p.device_mesh): p.device_mesh.size() for p in params.values() if is_sharded(p)}  # type: ignore[attr-defined]
    other = next((mesh for mesh, size in meshes.items() if size != world), None)
    why = do = ""
    if whole is not None:
        why = f"parameter '{whole}' is not: each rank would have a total of its own batches."
        do = "call fully_shard(model) on the whole of it, without ignored_params=, or freeze that parameter."
    elif other is not None:
        why = f"its parameters are on {other}, and the data are dealt out to all {world} ranks."
        do = "shard it over a mesh of all ranks, and of nothing else (tensor parallelism is not supported)."
    if why:
        raise value_error("bpk.accumulate(...) cannot add up with this model, sharded by fully_shard.", why, do)
    return bool(managed)


class ShardedRunner(Runner):
    """Runs a batch of each process at the same time. `counts` says whether the own one does; `size` is that of all."""

    takes_empty = False  # what is wrong with a loss must be known before all pass it

    def begin(self, processes: Processes) -> None:
        """Let passes end as those of all processes do."""
        self.processes, self.context.add_up = processes, self.add_up

    def run_one(self, number: int, batch: Any, counts: bool) -> OneBatch:
        """One round."""
        self.number, self.batch, self.counts = number, batch, counts
        try:
            return self.run(number, batch)
        except RuntimeError as error:
            if (isinstance(error, dist.DistError) or "gloo" in str(error)) and (gone := self.processes.gone()):
                raise RuntimeError(lost(self.processes.rank, ", ".join(map(str, gone)))) from error
            raise

    def checked(self, number: int, loss: Any) -> float:
        """Whatever is wrong is known to all before any of them waits for the others' gradients."""
        with self.processes.agreeing(ValueError):
            return super().checked(number, loss)

    def add_up(self, sharded: Sharded) -> None:
        """FSDP2 has ended its pass."""
        with self.processes.agreeing(ValueError, RuntimeError):
            size = self.size_of(self.number, self.batch)
            if not all_finite(sharded.on_whole(Total.field)):
                raise not_finite(self.number, "a gradient that is not finite")
        self.size = sharded.add_up(size if self.counts else None)

    def taken(self, number: int) -> dict[str, dict[str, Parts]]:
        """Totals of the round in shards, and the own rows."""
        found: dict[str, dict[str, Parts]] = {}
        for extension in self.context.extensions:
            field = extension.savefield
            known = {name: vars(p).pop(field) for name, p in self.params.items() if field in vars(p)}
            found[GRADIENT if isinstance(extension, Total) else field] = {
                name: x if isinstance(x, dict) else {"": x} for name, x in known.items()
            }
        return found


def add_up_in_rounds(batches: Batches, keeper: Keeper, runner: ShardedRunner, show: bool | None) -> None:
    """Pass over the batches of all processes, from where an earlier run was."""
    totals, sink = keeper.totals, keeper.sink
    if not keeper.done:
        skip_passed(batches, keeper)
        progress = Progress(batches.announced, totals.batches, show)
        for number, batch, counts in rounds(batches, runner):
            if counts:
                keeper.look(batch)
            one = runner.run_one(number, batch, counts)
            if counts:
                if sink.rules:
                    sink.add(number, one.fields, one.size)
                totals.batches, totals.loss = totals.batches + 1, totals.loss + one.loss * one.size.weight(1)
            totals.merge(one.fields, runner.size)
            progress.step(runner.size.samples)
            keeper.added()
        with runner.processes.agreeing(ValueError):
            totals.require_finite()
        if totals.size is not None:
            keeper.write(done=True)
        progress.close()
    told = runner.processes.tell((totals.batches, totals.loss))
    if totals.size is None:
        raise nothing()
    totals.batches, totals.loss = sum(n for n, _ in told), sum(loss for _, loss in told)


def rounds(batches: Iterable[tuple[int, Any]], runner: ShardedRunner) -> Iterator[tuple[int, Any, bool]]:
    """Number and batch, and whether it counts: as long as any process has one, all of them pass something."""
    own, processes = iter(batches), runner.processes
    while True:
        with processes.agreeing(Exception):
            mine = next(own, None)
            if mine is not None:
                runner.look(*mine)
        having = [rank for rank, has in enumerate(processes.tell(mine is not None)) if has]
        if not having:
            return
        lent = mine
        if len(having) < processes.world:
            offers = processes.tell(mine if processes.rank == having[0] else None)
            lent = mine or offers[having[0]]
        assert lent is not None
        yield *lent, mine is not None
