"""Rows of a loss that calls of a model have returned one behind another, several for each sample (words)."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.plan.graph import Source
from bpk.plan.samples.decoding import DIGITS, decode, numbered, owners_of, with_digits
from bpk.plan.samples.given import calls_of_models
from bpk.plan.samples.probing import at_input, tolerance_of
from bpk.plan.sources import Sources
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.nodes import signed
from bpk.recording.record import Record


def rows_of_parts(root: Record, sources: Sources) -> tuple[int, Tensor] | None:
    """A hypothesis: the samples are those of all calls together, and the sample `[R]` of every row of the root.

    A batch was given in parts, `torch.cat([model(x).flatten(0, 1) for x in parts])`, or as a list. The rows of the root
    are numbered, and looked for in what the same layer has returned each time: each must be a sample's of one call,
    and those of a call lie together. Where they alternate (frames `[N, K]`), calls see the same samples.
    """
    source = sources[root].get(0)
    if not root.is_loss or source is None or source.stretch is None or root.axis(0):
        return None
    last = [record for record, _ in source.targets]
    sizes = [record.batch_size for record in last]
    n = sum(sizes)
    if len(last) < 2 or n >= root.batch_size or len({id(record.module) for record in last}) > 1:
        return None
    if any(record.shifted for record in last) or not (are_calls(last) or are_of_list(last)):
        return None
    if max(sizes) == 1 and not are_behind_another(source):
        return None
    numbers = numbers_at(root, source, tolerance_of((root, *last)))
    if numbers is None or len(numbers) != len(last):
        return None
    rows = [each[each >= 0].unique() for each in numbers]
    if any(not len(each) or int(each[-1] - each[0]) + 1 != len(each) for each in rows):
        return None
    first, owners = 0, list[Tensor]()
    by_rows = sorted(range(len(last)), key=lambda k: int(rows[k][0]))
    for k in by_rows:
        own = torch.arange(first, first + sizes[k], device=numbers[k].device)
        owners.append(own[:, None].expand(sizes[k], numbers[k].numel() // sizes[k]).flatten())
        first += sizes[k]
    found = owners_of(torch.cat([numbers[k] for k in by_rows]), torch.cat(owners), root.batch_size)
    return None if found is None else (n, found)


def are_calls(last: list[Record]) -> bool:
    """Whether each of these layers is in another call of a model, and sees as many samples as that was given."""
    alike = all(record.given and record.given[0][:1] == (record.batch_size,) for record in last)
    return alike and len(calls_of_models(last)) == len(last)


def are_of_list(last: list[Record]) -> bool:
    """Whether a model was given a list, maybe before labels, of which these calls of a layer see a tensor each.

    It is `[T, ...]`, of one sample, or `[N, T, ...]`; the layer still sees as many steps.
    """
    given, count = last[0].given, len(last)
    if len({id(record.given) for record in last}) > 1 or len(given) < count:
        return False
    seen = sorted((record.batch_size, *record.output.shape[1:2]) for record in last)
    return seen in (
        sorted((1, *shape[:1]) for shape in given[:count]),
        sorted(tuple(shape[:2]) for shape in given[:count]),
    )


def are_behind_another(source: Source) -> bool:
    """Whether functions join tensors along their first axis alone: others have the steps of one sample."""
    joins = [node for node in source.nodes if name_of(type(node)) == "Cat"]
    return bool(joins) and not any(
        signed(engine.saved(node, "dim")) % len(engine.output_shapes(node)[0]) for node in joins
    )


def numbers_at(root: Record, source: Source, tolerance: float) -> list[Tensor] | None:
    """By target: for each entry of what it has returned, the row of the root that it feeds (-1: none).

    `None`: an entry feeds several.
    """
    found: dict[int, Tensor] = {}
    for place, weights in numbered(root.batch_size, root.inputs[0].device):
        for k, mat in source.pull(at_input(root, 0, weights)).items():
            part = decode(mat.flatten(1)[..., None], 1 << DIGITS, tolerance, in_order=False)
            if part is None:
                return None
            found[k] = with_digits(found.get(k), part, place)
    return [found[k] for k in sorted(found)]
