"""The batches of a loader: moved to a device, looked at before anything is computed, and counted."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import type_error, value_error
from bpk.jacobians.core.nested import held_by, is_instance, mapped, tensors_in

StepOf = Callable[[nn.Module, nn.Module, Any], Tensor]
"""`step(model, loss_fn, batch)` gives the loss of a batch."""


def loss_of_pair(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch `(x, y)`."""
    x, y = batch
    return loss_fn(model(x), y)


def require_pair(number: int, batch: Any) -> None:
    """Refuse a batch that is no pair, where nobody says what to make of it."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise value_error(
            f"Batch {number} of the loader is {form_of(batch)}, and no pair (x, y).",
            "accumulate(...) computes loss_fn(model(x), y) unless it is told what to compute.",
            "pass step=lambda model, loss_fn, batch: loss_fn(model(batch['x']), batch['y']), or what your batch "
            "needs; a single batch as [(x, y)].",
        )


def length_of(loader: Any) -> int | None:
    """How many batches a loader announces."""
    try:
        return len(loader)
    except TypeError:
        return None


class Batches:
    """The batches of a loader with their numbers from 0; all must be built alike, and as many as announced.

    `number` gives the numbers of those that a process takes (default: all), which may be none where it `may_be_empty`.
    """

    def __init__(
        self, loader: Any, number: Callable[[int], int] = lambda count: count, may_be_empty: bool = False
    ) -> None:
        self.number, self.may_be_empty = number, may_be_empty
        self.announced, self.count, self.form = length_of(loader), 0, ""
        try:
            self.batches = iter(loader)
        except TypeError as error:
            if hasattr(type(loader), "__iter__"):
                raise  # its own error
            raise type_error(
                f"accumulate(...) got {type(loader).__name__} as loader, which cannot be iterated over.",
                "it gives the batches.",
                "pass a DataLoader, or a list of batches; a single one as [(x, y)].",
            ) from error

    def skipped(self, count: int) -> Iterator[Any]:
        """So many batches with which nothing is computed."""
        for _ in range(count):
            batch = self.following()
            if batch is None:
                raise self.ended(f"the checkpoint was written after {count}.")
            yield batch[0]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while (batch := self.following()) is not None:
            yield self.number(self.count - 1), batch[0]
        if not self.count and not self.may_be_empty:
            raise self.ended("there is nothing to add up.")
        if self.announced is not None and self.count < self.announced:
            raise self.ended("it announces more by its length: what was added up is not the whole data set.")

    def following(self) -> tuple[Any] | None:
        """The next batch, if there is one."""
        try:
            batch = next(self.batches)
        except StopIteration:
            return None
        except Exception as error:
            note(error, self.number(self.count))
            raise
        if self.count == self.announced:
            raise value_error(
                f"The loader goes on with batch {self.number(self.count)}, where it should have ended.",
                f"it announces {self.announced} by its length: one of both is wrong, and samples may come twice "
                "(workers of an IterableDataset that do not share it).",
                "correct the length (or the workers), or pass (batch for batch in loader), which has none.",
            )
        here = form_of(batch)
        self.form = self.form or here
        if here != self.form:
            raise value_error(
                f"Batch {self.number(self.count)} of the loader is built differently from batch {self.number(0)}.",
                f"that one was {self.form}, and this one is {here}.",
                "let dataset and collate_fn give all batches the same structure and types.",
            )
        self.count += 1
        return (batch,)

    def ended(self, why: str) -> ValueError:
        """The refusal of a loader that has too little."""
        announced = "" if self.announced is None else f" of {self.announced}"
        return value_error(
            f"The loader ended after {self.count} batches{announced}.",
            why,
            "look into its dataset and sampler; a generator that was used before is at its end.",
        )


def nothing() -> ValueError:
    """The refusal of a data set without batches, in many processes."""
    return value_error("The loader gave no batch to any rank.", "there is nothing to add up.", "look into its dataset.")


def note(error: Exception, number: int) -> None:
    """Let an error that is somebody else's say at which batch it was."""
    if sys.version_info >= (3, 11):
        error.add_note(f"This was batch {number} of the loader (numbers count from 0).")


def form_of(batch: Any) -> str:
    """How a batch is built, in words: sizes do not count, nor does how long a list of equals is."""
    if isinstance(batch, Tensor):
        return tensor_in_words(batch.dtype, batch.dim())
    if isinstance(batch, (tuple, list)):
        parts = [form_of(part) for part in batch]
        return f"[{parts[0]}, ...]" if isinstance(batch, list) and len(set(parts)) == 1 else f"({', '.join(parts)})"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {form_of(value)}" for key, value in sorted(batch.items(), key=str)) + "}"
    return type(batch).__name__


@cache
def tensor_in_words(dtype: torch.dtype, axes: int) -> str:
    """How tensors of a batch are described, which is asked of every batch."""
    return f"{str(dtype).removeprefix('torch.')} tensor of {axes} axes"


def rows_of(batch: Any) -> int | None:
    """How many rows the first tensor of a batch has (`None`: there is none, or it has no axes)."""
    first = next(iter(tensors_in(batch)), None)
    return None if first is None or not first.dim() else len(first)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    if isinstance(batch, Tensor):  # a copy to the processor that is under way would be read as it is
        return batch.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(batch, "to", None)):  # packed sequences, encodings, graphs: they know what of them moves
        own = mapped(batch, lambda part: part) if isinstance(batch, MutableMapping) else batch
        return own.to(device)  # encodings move themselves: those of a list would all stay on the device
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [moved(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # a named tuple, or others
    if is_instance(batch):
        there = copy.copy(batch)
        for name, part in held_by(batch).items():
            object.__setattr__(there, name, moved(part, device))  # a frozen one, too
        return there
    return batch
