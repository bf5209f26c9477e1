"""The module extension of padding."""

from bpk.custom_module.pad import Pad
from bpk.extensions.secondorder.sqrt_ggn.base import made_for

(SqrtGGNPad,) = made_for(__name__, Pad)
