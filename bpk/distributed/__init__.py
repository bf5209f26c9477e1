"""Quantities over the processes of `torch.distributed`."""
