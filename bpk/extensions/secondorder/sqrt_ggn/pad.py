"""The module extension of padding."""

from __future__ import annotations

from bpk.custom_module.pad import Pad
from bpk.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNPad(SqrtGGNBaseModule):
    """For `Pad`."""

    layer = Pad
