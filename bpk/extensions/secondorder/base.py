"""Base class of second-order extensions: something beside the gradient travels backwards."""

from __future__ import annotations

from bpk.extensions.backprop_extension import BackpropExtension


class SecondOrderBackpropExtension(BackpropExtension):
    """An extension that starts at an extended, scalar loss and backpropagates more than the gradient."""

    second_order = True
