"""Columns on their way: what waits at each call, and what has come to parameters."""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bpk.fields.arrived import PIECE, Columns, Use
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.numeric import FEW_NUMBERS
from bpk.jacobians.rule import Rule
from bpk.plan.step import Link, Step
from bpk.plan.stretch import STRETCH
from bpk.sweeps.columns.brought import Brought
from bpk.sweeps.columns.lazy import Chunk
from bpk.sweeps.columns.merging import Merging
from bpk.sweeps.sweep import Player, UsesById


class Travelling(Player, ABC):
    """A sweep whose columns travel, not more of them at a time than memory has room for.

    `started` counts columns, and `rounds` how often some went to the end.
    """

    started, rounds = 0, 0

    def is_too_much(self, count: int) -> bool:
        """Whether so many columns are more than may exist at a time."""
        return self.at_most is not None and count > self.at_most

    @property
    def room_for_one(self) -> int:
        """How many numbers a column may have at all calls together."""
        return PIECE if self.at_most is None else min(PIECE, self.at_most * self.plan.largest)

    @property
    def chunk(self) -> int:
        """How many columns are made at a time: no block may outgrow what memory hands out quickly."""
        piece = max(1, PIECE // self.plan.largest) if self.plan.on_processor else 1 << 62
        return piece if self.at_most is None else max(1, min(piece, self.at_most))


class Run:
    """Columns that pass the calls of a plan together: what waits at each call, and what has come to parameters.

    A single one may be `brought` to all calls at once.
    """

    def __init__(self, sweep: Travelling) -> None:
        self.sweep = sweep
        self.waiting: dict[Step, Columns] = {}
        self.uses: UsesById = {}
        self.count = 0
        self.brought: Brought | None = None

    def start(self, step: Step, key: Hashable, chunk: Chunk, alone: bool = False) -> None:
        """Columns begin at a call; it may be the only one that will, `alone`."""
        mats, signs = chunk
        if signs is not None and not bool((signs != 1).any()):
            signs = None
        if alone and signs is None:
            self.brought = Brought.begin(self.sweep.plan, self.sweep.room_for_one, step, key, mats)
            self.waiting |= {} if self.brought is None else self.brought.columns
        for wrt, mat in mats.items():
            if isinstance(wrt, str):
                own = Columns()
                own.add_to_parameter(wrt, key, mat, signs)
                self.sweep.note(self.uses, step, own, [wrt])
            elif self.brought is None:
                self.send(step.links[wrt], key, mat, signs)
        self.sweep.rounds += not self.count
        count = next(iter(mats.values())).shape[0]
        self.sweep.started += count
        self.count += count

    def resume(self, places: Iterable[Step], key: Hashable, mats: Iterable[Tensor], signs: Tensor) -> None:
        """Columns go on from where they have waited."""
        for at, mat in zip(places, mats, strict=True):
            self.waiting.setdefault(at, Columns()).add(key, mat, signs)
        self.sweep.rounds += not self.count
        self.count += len(signs)

    def merge(self, step: Step, merging: Merging) -> None:
        """Make fewer columns of those under way, before `step`, where that pays."""
        found = merging.merge(self.waiting, self.uses, step)
        if found is None:
            return
        self.count, self.waiting = 0, {at: Columns() for at in self.waiting}
        for mine in self.uses.values():
            mine[:] = [replace(mine[0], arrived=Columns())]
        for number, (mats, signs) in enumerate(found.columns(self.sweep.chunk)):
            key = ("merged", self.sweep.plan.key, step.number, number)
            self.count += len(signs)
            for columns, mat in zip(self.waiting.values(), mats, strict=False):
                columns.add(key, mat, signs)
            for (use,), mat in zip(self.uses.values(), mats[len(self.waiting) :], strict=True):
                use.arrived.add_to_parameter(use.name, key, mat, signs)

    def visit(self, step: Step, last: bool = True) -> None:
        """Let the columns that wait at a call pass it, block by block.

        If no others begin at this call (these are the `last`), its parameters are settled first: then each block can be
        freed when it has passed, and columns of two calls never exist at the same time.
        """
        names = None if self.brought is None else self.look_inside(step, self.brought)
        columns = self.waiting.pop(step, None)
        if columns is None:
            return
        step.reached = True
        for key, mat in columns.blocks.items():
            if mat.dtype is not step.call.output.dtype:
                columns.blocks[key] = step.cast(mat)
        sweep = self.sweep
        if sweep.module_extensions is not None and sweep.module_extensions.serves(step):
            self.apply_module_extension(step, columns)
            return
        rule, view = step.seen(sweep.samples)
        going = columns
        if step.params:  # which keep the blocks until they are settled
            going = Columns(dict(columns.blocks), signs=columns.signs, unshared=columns.unshared)
        if rule.inputs_first:
            self.send_on(step, view, rule, going)
        if step.params:
            sweep.note(self.uses, step, columns, names)
            if last:
                sweep.settle_last(self.uses, step)
        del columns
        if not rule.inputs_first:
            self.send_on(step, view, rule, going)

    def look_inside(self, step: Step, brought: Brought) -> Sequence[str] | None:
        """Note what autograd has brought to products inside of a call; returns the parameters left (`None`: all)."""
        step.reached = True
        for product, columns in brought.inside.get(step, ()):
            for own, name in product.names.items():
                self.sweep.note_use(self.uses, step, name, Use(product.call, product.rule, own, columns))
        return brought.left.get(step)

    def send_on(self, step: Step, view: Call, rule: Rule, columns: Columns) -> None:
        """Send columns to the inputs of a call, by its rule; a block is let go of when it has passed."""
        only = len(step.links) == 1
        for key in list(columns.blocks) if step.links and self.brought is None else ():
            mat, signs = columns.blocks.pop(key), columns.signs[key]
            if rule is STRETCH:  # all inputs at once
                others = self.beside(step, key) if step.beside else ()
                for index, part in STRETCH.jac_t_mat_prods(view, mat, *others).items():
                    self.send(step.links[index], key, part, signs)
                continue
            large = mat.numel() > FEW_NUMBERS  # of small blocks, new memory takes less time than that of old ones
            free = large and only and key in columns.unshared and not step.params
            flat = mat.view(-1) if free and mat.is_contiguous() else None
            mat = mat if flat is None else flat.view(mat.shape)  # the strides of axes with one entry may be any
            for index, link in step.links.items():
                view.spares = None if flat is None else [flat]
                sent = rule.jac_t_mat_prod(view, mat, index)
                view.spares = None
                new = free or (large and only and sent.untyped_storage() is not mat.untyped_storage())
                self.send(link, key, sent, signs, new)

    def beside(self, step: Step, key: Hashable) -> list[tuple[Call, Tensor]]:
        """Take what waits under the same key at stretches beside one, which goes the same way."""
        found: list[tuple[Call, Tensor]] = []
        for other in step.beside:
            waits = self.waiting.get(other)
            if waits is not None and key in waits.blocks:
                found.append((other.view(self.sweep.samples), other.cast(waits.blocks.pop(key))))
                other.reached = True
                if not waits.blocks:
                    del self.waiting[other]
        return found

    def apply_module_extension(self, step: Step, columns: Columns) -> None:
        """Let a user's module extension do it."""
        assert self.sweep.module_extensions is not None
        sizes, inputs = [len(mat) for mat in columns.blocks.values()], step.view(self.sweep.samples).inputs
        shapes = {index: (sum(sizes), *inputs[index].shape) for index in step.links}
        mats = self.sweep.module_extensions.pass_tensors(step, torch.cat(list(columns.blocks.values())), shapes)
        for index, link in step.links.items():
            for key, mat in zip(columns.blocks, mats[index].split(sizes), strict=True):
                self.send(link, key, mat, columns.signs[key])

    def send(self, link: Link, key: Hashable, mat: Tensor, signs: Tensor | None, unshared: bool = False) -> None:
        """Hand columns at an input to the call that feeds it; `unshared`: nobody else looks at their memory."""
        waiting = self.waiting.setdefault(link.producer, Columns())
        waiting.add(key, link.back(mat), signs)
        if unshared and link.entrance is None:
            waiting.unshared.add(key)
        else:
            waiting.unshared.discard(key)
