"""Fields of a training step in many processes: from those of each local batch to those of the global one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bpk.distributed.processes import are_several
from bpk.distributed.statistics import Statistics, asked_alike, objects, over_processes, rows_of_all, together
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import OverBatches, Rows, Size
from bpk.fields.local import Local, Noted, known_of, put
from bpk.jacobians.core.errors import runtime_error, value_error


def all_reduce(
    model: nn.Module,
    *extensions: BackpropExtension,
    divisor: float | str | None = None,
    batch_averages: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Turn the fields of each process's batch into those of one large batch that has them all, in place.

    To be called by all processes after a backward pass, as one calls a collective operation; with one process, nothing
    changes. With `d_r` by what the loss of rank `r` divides (samples, entries, or the weights of targets that count),
    and `D = sum_r d_r`, what is proportional to the power `k` of the loss becomes `sum_r (d_r / D)^k value_r`.
    Variances are merged by Chan's formula, Kronecker factors each by itself. Local batches may have any sizes. Fields
    with a row for each sample keep the rows of the local batch, scaled as rows of the global one (see `gather`).

    `.grad` is left alone: `DistributedDataParallel` averages it, which is the gradient of the global batch where the
    local ones are equally large.

    Args:
        model: As it is, or wrapped by `DistributedDataParallel`.
        *extensions: Those of the backward pass whose fields are meant.
        divisor: By what the local loss divides, for losses that do not tell; `"sum"` for those that sum.
        batch_averages: Allow quantities that are no sums over batches (KFRA), as weighted means.
        group: The processes (default: all).

    Raises:
        ValueError: If an extension does not say how its fields add up.
        RuntimeError: If a field was not computed since the group exists, or is that of the global batch already.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> extensions = bpk.extensions.Variance(), bpk.extensions.KFAC()
    >>> with bpk.backpack(*extensions):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> bpk.distributed.all_reduce(model, *extensions)  # in one process, nothing happens
    """
    declared = [rule_of(e, batch_averages) for e in extensions]  # refuses what is none, which has no field
    rules = {e.savefield: rule for e, rule in zip(extensions, declared, strict=True)}
    require_divisor(divisor)
    if not are_several(group):
        return
    params, local = dict(model.named_parameters()), local_of(model, rules)
    sizes = sizes_of(local, divisor, group, rules)
    size, whole = sizes[dist.get_rank(group)], together(sizes)
    mine: Statistics = {}
    for field, by_name in local.items():
        rule = rules[field]
        for name, known in by_name.items():
            assert size is not None
            scaled = rule.scaled(known.adding_up(vars(params[name])[field]), size)
            if isinstance(rule, Rows):
                put(params[name], field, rule.whole(scaled, whole), Local(known.noted, done=True))
            else:
                mine.setdefault(field, {})[name] = scaled
    sums = {field: rule for field, rule in rules.items() if not isinstance(rule, Rows)}
    noted = noted_of(local) or Noted()
    for field, found in over_processes(sums, mine, sizes, next(iter(params.values())).device, group).items():
        for name, total in found.items():
            put(params[name], field, rules[field].whole(total, whole), Local(noted, done=True))


def gather(
    model: nn.Module,
    *extensions: BackpropExtension,
    divisor: float | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give each process the rows of all samples of the global batch, in the order of ranks, in place.

    For extensions with a row for each sample (`BatchGrad`, `BatchL2Grad`, ...), before or after `all_reduce`. Rows are
    those of one large batch: `p.grad_batch.sum(0)` is the gradient of its loss.

    Args:
        model: As it is, or wrapped by `DistributedDataParallel`.
        *extensions: Those of the backward pass whose fields are meant.
        divisor: By what the local loss divides, for losses that do not tell; `"sum"` for those that sum.
        group: The processes (default: all).

    Raises:
        ValueError: If an extension's fields have no rows of samples.
        RuntimeError: If a field was not computed since the group exists, or has been gathered already.

    >>> import torch, bpk
    >>> model = bpk.extend(torch.nn.Linear(4, 3))
    >>> bpk.distributed.gather(model, bpk.extensions.BatchGrad())  # in one process, nothing happens
    """
    rules: dict[str, Rows] = {}
    for extension in extensions:
        rule = rule_of(extension, False)
        if not isinstance(rule, Rows):
            raise value_error(
                f"{extension} has no rows of samples that could be gathered.",
                "its fields are sums over the batch.",
                "call bpk.distributed.all_reduce(model, ...) for it.",
            )
        rules[extension.savefield] = rule
    require_divisor(divisor)
    if not are_several(group):
        return
    params, local = dict(model.named_parameters()), local_of(model, rules, gathers=True)
    sizes = sizes_of(local, divisor, group, rules)
    size, whole = sizes[dist.get_rank(group)], together(sizes)
    mine: dict[Any, Tensor] = {}
    for field, by_name in local.items():
        for name, known in by_name.items():
            rule, rows = rules[field], vars(params[name])[field]
            assert size is not None
            rows = rows if known.done else rule.whole(rule.scaled(known.adding_up(rows), size), whole)
            for number, part in enumerate(rows if isinstance(rows, list) else [rows]):
                mine[field, name, number] = part.movedim(rule.axis, 0)
    count = 0 if size is None else size.samples
    found: dict[Any, list[Tensor]] = rows_of_all(mine, count, next(iter(params.values())).device, group)
    values: dict[tuple[str, str], dict[str, Tensor]] = {}
    for (field, name, number), parts in found.items():
        values.setdefault((field, name), {})[str(number)] = torch.cat(parts).movedim(0, rules[field].axis)
    for (field, name), value in values.items():
        put(params[name], field, rules[field].field(value), None)


def rule_of(
    extension: BackpropExtension,
    batch_averages: bool,
    refused: str = "Fields of {} cannot be put together over processes.",
    do: str = "use another quantity.",
) -> OverBatches:
    """How an extension's fields add up over batches; what is `refused` does not."""
    if not isinstance(extension, BackpropExtension):
        raise value_error(
            f"{extension!r} is no extension.",
            "fields are those of the extensions of a backward pass.",
            "pass what backpack(...) was given: instances, such as KFAC().",
        )
    rule, reason = extension.over_batches, ""
    if extension.has_module_extensions:
        reason = "nothing tells how what a hand-written module extension returns adds up"
    elif not isinstance(rule, OverBatches):
        reason, _, way_out = (rule or f"{type(extension).__name__} does not declare over_batches").partition("\n")
        do = way_out or do
    elif rule.approximates and not batch_averages:
        reason, do = rule.approximates, "use KFLR or KFAC, or batch_averages=True for the batches' weighted mean."
    if reason or not isinstance(rule, OverBatches):
        raise value_error(refused.format(extension), f"{reason.rstrip('.')}.", do)
    return rule


def require_divisor(divisor: float | str | None) -> None:
    """Refuse words other than the one that is known: ranks have the same. Numbers are theirs, and told to all."""
    if isinstance(divisor, str) and divisor != "sum":
        raise value_error(
            f"divisor={divisor!r} is nothing that a loss divides by.",
            "local losses have the weight of what they divide by in the global one.",
            'pass a positive number (that of this rank), or "sum" for a loss that sums.',
        )


def local_of(model: nn.Module, rules: Any, gathers: bool = False) -> dict[str, dict[str, Local]]:
    """By field and parameter: what this process has; refuses fields that are something else."""
    found: dict[str, dict[str, Local]] = {}
    for name, param in model.named_parameters():
        for field in [field for field in rules if field in vars(param)]:
            known = known_of(param, field)
            if known is None or (known.done and not gathers):
                raise runtime_error(
                    f"'{field}' of '{name}' is not that of a local batch.",
                    "it was put together before, or computed by no backward pass since init_process_group(...).",
                    "call all_reduce or gather once after each backward pass, before anything else changes fields.",
                )
            found.setdefault(field, {})[name] = known
    return found


def noted_of(local: dict[str, dict[str, Local]]) -> Noted | None:
    """What the pass has noted that the fields are of."""
    noted = {id(known.noted): known.noted for by_name in local.values() for known in by_name.values()}
    if len(noted) > 1:
        raise runtime_error(
            "The fields are those of several backward passes.",
            "each pass has a batch of its own size.",
            "call it after each backward pass, or once for the extensions of each.",
        )
    return next(iter(noted.values()), None)


def sizes_of(
    local: dict[str, dict[str, Local]],
    divisor: float | str | None,
    group: dist.ProcessGroup | None,
    asked: Iterable[str] = (),
) -> list[Size | None]:
    """How large the batches of all ranks were (`None`: a rank has none of the fields that all are `asked` for)."""
    noted = noted_of(local)
    mine = None if noted is None else noted.told()
    if mine is not None and divisor is not None:
        mine = mine[0], [None if isinstance(divisor, str) else float(divisor)], ""
    told = asked_alike(objects((sorted(asked), mine), group))
    known: Sequence[tuple[int, list[float | None], str]] = [one for one in told if one is not None]
    problem = next((problem for _, divisors, problem in known if problem), "")
    if problem:
        raise ValueError(problem)
    empty = [rank for rank, one in enumerate(told) if one is not None and 0 in one[1]]
    if empty:
        raise value_error(
            f"No target counts on rank {', '.join(map(str, empty))}.",
            "the local loss is a mean over none of them (ignore_index, zero weights): its fields are no numbers.",
            "leave such batches out on all ranks, or use reduction='sum'.",
        )
    if known and not any(divisors for _, divisors, _ in known):
        raise runtime_error(
            "The backward passes have reached no extended loss.",
            "it is not known by what the objective divides, and so not what part of the global batch's it is.",
            'say so by divisor=, the number of this rank, or "sum" where terms are added up; or extend the loss.',
        )
    shares = {tuple(None if d is None else round(d / (ds[0] or 1), 6) for d in ds) for _, ds, _ in known}
    if len(shares) != 1:
        raise runtime_error(
            "There are no fields that could be put together over processes."
            if not known
            else "The losses of the ranks are not weighted alike against each other.",
            "one large batch would have one loss, or weigh several alike.",
            "run loss.backward() within bpk.backpack(...) on all ranks, with the same extended losses.",
        )
    return [None if one is None else Size(one[0], one[1][0]) for one in told]
