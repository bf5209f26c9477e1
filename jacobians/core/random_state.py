"""The state of torch's random generators before a layer drew from them, so that it can draw the same numbers again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The generator of the processor, and those of GPUs by their number."""

    processor: Tensor
    gpus: Mapping[int, Tensor]

    @classmethod
    def now(cls, device: torch.device | None = None) -> RandomState:
        """The present state: of the processor and of a device, or of all that are in use.

        >>> before = RandomState.now(torch.device("cpu"))
        >>> drawn = torch.rand(3)
        >>> with before.again():
        ...     same = torch.equal(torch.rand(3), drawn)
        >>> same
        True
        """
        numbers = range(0)
        if device is None and torch.cuda.is_initialized():
            numbers = range(torch.cuda.device_count())
        elif device is not None and device.type == "cuda":
            number = torch.cuda.current_device() if device.index is None else device.index
            numbers = range(number, number + 1)
        return cls(torch.get_rng_state(), {number: torch.cuda.get_rng_state(number) for number in numbers})

    def moved(self) -> bool:
        """Whether numbers have been drawn since."""
        here = [(self.processor, torch.get_rng_state())]
        here += [(state, torch.cuda.get_rng_state(number)) for number, state in self.gpus.items()]
        return not all(torch.equal(before, now) for before, now in here)

    def restore(self) -> None:
        """Go back to this state."""
        torch.set_rng_state(self.processor)
        for number, state in self.gpus.items():
            torch.cuda.set_rng_state(state, number)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the same numbers are drawn again; afterwards, the generators are where they were."""
        with torch.random.fork_rng(list(self.gpus)):
            self.restore()
            yield
