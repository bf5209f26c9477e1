"""Branches: `Parallel` sends one input through several modules, `SumModule` adds what comes out."""

from __future__ import annotations

from typing import Any

from torch import nn

from bpk.custom_module import generated

SumModule = generated("SumModule")


class Parallel(nn.Module):
    """A container like `nn.Sequential`, but for branches: `out = merge_module(branch_1(x), branch_2(x), ...)`.

    Args:
        branches: The modules that all get the same input; they are called `branch.0`, `branch.1`, ...
        merge_module: A module of several inputs that puts the results together. Default: their sum.

    >>> import torch
    >>> block = Parallel(nn.Identity(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> [name for name, _ in block.named_parameters()]
    ['branch.1.0.weight', 'branch.1.0.bias']
    >>> block(torch.ones(3, 2)).shape
    torch.Size([3, 2])
    """

    def __init__(self, *branches: nn.Module, merge_module: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = nn.ModuleList(branches)
        self.merge_module = SumModule() if merge_module is None else merge_module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """All branches at the same input, then the merge module at their results."""
        return self.merge_module(*(branch(*inputs, **kwargs) for branch in self.branch))
