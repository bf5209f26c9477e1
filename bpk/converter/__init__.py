"""The converter: a model's forward pass as a graph of modules."""

from bpk.converter.convert import convert_if_possible, convert_module_to_backpack
from bpk.converter.converted import ConversionReport, Converted
from bpk.converter.failure import ConversionError
from bpk.converter.tracing import BackpackTracer

__all__ = [
    "BackpackTracer",
    "ConversionError",
    "ConversionReport",
    "Converted",
    "convert_if_possible",
    "convert_module_to_backpack",
]
