"""Adding a rule from outside: one call serves every extension."""

from __future__ import annotations

from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY


def register(rule: Rule) -> Rule:
    """Add a rule; from now on every extension supports the layers that it serves. Returns the rule.

    Raises:
        RuleError: If a layer already has a rule, or `rule` is not one.

    >>> import torch, bpk
    >>> from bpk.jacobians import Elementwise
    >>> class Square(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x * x
    >>> rule = bpk.register(Elementwise("x**2", Square))
    >>> bpk.unregister(rule)
    """
    REGISTRY.add(rule)
    return rule


def unregister(rule: Rule) -> None:
    """Take a rule out again."""
    REGISTRY.remove(rule)


__all__ = ["check_rule", "register", "unregister"]
