"""Padding of the last axes."""

from bpk.custom_module import generated

Pad = generated("Pad")
