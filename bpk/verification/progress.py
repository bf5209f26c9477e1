"""How far a verification is: first what `bpk` computes, then the references, which take most of the time."""

from __future__ import annotations

import time

from bpk.progress import Line, left, remaining


class Progress(Line):
    """Shows the step, the time left, and what is going on.

    Args:
        quantities: How many of them there are, each with two steps.
        show: Whether to show anything, as for `Line`.
    """

    def __init__(self, quantities: int, show: bool | None) -> None:
        super().__init__(show)
        self.quantities, self.done, self.text = quantities, 0, ""
        self.half = self.begun = self.start

    def step(self, text: str) -> None:
        """One more step begins: `text`."""
        self.begun = time.monotonic()
        if self.done % self.quantities == 0:
            self.half = self.begun
        self.done, self.text = self.done + 1, text
        self.show(*self.parts())

    def detail(self, text: str) -> None:
        """What is going on within the step."""
        self.show(*self.parts(), text)

    def parts(self) -> list[str]:
        """The step and its text; the time left of the references, from those before this one.

        What `bpk` computes in the first half says nothing of how long autograd takes for them.
        """
        parts = [f"step {self.done} of {2 * self.quantities}", self.text]
        compared = self.done - 1 - self.quantities
        if compared > 0:
            rest = remaining(self.begun - self.half, compared, self.quantities)
            parts.insert(1, left(rest - (time.monotonic() - self.begun)))
        return parts
