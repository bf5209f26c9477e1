"""Pieces of a tensor."""

from bpk.custom_module import generated

Chunk = generated("Chunk")
Split = generated("Split")
Unbind = generated("Unbind")
