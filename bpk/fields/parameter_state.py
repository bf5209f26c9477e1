"""A parameter during one backward pass."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from bpk.fields.arrived import Use
from bpk.fields.statistics import Uses


class ParameterState:
    """A parameter during one backward pass: its uses by observer, known values, and what is to come.

    `parts` has, by field, what adds up over processes where that is not the field itself.
    """

    awaited_gradients = 0
    awaited_uses = 0

    def __init__(self, param: Tensor, keeps_parts: bool = False) -> None:
        self.param = param
        self.modules: list[nn.Module] = []
        self.uses: dict[Hashable, Uses] = {}
        self.values: dict[int, Any] = {}
        self.pending: dict[Hashable, tuple[list[Use], int]] = {}
        self.gradients: list[Tensor] = []
        self.done: set[int] = set()
        self.parts: dict[str, dict[str, Tensor]] | None = {} if keeps_parts else None
