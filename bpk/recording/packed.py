"""Packed sequences (`torch.nn.utils.rnn.pack_padded_sequence`): whose their rows are.

They have a row for each step of each sequence, the first step of all of them first, and the longest sequence in front.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def owners_of_rows(output: Any) -> dict[int, Tensor]:
    """By `id` of the data of packed sequences that a layer has returned: the sequence of each row.

    >>> from torch.nn.utils.rnn import pack_sequence
    >>> packed = pack_sequence([torch.zeros(1), torch.zeros(3)], enforce_sorted=False)
    >>> owners_of_rows((packed, None))[id(packed.data)]
    tensor([1, 0, 1, 1])
    """
    parts = output if isinstance(output, tuple) and not isinstance(output, PackedSequence) else (output,)
    found = dict[int, Tensor]()
    for packed in parts:
        if isinstance(packed, PackedSequence):
            steps = packed.batch_sizes.tolist()
            order = packed.sorted_indices
            order = torch.arange(steps[0], device=packed.data.device) if order is None else order
            found[id(packed.data)] = torch.cat([order[:count] for count in steps])
    return found
