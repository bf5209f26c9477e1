"""The module extension of slicing."""

from bpk.custom_module.slicing import Slicing
from bpk.extensions.secondorder.sqrt_ggn.base import made_for

(SqrtGGNSlicing,) = made_for(__name__, Slicing)
