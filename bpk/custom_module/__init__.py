"""Custom modules: what stands between layers (`x + y`, `x[:, 0]`, `x.permute(0, 2, 1)`) as modules.

All but the container `Parallel` are generated from the rules that serve them (`bpk.jacobians.core.generated`).
"""

from bpk.jacobians.core.generated import HOME, Generated
from bpk.rules import REGISTRY


def generated(name: str) -> type[Generated]:
    """The generated class of this name, from the rule that serves it."""
    for rule in REGISTRY:
        for module in rule.modules:
            if module.__name__ == name and issubclass(module, Generated) and module.__module__.startswith(HOME):
                return module
    raise AttributeError(f"no rule generates a module named {name!r}")
