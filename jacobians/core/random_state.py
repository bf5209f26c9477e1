"""The state of torch's random generators before a layer drew from them, so that it can draw the same numbers again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The generator of the processor, and that of the device where it is another one."""

    device: torch.device
    processor: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The present state.

        >>> before = RandomState.now(torch.device("cpu"))
        >>> drawn = torch.rand(3)
        >>> with before.again():
        ...     same = torch.equal(torch.rand(3), drawn)
        >>> same
        True
        """
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), accelerator)

    def moved(self) -> bool:
        """Whether numbers have been drawn since."""
        if not torch.equal(self.processor, torch.get_rng_state()):
            return True
        here = self.accelerator
        return here is not None and not torch.equal(here, torch.cuda.get_rng_state(self.device))

    def restore(self) -> None:
        """Go back to this state."""
        torch.set_rng_state(self.processor)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the same numbers are drawn again; afterwards, the generators are where they were."""
        with torch.random.fork_rng([self.device] if self.accelerator is not None else []):
            self.restore()
            yield
