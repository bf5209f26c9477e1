"""Models sharded by FSDP2 (`fully_shard`): fields are computed on whole parameters, and kept as these are: in shards.

In a forward pass, each module of FSDP2 holds whole parameters, which is what records see. Their memory is given back
behind it, so it is asked for again before anything is computed at the loss, and FSDP2 gives it back as its own backward
pass comes by. When that has ended, what adds up is reduce-scattered to shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from bpk.distributed.fields import rule_of, sizes_of
from bpk.distributed.statistics import Statistics, objects, over_processes, together
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import Parts, Rows, Size
from bpk.fields.local import SLOT, Local
from bpk.jacobians.core.errors import runtime_error
from bpk.plan.parts import in_precision_of
from bpk.recording.context.surroundings import is_managed, is_sharded, may_shard
from bpk.recording.membership import around
from bpk.recording.record import LIVE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Sharded:
    """The parameters of sharded modules in one backward pass: where each one is held, and the whole one."""

    def __init__(self, modules: list[nn.Module], extensions: tuple[BackpropExtension, ...]) -> None:
        self.extensions = extensions
        self.rules = {e.savefield: rule_of(e, batch_averages=False) for e in extensions}
        for module in modules:
            module.unshard()  # type: ignore[operator]
        inside = {id(part): part for module in modules for part in module.modules()}
        self.whole = [
            (part, name, param)
            for part in inside.values()
            for name, param in part._parameters.items()
            if param is not None and param.requires_grad
        ]

    def known(self) -> dict[str, tuple[Any, Tensor]]:
        """Shards, without fields of earlier passes, and whole parameters, once FSDP2 has ended its pass.

        They are under names that all processes have.
        """
        known: dict[str, tuple[Any, Tensor]] = {}
        for number, (module, name, whole) in enumerate(self.whole):
            shard = module._parameters[name]
            if shard is whole:
                raise runtime_error(
                    f"Parameter '{name}' of {type(module).__name__} is still whole after the backward pass.",
                    "fields belong to shards, which are back when FSDP2 reshards: it was told not to.",
                    "leave out set_reshard_after_backward(False).",
                )
            known.setdefault(f"{number:06}", (shard, whole))
            for field in self.rules:
                vars(shard).pop(field, None)
        return known

    def finish(self) -> None:
        """FSDP2 has ended its pass: move fields from whole parameters to shards."""
        known, local = self.known(), dict[str, dict[str, Local]]()
        for name, (_, full) in known.items():
            for field in self.rules.keys() & vars(full).keys():
                local.setdefault(field, {})[name] = vars(full)[SLOT][field]
        sizes = sizes_of(local, None, None, self.rules)
        size, every, mine = sizes[dist.get_rank()], together(sizes), dict[str, dict[str, Any]]()
        for field, rule in self.rules.items():
            for name, one in local.get(field, {}).items():
                shard, full = known[name]
                assert size is not None
                value = vars(full).pop(field)
                scaled = rule.scaled(one.adding_up(value), size)
                if isinstance(rule, Rows):
                    rows = rule.whole(scaled, every)
                    vars(shard)[field] = rows if isinstance(rows, list) else in_precision_of(shard, rows)
                else:
                    mine.setdefault(field, {})[name] = scaled
        for _, full in known.values():
            vars(full).pop(SLOT, None)
        for field, shard, parts in self.summed(known, mine, sizes):
            found = self.rules[field].whole(parts, every)
            vars(shard)[field] = found if isinstance(found, list) else in_precision_of(shard, found)

    def add_up(self, size: Size | None) -> Size:
        """The same where fields hold what adds up over batches: shards get the totals of all processes' batches.

        `size` is that of the own batch (`None`: it does not count). Returns the size of all batches. Rows stay those
        of the own batch.
        """
        sizes = objects(size, None)
        known, mine = self.known(), dict[str, dict[str, Any]]()
        for name, (shard, full) in known.items():
            for field, rule in self.rules.items():
                if (value := vars(full).pop(field, None)) is None:
                    continue
                parts = value if isinstance(value, dict) else {"": value}
                if isinstance(rule, Rows):
                    vars(shard)[field] = value
                elif size is not None:
                    mine.setdefault(field, {})[name] = rule.scaled(parts, size)
        for field, shard, parts in self.summed(known, mine, sizes):
            vars(shard)[field] = {part: x if is_sharded(x) else cut(x, shard) for part, x in parts.items()}
        return together(sizes)

    def summed(
        self, known: dict[str, tuple[Any, Tensor]], mine: Statistics, sizes: Sequence[Size | None]
    ) -> Iterator[tuple[str, Any, Parts]]:
        """Fields, shards of parameters, and totals of all processes, in shards."""
        sums = {field: rule for field, rule in self.rules.items() if not isinstance(rule, Rows)}
        device = next(iter(known.values()))[1].device
        totals = over_processes(sums, mine, sizes, device, shard=lambda place, x: shard_of(x, known[place[1]][0]))
        for field, by_name in totals.items():
            for name, parts in by_name.items():
                yield field, known[name][0], parts

    def on_whole(self, field: str) -> list[Any]:
        """A field of all parameters, while it is on whole ones."""
        return [vars(whole)[field] for _, _, whole in self.whole if field in vars(whole)]


def unshard(extensions: tuple[BackpropExtension, ...]) -> Sharded | None:
    """Make the parameters of sharded modules whole that recorded calls use, before anything is computed with them."""
    if not may_shard() or not extensions:
        return None
    records = [record for ref in LIVE.copy() if (record := ref()) is not None and record.open]
    layers = {id(record.module): record.module for record in records}
    modules = sharded_in_order([*layers.values(), *around(layers.values())[0]])
    if not modules:
        return None
    return Sharded(modules, extensions)


def sharded_in_order(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that FSDP2 shards, in an order that all processes have."""
    found = {id(module): module for module in modules if is_managed(module)}
    outermost = [m for m in found.values() if not any(m is not o and m in list(o.modules()) for o in found.values())]
    outermost.sort(key=lambda module: [name for name, _ in module.named_parameters()])
    every = {id(part): part for module in outermost for part in module.modules()}
    return [part for key, part in every.items() if key in found]


def shard_of(x: Tensor, like: DTensor) -> DTensor:
    """The sum of a tensor over processes, in shards: as its parameter is, or by rows."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    as_param = x.shape == like.shape
    rows = [Replicate() if placement.is_replicate() else Shard(0) for placement in like.placements]
    partial = DTensor.from_local(x, like.device_mesh, [Partial()] * len(rows), run_check=False)
    return partial.redistribute(placements=list(like.placements) if as_param else rows)


def cut(x: Tensor, like: DTensor) -> Tensor:
    """A tensor that all processes have whole, in shards as its parameter is (other shapes stay whole)."""
    from torch.distributed.tensor import DTensor, Replicate

    if x.shape != like.shape or x.is_sparse:
        return x
    whole = DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=list(like.placements))
