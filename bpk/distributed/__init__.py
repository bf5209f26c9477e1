"""Quantities over the processes of `torch.distributed`."""

from bpk.distributed.fields import all_reduce, gather

__all__ = ["all_reduce", "gather"]
