"""Forward in time: tangents of the results of a scan, and of all that lies in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.recurrent.scan import Trace


@dataclass
class Tangent:
    """What one forward recurrence finds out: tangents `[T, V, N, *]` of the input, of the hidden states before each
    step, of the local variables, of the hidden states before and after the projection, and of the last `c`."""

    x: Tensor | None
    before: Tensor
    q: Tensor
    m: Tensor
    y: Tensor
    c: Tensor | None

    def by_role(self) -> dict[str, Tensor]:
        """Tangents of what weights are multiplied with, where there are any."""
        moved = {"weight_ih": self.x, "weight_hh": self.before, "weight_hr": self.m}
        return {role: x for role, x in moved.items() if x is not None}


def push(
    trace: Trace, x: Tensor | None, h: Tensor | None, c: Tensor | None, params: Mapping[str, Tensor], like: Tensor
) -> Tangent:
    """Forward in time, from tangents of the input `[T, V, N, I]`, the initial states and the parameters `[V, *p]`.

    `like` is `[V, N, H]`, for the tangents that are zero.
    """
    own, cell, at = trace.params, trace.cell, trace.slopes
    steps = len(trace.hidden)
    of_input = like.new_zeros(steps, *like.shape[:-1], own["weight_ih"].shape[0])
    of_hidden = torch.zeros_like(of_input)
    if x is not None:
        of_input = of_input + F.linear(x, own["weight_ih"])
    if "weight_ih" in params:
        of_input = of_input + torch.einsum("tni,voi->tvno", trace.x, params["weight_ih"])
    if "bias_ih" in params:
        of_input = of_input + params["bias_ih"][:, None]
    if "weight_hh" in params:
        of_hidden = of_hidden + torch.einsum("tni,voi->tvno", trace.before, params["weight_hh"])
    if "bias_hh" in params:
        of_hidden = of_hidden + params["bias_hh"][:, None]
    h = start = like.new_zeros(*like.shape[:-1], own["weight_hh"].shape[1]) if h is None else h
    c = torch.zeros_like(like) if c is None and cell.memory else c
    local, middle, output = [], [], []
    for t in range(steps):
        b = of_hidden[t] + h @ own["weight_hh"].T
        local.append(cell.assemble(of_input[t], b, h if c is None else c))
        m, c = cell.push(at.slope[t], None if at.via is None else at.via[t], local[-1])
        middle.append(m)
        h = m @ own["weight_hr"].T if trace.projects else m
        if "weight_hr" in params:
            h = h + torch.einsum("nh,vph->vnp", trace.m[t], params["weight_hr"])
        output.append(h)
    y = torch.stack(output)
    return Tangent(x, torch.cat([start[None], y[:-1]]), torch.stack(local), torch.stack(middle), y, c)
