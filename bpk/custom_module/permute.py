"""Other orders of axes."""

from bpk.custom_module import generated

Permute = generated("Permute")
MoveDim = generated("MoveDim")
