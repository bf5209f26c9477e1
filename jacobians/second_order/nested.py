"""Taylor coefficients of any function, with nothing declared: derivatives along the curve, one inside the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import factorial

import torch
from torch import Tensor
from torch.func import jvp, vmap

from bpk.jacobians.core.series import Series, Term, add
from bpk.jacobians.second_order.fused import Composed

Function = Callable[..., tuple[Tensor, ...]]
"""From the values of all arguments to the results."""

Derivatives = tuple[tuple[Tensor, ...], ...]
"""Some derivatives of every result."""


def coefficients(function: Function, given: Sequence[Series], affine: bool) -> list[list[Term]]:
    """Those of each result; of a function that is `affine` in all its arguments together, or of any.

    Without a graph, too, by formulas that torch takes where it makes one: that of `logit` has further derivatives then.
    """
    derive = pushed if affine else nested
    try:
        return derive(function, given)
    except RuntimeError:
        if torch.is_grad_enabled():
            raise
        with torch.enable_grad():
            found = derive(function, given)
        return [[None if c is None else c.detach() for c in terms] for terms in found]


def nested(function: Function, given: Sequence[Series]) -> list[list[Term]]:
    """The coefficients `c_1 ... c_K` of each result of a function, given those of its arguments.

    `f(x(t))` is differentiated `K` times in `t` by forward mode, for all curves at once: `2^K` evaluations in place of
    the `K^2 / 2` of closed formulas.
    """
    order, collapse = given[0].order, given[0].collapse
    separate = order if collapse is None else order - 1  # coefficients that are known curve by curve
    places = [(i, k) for i, s in enumerate(given) for k in range(separate) if s.terms[k] is not None]
    found: list[list[Term]] = []
    if places:
        curves = [c for i, k in places if (c := given[i].terms[k]) is not None]
        with Composed(order):
            derivatives = by_column(lambda *columns: along(function, given, places, columns, order), curves)
        for result in zip(*derivatives, strict=True):
            found.append([d / factorial(k) for k, d in enumerate(result, start=1)])
    if collapse is None:
        return found
    last = [s.terms[-1] for s in given]
    pushed = push(function, given, last)
    if not found:
        return [[*[None] * (order - 1), p] for p in pushed]
    tops = [None if terms[-1] is None else collapse.of(terms[-1]) for terms in found]
    return [[*terms[:-1], add(top, p)] for terms, top, p in zip(found, tops, pushed or [None] * len(tops), strict=True)]


def along(
    function: Function,
    given: Sequence[Series],
    places: Sequence[tuple[int, int]],
    columns: Sequence[Tensor],
    order: int,
) -> Derivatives:
    """The derivatives `1 ... K` at `t = 0` of every result along one curve."""

    def path(t: Tensor) -> Derivatives:
        point = [s.value for s in given]
        for (i, k), c in zip(places, columns, strict=True):
            power = t
            for _ in range(k):
                power = power * t
            point[i] = point[i] + power * c
        return (function(*point),)

    steps: Callable[[Tensor], Derivatives] = path
    for _ in range(order):
        steps = with_derivative(steps)
    x = given[places[0][0]].value
    zero = torch.zeros((), dtype=x.real.dtype, device=x.device)
    return steps(zero)[1:]


def with_derivative(steps: Callable[[Tensor], Derivatives]) -> Callable[[Tensor], Derivatives]:
    """From `(f, f', ..., f^(k))` to `(f, f', ..., f^(k+1))`."""

    def longer(t: Tensor) -> Derivatives:
        values, slopes = jvp(steps, (t,), (torch.ones_like(t),))  # type: ignore[misc]  # without aux, two
        return (*values, slopes[-1])

    return longer


def pushed(function: Function, given: Sequence[Series]) -> list[list[Term]]:
    """The same for a function that is affine in all these arguments together: `c_k -> J c_k`."""
    columns = [push(function, given, [s.terms[k] for s in given]) for k in range(given[0].order)]
    count = max(len(results) for results in columns)
    return [[results[n] if results else None for results in columns] for n in range(count)]


def again(function: Function, given: Sequence[Series]) -> tuple[Tensor, ...]:
    """The results at the point, evaluated as for a column: a function that draws random numbers may give others."""
    column = next(c for s in given for c in s.terms if c is not None)
    values = [s.value for s in given]

    def at_zero(c: Tensor) -> Derivatives:
        return (function(*(x + 0 * c.sum() for x in values)),)

    return tuple(x[0] for x in by_column(at_zero, [column])[0])


def push(function: Function, given: Sequence[Series], tangents: Sequence[Term]) -> list[Term]:
    """`J u` for tangents `[V, N, *x]`; nothing where there are none."""
    moving = [i for i, t in enumerate(tangents) if t is not None]
    if not moving:
        return []

    def of_moving(*values: Tensor) -> tuple[Tensor, ...]:
        point = [s.value for s in given]
        for i, x in zip(moving, values, strict=True):
            point[i] = x
        return function(*point)

    values = tuple(written_out(given[i].value) for i in moving)
    columns = [t for t in tangents if t is not None]
    return list(by_column(lambda *ts: (jvp(of_moving, values, ts)[1],), columns)[0])


def written_out(x: Tensor) -> Tensor:
    """With memory for each entry: torch may write a tangent into memory that is laid out like the value's."""
    return x.clone() if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)) else x


def by_column(function: Callable[..., Derivatives], columns: Sequence[Tensor]) -> Derivatives:
    """A function of one column each, for all of them: at once, or one after the other where torch cannot batch it."""
    with Composed():
        try:
            return vmap(function, randomness="same")(*columns)
        except NotImplementedError:
            raise
        except RuntimeError:
            each = [function(*one) for one in zip(*columns, strict=True)]
        return tuple(tuple(torch.stack(xs) for xs in zip(*parts, strict=True)) for parts in zip(*each, strict=True))
