"""What `extend(model, use_converter=True)` does: convert, or go on with the model as it is."""

from __future__ import annotations

from torch import nn

from bpk.converter.convert import convert_module_to_backpack
from bpk.converter.converted import Converted
from bpk.converter.failure import ConversionError
from bpk.jacobians.core.errors import explain, warn


def convert_if_possible(module: nn.Module, debug: bool = False) -> nn.Module:
    """The model as a graph of modules; where that cannot be, the model itself, with a warning that names the line."""
    if isinstance(module, Converted):
        return module
    try:
        return convert_module_to_backpack(module, debug)
    except ConversionError as error:
        message = explain(
            f"{type(module).__name__} is extended without the converter: {error.where or 'its forward pass'} "
            f"{error.reason}.",
            error.why,
            "nothing, unless you need the graph: quantities are computed all the same, and what lies between layers "
            "goes through autograd. Write bpk.extend(model) to silence this warning.",
        )
        warn(message)
        return module
