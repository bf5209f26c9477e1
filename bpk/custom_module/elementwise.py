"""Functions of every entry as modules, one for each rule that names functions only: `Exp`, `Log`, `Sqrt`, ..."""

from bpk.custom_module import generated
from bpk.jacobians.core.generated import Generated


def __getattr__(name: str) -> type[Generated]:
    """Looked up in the registry, so that rules which are registered later are found, too."""
    return generated(name)
