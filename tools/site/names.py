"""The names by which users know functions and layers."""

from __future__ import annotations

import operator
import re
from functools import cache
from typing import Any

import torch
from torch import nn

SPACES = {
    "torch": [torch],
    "torch.nn.functional": [nn.functional],
    "Tensor": torch.Tensor.__mro__[:-1],
    "torch.special": [torch.special],
    "operator": [operator],
}
"""Where functions are looked for, by the prefix of their names."""

ACRONYMS = {
    w.lower(): w for w in ("CG", "CTC", "DDP", "DP", "EWC", "GGN", "KFAC", "PINN", "RNN", "SGD", "ResNet18")
} | {"unet": "U-Net"}
"""Words of file names that are not written in small letters."""


def title(file: str) -> str:
    """The name of a file as a heading.

    >>> title("kfac_training"), title("ctc_loss"), title("char_rnn_converter")
    ('KFAC training', 'CTC loss', 'Char RNN converter')
    >>> title("first_2_pruning")
    'First steps, 2: pruning'
    """
    if step := re.fullmatch(r"first_(\d)_(\w+)", file):
        return f"First steps, {step[1]}: {step[2].replace('_', ' ')}"
    words = [ACRONYMS.get(word, word) for word in file.split("_")]
    return " ".join([words[0][:1].upper() + words[0][1:], *words[1:]])


@cache
def addresses() -> dict[int, list[str]]:
    """By identity: the names of each public function of torch."""
    found: dict[int, list[str]] = {}
    for prefix, spaces in SPACES.items():
        for space in spaces:
            for name, value in vars(space).items():
                if callable(value) and (prefix in ("Tensor", "operator") or not name.startswith("_")):
                    found.setdefault(id(value), []).append(f"{prefix}.{name}")
    return found


def function_name(function: Any) -> str:
    """Such as `torch.relu`; of several names the first one."""
    return addresses().get(id(function), [str(getattr(function, "__name__", function))])[0]


def module_name(module: type[nn.Module]) -> str:
    """Such as `torch.nn.Linear`, or `bpk.custom_module.elementwise.Exp`."""
    home = "torch.nn" if vars(nn).get(module.__name__) is module else module.__module__
    return f"{home}.{module.__name__}"
