"""The module extension of slicing."""

from __future__ import annotations

from bpk.custom_module.slicing import Slicing
from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNSlicing(SqrtGGNBaseModule):
    """For `Slicing`."""

    layer = Slicing
