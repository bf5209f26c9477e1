"""The converter under BackPACK's path: `BackpackTracer`, `convert_module_to_backpack`."""

from bpk.converter import BackpackTracer, ConversionError, ConversionReport, convert_module_to_backpack

__all__ = ["BackpackTracer", "ConversionError", "ConversionReport", "convert_module_to_backpack"]
