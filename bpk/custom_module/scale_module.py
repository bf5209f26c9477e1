"""Fixed multiples and fixed summands."""

from bpk.custom_module import generated

ScaleModule = generated("ScaleModule")
Shift = generated("Shift")
