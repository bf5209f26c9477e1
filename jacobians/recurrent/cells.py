"""The cells of recurrent layers: what happens elementwise at one step, as a table of derivatives.

At each step a cell reads the input part `a = W_ih x + b_ih` and the hidden part `b = W_hh h + b_hh` of its
pre-activations (`G` blocks of `H` numbers each) and what it carries over from the step before. From these it makes
*local variables* `q` `[..., K, H]`; everything else happens inside one hidden unit:

    m, c = output(q)         m is the new hidden state (before a projection), c the new cell state (LSTM)
    dq   = slope * dm        the transposed Jacobian; in an LSTM most variables act through c, with
                             dc = (what the next step sends back) + via * dm

with slopes `[..., K, H]`. Leading axes are free: time, columns, samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp

from bpk.jacobians.core.call import Options
from bpk.jacobians.core.side_by_side import pick

Parts = Sequence[Tensor]


@dataclass
class Slopes:
    """Local derivatives over time: `slope` `[T, N, K, H]` is `d m / d q`.

    In an LSTM it is `d c / d q` for the first four local variables; `via` `[T, N, 1, H]` is `d m / d c`.
    """

    slope: Tensor
    via: Tensor | None = None


def squash(x: Tensor) -> Tensor:
    """`tanh(x) = 2 s(2 x) - 1` without a graph, exact as numbers of size 1 are: torch's tanh takes six times longer."""
    return (2 * x).sigmoid_().mul_(2).sub_(1)


class Cell(ABC):
    """One kind of cell. `gates` is `G`; `inputs` and `hidden` are the local variables that `a` and `b` enter, by gate.

    `carried` is the local variable that comes from the step before untouched by a weight: the cell state (`memory`)
    or the hidden state. `parts` are the numbers of local variables that act alike, `layer` torch's function for layers.
    """

    gates: int
    parts: tuple[int, ...]
    inputs: tuple[int, ...]
    hidden: tuple[int, ...]
    carried: int | None = None
    memory = False
    layer: Callable[..., tuple[Tensor, ...]]

    def __init__(self, options: Options) -> None:
        """With the hyperparameters of a layer, which most kinds do not ask."""

    @abstractmethod
    def assemble(self, a: Tensor, b: Tensor, carry: Tensor) -> Tensor:
        """Local variables from `a`, `b` `[..., G H]` and what is carried over `[..., H]`."""

    def of_input(self, dq: Tensor) -> Tensor:
        """The gradient `[..., G H]` of `a`: with the next two, the adjoint of `assemble`."""
        return pick(dq, self.inputs, -2).flatten(-2)

    def of_hidden(self, dq: Tensor) -> Tensor:
        """The gradient `[..., G H]` of `b`."""
        return pick(dq, self.hidden, -2).flatten(-2)

    def of_carry(self, dq: Tensor) -> Tensor | None:
        """The gradient `[..., H]` of what was carried over."""
        return None if self.carried is None else dq[..., self.carried, :]

    @abstractmethod
    def output(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """The new hidden state, and the new cell state."""

    @abstractmethod
    def slopes(self, q: Tensor) -> Slopes:
        """The local derivatives at `q`."""

    @abstractmethod
    def replay(self, a: Tensor, b: Tensor, before: Tensor, c: Tensor | None) -> tuple[Slopes, Tensor]:
        """Local derivatives, and the hidden states before a projection, where all `b` `[T, N, G H]` are known.

        `before` are the hidden states before each step, `c` is the initial cell state. No graph is built; `a` is
        overwritten.
        """

    def pull(self, slope: Tensor, via: Tensor | None, dm: Tensor, dc: Tensor | None) -> Tensor:
        """`dq` `[V, N, K, H]` at one step, from the gradients `[V, N, 1, H]` of both states."""
        return slope * dm

    def pull_into(self, slope: Parts, via: Tensor | None, dm: Tensor, dc: Tensor | None, dq: Parts) -> None:
        """The same without a graph; `slope` and `dq` come in `parts`."""
        torch.mul(slope[0], dm, out=dq[0])

    def push(self, slope: Tensor, via: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tangents of both states at a step from those of the local variables `[V, N, K, H]`."""
        return (slope * q).sum(-2), None

    def second(self, q: Tensor, dm: Tensor, dc: Tensor | None, tangent: Tensor) -> Tensor:
        """The second derivative (symmetric), contracted with the gradients of both states, times a tangent of `q`."""

        def gradient(at: Tensor) -> Tensor:
            pull = vjp(lambda q: tuple(state for state in self.output(q) if state is not None), at)[1]
            return pull((dm,) if dc is None else (dm, dc))[0]

        return vjp(gradient, q)[1](tangent)[0]


class Elman(Cell):
    """`m = phi(z)` with `z = a + b` and `phi` tanh or ReLU. `q = (z)`."""

    gates, parts = 1, (1,)
    inputs = hidden = (0,)

    def __init__(self, options: Options) -> None:
        self.relu = options.nonlinearity == "relu"
        self.layer = torch.rnn_relu if self.relu else torch.rnn_tanh

    def assemble(self, a: Tensor, b: Tensor, carry: Tensor) -> Tensor:
        return (a + b)[..., None, :]

    def output(self, q: Tensor) -> tuple[Tensor, None]:
        z = q[..., 0, :]
        return (z.relu() if self.relu else z.tanh()), None

    def slopes(self, q: Tensor) -> Slopes:
        return Slopes((q > 0).to(q.dtype) if self.relu else 1 - q.tanh().square())

    def replay(self, a: Tensor, b: Tensor, before: Tensor, c: Tensor | None) -> tuple[Slopes, Tensor]:
        z = a.add_(b)
        m = z.relu_() if self.relu else squash(z)
        slope = (m > 0).to(m.dtype) if self.relu else 1 - m * m
        return Slopes(slope[:, :, None]), m


class Lstm(Cell):
    """`c = s(f) c' + s(i) tanh(g)`, `m = s(o) tanh(c)` with `(i, f, g, o) = a + b`. `q = (c', i, f, g, o)`."""

    gates, parts, carried, memory = 4, (4, 1), 0, True
    inputs = hidden = (1, 2, 3, 4)
    layer = staticmethod(torch.lstm)

    def assemble(self, a: Tensor, b: Tensor, carry: Tensor) -> Tensor:
        gates = (a + b).unflatten(-1, (4, -1))
        return torch.cat([carry[..., None, :], gates], -2)

    def output(self, q: Tensor) -> tuple[Tensor, Tensor]:
        before, i, f, g, o = q.unbind(-2)
        c = f.sigmoid() * before + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def slopes(self, q: Tensor) -> Slopes:
        before, i, f, g, o = q.unbind(-2)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = (f * before + i * g).tanh()
        slope = [f, g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), c * o * (1 - o)]
        return Slopes(torch.stack(slope, -2), (o * (1 - c * c))[..., None, :])

    def replay(self, a: Tensor, b: Tensor, before: Tensor, c: Tensor | None) -> tuple[Slopes, Tensor]:
        assert c is not None
        z = a.add_(b).unflatten(-1, (4, -1))
        g = squash(z[:, :, 2])
        gates = z.sigmoid_()
        i, f, _, o = gates.unbind(2)
        new, cells = i * g, f.new_empty(len(f) + 1, *c.shape)
        cells[0] = c
        steps = zip(cells[:-1].unbind(), cells[1:].unbind(), f.unbind(), new.unbind(), strict=True)
        for at, into, forget, add in steps:
            torch.addcmul(add, forget, at, out=into)
        squashed = squash(cells[1:])
        slope = f.new_empty(*f.shape[:2], 5, f.shape[2])
        slope[:, :, 0] = f
        of_gates = torch.addcmul(gates, gates, gates, value=-1)  # s (1 - s)
        torch.mul(g, of_gates[:, :, 0], out=slope[:, :, 1])
        torch.mul(cells[:-1], of_gates[:, :, 1], out=slope[:, :, 2])
        torch.addcmul(i, new, g, value=-1, out=slope[:, :, 3])
        torch.mul(squashed, of_gates[:, :, 3], out=slope[:, :, 4])
        m = o * squashed
        return Slopes(slope, torch.addcmul(o, m, squashed, value=-1)[:, :, None]), m

    def pull(self, slope: Tensor, via: Tensor | None, dm: Tensor, dc: Tensor | None) -> Tensor:
        assert via is not None
        dc = dm * via if dc is None else dc + dm * via
        return torch.cat([slope[:, :4] * dc, slope[:, 4:] * dm], -2)

    def pull_into(self, slope: Parts, via: Tensor | None, dm: Tensor, dc: Tensor | None, dq: Parts) -> None:
        assert via is not None
        dc = dm * via if dc is None else torch.addcmul(dc, dm, via)
        torch.mul(slope[0], dc, out=dq[0])
        torch.mul(slope[1], dm, out=dq[1])

    def push(self, slope: Tensor, via: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
        assert via is not None
        c = (slope[:, :4] * q[..., :4, :]).sum(-2)
        return via[:, 0] * c + slope[:, 4] * q[..., 4, :], c


class Gru(Cell):
    """`m = n + u (m' - n)`, `n = tanh(a_n + r b_n)`, `r = s(a_r + b_r)`, `u = s(a_u + b_u)`.

    `q = (a_n, r, u, b_n, m')`, where `r` and `u` stand for their pre-activations.
    """

    gates, parts, carried = 3, (5,), 4
    inputs, hidden = (1, 2, 0), (1, 2, 3)
    layer = staticmethod(torch.gru)

    def assemble(self, a: Tensor, b: Tensor, carry: Tensor) -> Tensor:
        a, b = a.unflatten(-1, (3, -1)), b.unflatten(-1, (3, -1))
        return torch.cat([a[..., 2:, :], a[..., :2, :] + b[..., :2, :], b[..., 2:, :], carry[..., None, :]], -2)

    def output(self, q: Tensor) -> tuple[Tensor, None]:
        a, r, u, b, before = q.unbind(-2)
        n = (a + r.sigmoid() * b).tanh()
        return n + u.sigmoid() * (before - n), None

    def slopes(self, q: Tensor) -> Slopes:
        a, r, u, b, before = q.unbind(-2)
        r, u = r.sigmoid(), u.sigmoid()
        n = (a + r * b).tanh()
        inner = (1 - u) * (1 - n * n)
        slope = [inner, inner * b * r * (1 - r), (before - n) * u * (1 - u), inner * r, u]
        return Slopes(torch.stack(slope, -2))

    def replay(self, a: Tensor, b: Tensor, before: Tensor, c: Tensor | None) -> tuple[Slopes, Tensor]:
        a, b = a.unflatten(-1, (3, -1)), b.unflatten(-1, (3, -1))
        gates = torch.add(a[:, :, :2], b[:, :, :2]).sigmoid_()
        r, u = gates.unbind(2)
        new = b[:, :, 2]
        n = squash(torch.addcmul(a[:, :, 2], r, new))
        slope = a.new_empty(*r.shape[:2], 5, r.shape[2])
        of_gates = torch.addcmul(gates, gates, gates, value=-1)  # s (1 - s)
        keep = torch.sub(1, u)
        inner = torch.addcmul(keep, keep * n, n, value=-1)
        slope[:, :, 0] = inner
        torch.mul(inner * new, of_gates[:, :, 0], out=slope[:, :, 1])
        change = before - n
        torch.mul(change, of_gates[:, :, 1], out=slope[:, :, 2])
        torch.mul(inner, r, out=slope[:, :, 3])
        slope[:, :, 4] = u
        return Slopes(slope), torch.addcmul(n, u, change)
