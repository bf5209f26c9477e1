"""Statistics of fields over processes, as extensions declare that they add up over batches; and rows of samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bpk.distributed.sums import Addend, add_up
from bpk.extensions.over_batches import OverBatches, Parts, Size
from bpk.fields.eigenbasis import Orders
from bpk.jacobians.core.errors import runtime_error, value_error
from bpk.utils.sparse_factors import sparse_diagonal

Key = TypeVar("Key", str, tuple[str, int])

Statistics = dict[str, dict[str, Parts]]
"""By field and parameter: what adds up over batches."""

Place = tuple[str, str, str]
"""Field, parameter, part."""


@dataclass(frozen=True)
class Form:
    """What a part looks like; of a sparse matrix, which must be diagonal everywhere, its diagonal travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    diagonal: bool

    def zeros(self, device: torch.device) -> Tensor:
        """What a process adds that has nothing."""
        return torch.zeros(self.shape[:1] if self.diagonal else self.shape, dtype=self.dtype, device=device)


def objects(thing: object, group: dist.ProcessGroup | None) -> list[Any]:
    """What each process has got, by rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, thing, group)
    return found


def asked_alike(told: Sequence[tuple[list[str], Any]]) -> list[Any]:
    """What ranks say beside the fields that they want; refuses ranks that want others: some would wait for ever."""
    first = told[0][0]
    for rank, (fields, _) in enumerate(told):
        if fields != first:
            raise runtime_error(
                f"Rank {rank} asks for the fields {', '.join(fields) or 'none'}, and rank 0 for "
                f"{', '.join(first) or 'none'}.",
                "fields are put together of those of all ranks.",
                "give all ranks the same extensions.",
            )
    return [said for _, said in told]


def share_orders(orders: Orders, params: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give all processes the orders of entries that some of them have noted: not each has used every parameter."""
    noted = objects({name for name, param in params.items() if orders.get(param) is not None}, group)
    for name, param in params.items():
        known = [name in names for names in noted]
        if any(known) and not all(known):
            order = orders.get(param)
            if order is None:
                order = orders[param] = torch.empty(param.numel(), dtype=torch.long, device=param.device)
            dist.broadcast(order, group=group, group_src=known.index(True))


def places(statistics: Mapping[str, Mapping[str, Parts]]) -> Iterator[tuple[Place, Tensor]]:
    """All tensors."""
    for field, by_name in statistics.items():
        for name, parts in by_name.items():
            for part, x in parts.items():
                yield (field, name, part), x


def form_of(x: Tensor) -> Form:
    """See `Form`."""
    diagonal = x.is_sparse and all(bool((i == torch.arange(len(x), device=x.device)).all()) for i in x.indices())
    return Form(tuple(x.shape), x.dtype, diagonal)


def common_forms(mine: Statistics, group: dist.ProcessGroup | None) -> dict[Place, Form]:
    """The parts that any process has, in one order for all."""
    forms: dict[Place, Form] = {}
    for rank, known in enumerate(objects({place: form_of(x) for place, x in places(mine)}, group)):
        for place, form in known.items():
            before = forms.setdefault(place, form)
            if before != form:
                raise runtime_error(
                    f"'{place[0]}' of '{place[1]}' is {list(form.shape)} in {form.dtype} on rank {rank}, and "
                    f"{list(before.shape)} in {before.dtype} on a rank before it.",
                    "what differs in form cannot be added up.",
                    "give all ranks the same model and extensions, and inputs of the same kind.",
                )
    return dict(sorted(forms.items(), key=lambda known: known[0][:2]))


def owners_of(forms: Mapping[Place, Form], world: int) -> dict[str, int]:
    """By parameter: the process that gets its sums, so that all get about as much."""
    sizes: dict[str, int] = {}
    for (_, name, _), form in forms.items():
        sizes[name] = sizes.get(name, 0) + form.zeros(torch.device("meta")).numel()
    return shared_out(sizes, world)


def shared_out(costs: Mapping[Key, int], world: int) -> dict[Key, int]:
    """Who takes what, so that all have about as much; the costliest first."""
    load, owners = [0] * world, dict[Key, int]()
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        owners[key] = load.index(min(load))
        load[owners[key]] += costs[key]
    return owners


def over_processes(
    rules: Mapping[str, OverBatches],
    mine: Statistics,
    sizes: Sequence[Size | None],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    by_owner: bool = False,
    shard: Callable[[Place, Tensor], Tensor] | None = None,
) -> Statistics:
    """The statistics of all processes together: on each of them, or each parameter's `by_owner` only.

    `sizes` are those of the processes' shares (`None`: nothing). Totals are of the summed loss, and may be overwritten.
    Where `shard` is given, it forms the sums.
    """
    forms, rank = common_forms(mine, group), dist.get_rank(group)
    whole, size = together(sizes), sizes[rank]
    for rule in rules.values():
        rule.require(*(s for s in sizes if s is not None))
    owners = owners_of(forms, len(sizes)) if by_owner else {}
    known = dict(places(mine))
    held = {place: held_of(known.get(place), form, device) for place, form in forms.items()}
    fields: dict[tuple[str, str], dict[str, Tensor]] = {}
    for (field, name, part), x in held.items():
        fields.setdefault((field, name), {})[part] = x
    leading = {key: parts[lead] for key, parts in fields.items() if (lead := rules[key[0]].leading) is not None}
    own = {key: x.clone() for key, x in leading.items()}
    add_up([Addend(x) for x in leading.values()], group)
    rest = list[Addend]()
    for (field, name), parts in fields.items():
        rule = rules[field]
        if rule.leading is not None and size is not None:
            mean = parts[rule.leading] / whole.samples
            parts.update(rule.about({**parts, rule.leading: own[field, name]}, size, mean))
            parts[rule.leading] = leading[field, name]
        for part, x in [*parts.items()]:
            place = (field, name, part)
            if part != rule.leading and shard is not None and not forms[place].diagonal:
                parts[part] = shard(place, x)
            elif part != rule.leading:
                rest.append(Addend(x, rule.symmetric and x.dim() == 2 and len(x) == x.shape[1], owners.get(name)))
    add_up(rest, group)
    found: Statistics = {}
    for (field, name), parts in fields.items():
        if not by_owner or owners[name] == rank:
            found.setdefault(field, {})[name] = {
                part: sparse_diagonal(x) if forms[field, name, part].diagonal else x for part, x in parts.items()
            }
    return found


def held_of(x: Tensor | None, form: Form, device: torch.device) -> Tensor:
    """A part in memory that sums may overwrite; zeros where this process has none."""
    if x is None:
        return form.zeros(device)
    if form.diagonal:
        return x.coalesce().values()
    return x.to_dense() if x.is_sparse else x.contiguous()


def together(sizes: Sequence[Size | None]) -> Size:
    """The size of all shares."""
    return reduce(Size.__add__, [size for size in sizes if size is not None])


# ---- rows of samples ------------------------------------------------------------------------------
def rows_of_all(
    mine: Mapping[Hashable, Tensor], count: int, device: torch.device, group: dist.ProcessGroup | None
) -> dict[Hashable, list[Tensor]]:
    """The rows of each process, by rank; zeros for one of `count` samples that has no rows under a key."""
    here = {key: (tuple(rows.shape[1:]), rows.dtype, len(rows)) for key, rows in mine.items()}
    told = objects((count, here), group)
    everywhere = {key: form for _, known in told for key, form in known.items()}
    for key, (shape, _, _) in ((key, form) for _, known in told for key, form in known.items()):
        if shape != everywhere[key][0]:
            raise other_rows(str(key), shape, everywhere[key][0])
    found: dict[Hashable, list[Tensor]] = {}
    for key in sorted(everywhere, key=str):
        shape, dtype, _ = everywhere[key]
        lengths = [known[key][2] if key in known else samples for samples, known in told]
        parts = [torch.zeros(n, *shape, dtype=dtype, device=device) for n in lengths]
        if key in mine:
            parts[dist.get_rank(group)] = mine[key].contiguous()
        works = [dist.broadcast(x, group_src=r, group=group, async_op=True) for r, x in enumerate(parts)]
        for work in works:
            assert work is not None
            work.wait()
        found[key] = parts
    return found


def other_rows(what: str, here: Sequence[int], there: Sequence[int]) -> ValueError:
    """Why rows of samples cannot be put together: those of one batch have another shape."""
    return value_error(
        f"{what} has rows {list(here)} in one batch and {list(there)} in another.",
        "rows of all samples go into one array; those of tokens are as many as a batch's longest sample has.",
        "give all batches sequences of one length (with ignored targets at the end), or take rows batch by batch: "
        "callback=function(batch_index, fields).",
    )
