"""Import torchvision beside a build of torch that came without torchvision's compiled operators."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a library's definitions last as long as the object


def import_torchvision() -> ModuleType:
    """Return torchvision; where its binary operators do not load, declare the two that its import asks for.

    Data sets and models work; the operators themselves (box suppression) stay without an implementation.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _declared.append(library)
        return importlib.import_module("torchvision")
