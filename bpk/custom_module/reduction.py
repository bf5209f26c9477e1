"""Sums and means over axes, repetition, rotation, masks."""

from bpk.custom_module import generated

Mean = generated("Mean")
Sum = generated("Sum")
Cumsum = generated("Cumsum")
Roll = generated("Roll")
Flip = generated("Flip")
Expand = generated("Expand")
Repeat = generated("Repeat")
RepeatInterleave = generated("RepeatInterleave")
MaskedFill = generated("MaskedFill")
