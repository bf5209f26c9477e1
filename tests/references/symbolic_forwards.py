"""Forwards of layers on arrays of sympy expressions: written from the definitions, with loops, for tiny cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy

Array = Any
Inputs = Sequence[Array]
Params = Mapping[str, Array]


def linear(options: Any, inputs: Inputs, params: Params) -> Array:
    """`out_o = sum_i W_oi x_i + b_o` on the last axis."""
    return inputs[0] @ params["weight"].T + params.get("bias", 0)


def bilinear(options: Any, inputs: Inputs, params: Params) -> Array:
    """`out_o = sum_ij x_i W_oij y_j + b_o`."""
    x, y = inputs
    return np.einsum("ni,oij,nj->no", x, params["weight"], y) + params.get("bias", 0)


def convolution(options: Any, inputs: Inputs, params: Params) -> Array:
    """`out[n, o, t] = b_o + sum_{i, k} W[o, i, k] x[n, i, stride t + dilation k - padding]` within groups."""
    weight, bias = params["weight"], params.get("bias")
    padding = options.padding if not isinstance(options.padding, str) else (0,) * len(options.kernel_size)
    modes = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}
    x = _padded(inputs[0], [(p, p) for p in padding], modes[options.padding_mode])
    reach = [d * (k - 1) + 1 for d, k in zip(options.dilation, options.kernel_size, strict=True)]
    size = [(s - r) // t + 1 for s, r, t in zip(x.shape[2:], reach, options.stride, strict=True)]
    per_group = options.out_channels // options.groups
    out = np.zeros((x.shape[0], options.out_channels, *size), dtype=object)
    for n, o, *t in np.ndindex(*out.shape):
        first = (o // per_group) * weight.shape[1]
        for i, *k in np.ndindex(*weight.shape[1:]):
            at = [s * a + d * b for s, a, d, b in zip(options.stride, t, options.dilation, k, strict=True)]
            out[(n, o, *t)] += weight[(o, i, *k)] * x[(n, first + i, *at)]
        out[(n, o, *t)] += 0 if bias is None else bias[o]
    return out


def transposed_convolution(options: Any, inputs: Inputs, params: Params) -> Array:
    """Every input entry adds `W[i, o, k] x[n, i, t]` at `stride t + dilation k - padding`."""
    x, weight, bias = inputs[0], params["weight"], params.get("bias")
    axes = zip(
        x.shape[2:], options.stride, options.padding, options.dilation, options.kernel_size, options.output_padding,
        strict=True,
    )  # fmt: skip
    size = [(t - 1) * s - 2 * p + d * (k - 1) + e + 1 for t, s, p, d, k, e in axes]
    out = np.zeros((x.shape[0], options.out_channels, *size), dtype=object)
    rows, columns = weight.shape[0] // options.groups, weight.shape[1]
    for n, i, *t in np.ndindex(*x.shape):
        for o, *k in np.ndindex(*weight.shape[1:]):
            parts = zip(t, k, options.stride, options.dilation, options.padding, strict=True)
            at = [s * a + d * b - p for a, b, s, d, p in parts]
            if all(0 <= a < length for a, length in zip(at, size, strict=True)):
                out[(n, (i // rows) * columns + o, *at)] += weight[(i, o, *k)] * x[(n, i, *t)]
    if bias is not None:
        out = out + bias.reshape(1, -1, *(1,) * len(size))
    return out


def average_pool(options: Any, inputs: Inputs, params: Params) -> Array:
    """The mean over windows of a 2d pooling; `divisor_override`, `count_include_pad` as in torch (no `ceil_mode`)."""
    kernel, stride, pad = (_pair(v) for v in (options.kernel_size, options.stride, options.padding))
    x = _padded(inputs[0], [(p, p) for p in pad], "constant")
    inside = _padded(np.ones_like(inputs[0]), [(p, p) for p in pad], "constant")
    size = [(length - k) // s + 1 for length, k, s in zip(x.shape[2:], kernel, stride, strict=True)]
    out = np.zeros((*x.shape[:2], *size), dtype=object)
    for n, c, a, b in np.ndindex(*out.shape):
        starts = zip((a, b), stride, kernel, strict=True)
        window = (n, c, *(slice(i * s, i * s + k) for i, s, k in starts))
        count = kernel[0] * kernel[1] if options.count_include_pad else inside[window].sum()
        out[n, c, a, b] = x[window].sum() / sympy.Integer(options.divisor_override or count)
    return out


def adaptive_average_pool(options: Any, inputs: Inputs, params: Params) -> Array:
    """The mean over `[floor(i L / S), ceil((i + 1) L / S))` along every axis."""
    x, size = inputs[0], _pair(options.output_size)
    out = np.zeros((*x.shape[:2], *size), dtype=object)
    for n, c, *i in np.ndindex(*out.shape):
        axes = zip(i, x.shape[2:], size, strict=True)
        window = x[(n, c, *(slice(a * length // s, -((-(a + 1) * length) // s)) for a, length, s in axes))]
        out[(n, c, *i)] = window.sum() / sympy.Integer(window.size)
    return out


def padding(options: Any, inputs: Inputs, params: Params) -> Array:
    """The four modes, with torch's order (last axis first)."""
    name = type(options).__name__
    modes = {"Reflection": "reflect", "Replication": "edge", "Circular": "wrap"}
    mode = modes.get(name[: name.index("Pad")], "constant")
    flat = options.padding
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)][::-1]
    value = sympy.Float(options.value) if name.startswith("Constant") else 0
    return _padded(inputs[0], pairs, mode, value)


def softmax(options: Any, inputs: Inputs, params: Params) -> Array:
    """`exp(x_i) / sum_j exp(x_j)` along `dim`."""
    e = _exp(inputs[0])
    return e / e.sum(options.dim, keepdims=True)


def softmin(options: Any, inputs: Inputs, params: Params) -> Array:
    """The softmax of `-x`."""
    return softmax(options, [-inputs[0]], params)


def log_softmax(options: Any, inputs: Inputs, params: Params) -> Array:
    """`x_i - log sum_j exp(x_j)` along `dim`."""
    return inputs[0] - _log(_exp(inputs[0]).sum(options.dim, keepdims=True))


def glu(options: Any, inputs: Inputs, params: Params) -> Array:
    """`a * sigmoid(b)` for the two halves along `dim`."""
    a, b = np.split(inputs[0], 2, axis=options.dim)
    return a / (1 + _exp(-b))


def prelu(options: Any, inputs: Inputs, params: Params) -> Array:
    """`x` where positive, `weight x` elsewhere; one weight, or one for every channel."""
    x, weight = inputs[0], params["weight"]
    slopes = weight.reshape(1, -1, *(1,) * (x.ndim - 2))
    out = np.empty(x.shape, dtype=object)
    for index, slope in zip(np.ndindex(*x.shape), np.broadcast_to(slopes, x.shape).flat, strict=True):
        out[index] = sympy.Piecewise((x[index], x[index] > 0), (slope * x[index], True))
    return out


def square_error(options: Any, inputs: Inputs, params: Params) -> Array:
    """`sum (x - t)^2`, divided by the number of entries for the mean."""
    total = ((inputs[0] - inputs[1]) ** 2).sum()
    return total / inputs[0].size if options.reduction == "mean" else total


def binary_cross_entropy(options: Any, inputs: Inputs, params: Params) -> Array:
    """`-w (p t log s(x) + (1 - t) log s(-x))` with the sigmoid `s`."""
    x, t = inputs
    weight = 1 if options.weight is None else options.weight.cpu().numpy()
    positive = 1 if options.pos_weight is None else options.pos_weight.cpu().numpy()
    total = (weight * (positive * t * _log(1 + _exp(-x)) + (1 - t) * _log(1 + _exp(x)))).sum()
    return total / x.size if options.reduction == "mean" else total


def cross_entropy(options: Any, inputs: Inputs, params: Params) -> Array:
    """`-sum w_y log softmax(x)_y`, smoothed; the mean divides by the summed `w_y` of targets that count."""
    x, target = inputs
    classes, smoothing = x.shape[1], options.label_smoothing
    weight = np.ones(classes) if options.weight is None else options.weight.cpu().numpy()
    log_p = x - _log(_exp(x).sum(1, keepdims=True))
    total, divisor = sympy.Integer(0), 0.0
    for n, *d in np.ndindex(*target.shape):
        y = target[(n, *d)]
        if y == options.ignore_index:
            continue
        divisor += float(weight[y])
        for c in range(classes):
            share = (1 - smoothing) * float(c == y) + smoothing / classes
            total -= share * float(weight[c]) * log_p[(n, c, *d)]
    return total / divisor if options.reduction == "mean" else total


def _padded(x: Array, pairs: Sequence[tuple[int, int]], mode: str, value: Any = 0) -> Array:
    """Pad (or, where negative, crop) the trailing axes."""
    grown = [(0, 0)] * (x.ndim - len(pairs)) + [(max(a, 0), max(b, 0)) for a, b in pairs]
    out = np.pad(x, grown, mode="constant", constant_values=value) if mode == "constant" else np.pad(x, grown, mode)
    crop = [slice(None)] * (x.ndim - len(pairs)) + [slice(max(-a, 0), -max(-b, 0) or None) for a, b in pairs]
    return out[tuple(crop)]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _exp(x: Array) -> Array:
    return np.vectorize(sympy.exp, otypes=[object])(x)


def _log(x: Array) -> Array:
    return np.vectorize(sympy.log, otypes=[object])(x)


def recurrent_step(options: Any, inputs: Inputs, params: Params) -> Array:
    """One step of an Elman, GRU or LSTM cell: the new hidden state."""
    x, h = inputs[:2]
    a = x @ params["weight_ih"].T + params.get("bias_ih", 0)
    b = h @ params["weight_hh"].T + params.get("bias_hh", 0)
    tanh, logistic = np.vectorize(sympy.tanh, otypes=[object]), np.vectorize(_logistic, otypes=[object])
    kind = type(options).__name__
    if "LSTM" in kind:
        i, f, g, o = np.split(a + b, 4, axis=1)
        return logistic(o) * tanh(logistic(f) * inputs[2] + logistic(i) * tanh(g))
    if "GRU" in kind:
        (ar, au, an), (br, bu, bn) = np.split(a, 3, axis=1), np.split(b, 3, axis=1)
        update = logistic(au + bu)
        return (1 - update) * tanh(an + logistic(ar + br) * bn) + update * h
    return tanh(a + b)


def _logistic(x: Any) -> Any:
    return 1 / (1 + sympy.exp(-x))
