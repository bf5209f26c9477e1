"""The API reference: which names of which modules, in which order; the texts are their docstrings."""

from __future__ import annotations

import bpk
from bpk import jacobians

FIRST = (
    "extend",
    "backpack",
    "disable",
    "fields_of",
    "Fields",
    "support",
    "support_matrix",
    "verify",
    "cost",
    "Cost",
    "accumulate",
    "Accumulated",
    "Summed",
    "ntk",
    "eigenpairs",
    "predictive_covariance",
    "projected_gradients",
    "taylor",
    "laplacian",
    "input_hessian_diag",
    "register",
    "unregister",
    "check_rule",
)
"""The functions of `bpk`, in the order in which they are needed."""
LAST = ("memory_cleanup", "convert_module_to_backpack", "install_as_backpack")
ELSEWHERE = ("Autodiff", "CTX", "Rule", "context", "distributed", "extensions", "operators", "plot", "preconditioners")
"""Names of `bpk` that other pages describe."""

SAME_NAME = {"bpk.support": f"{bpk.support.__module__}.{bpk.support.__name__}"}
"""Functions that bear the names of their modules."""

PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bpk": ("The package `bpk`.", tuple(f"bpk.{name}" for name in (*FIRST, *LAST))),
    "extensions": (
        "What extensions have in common. Each is described on a page of its own: [quantities](../quantities/index.md).",
        (
            "bpk.extensions.backprop_extension",
            "bpk.extensions.definition",
            "bpk.extensions.module_extension",
            "bpk.extensions.firstorder.base",
            "bpk.extensions.secondorder.base",
        ),
    ),
    "rules": (
        "Families of rules, for layers of your own: [guide](../custom_layer.md).",
        tuple(f"bpk.jacobians.{name}" for name in jacobians.__all__),
    ),
    "context": ("What lies behind `bpk.backpack`: the contexts.", ("bpk.context", "bpk.recording.state.Context")),
    "support": (
        "The answers of `bpk.support` and `bpk.support_matrix`.",
        ("bpk.support.table", "bpk.plan.support.Support"),
    ),
    "custom_module": (
        "Modules for graphs written by hand.",
        ("bpk.custom_module.branching", "bpk.custom_module.permute", "bpk.custom_module.slicing"),
    ),
    "operators": (
        "Matrices of a data set to multiply with: [guide](../operators.md).",
        tuple(f"bpk.operators.{name}" for name in bpk.operators.__all__),
    ),
    "preconditioners": (
        "What changes gradients between the backward pass and the optimizer: [guide](../preconditioners.md).",
        tuple(f"bpk.preconditioners.{name}" for name in bpk.preconditioners.__all__),
    ),
    "distributed": (
        "Fields of many processes: [guide](../cluster.md).",
        tuple(f"bpk.distributed.{name}" for name in bpk.distributed.__all__),
    ),
    "kernels": (
        "Posteriors for `bpk.predictive_covariance`, and what `bpk.eigenpairs` returns: [guide](../kernels.md).",
        ("bpk.kernels.Diagonal", "bpk.kernels.Kronecker", "bpk.kernels.LowRank", "bpk.kernels.Eigenpairs"),
    ),
    "hessianfree": (
        "Products with the full Hessian, GGN and Jacobians, by plain autograd.",
        ("bpk.hessianfree.hvp", "bpk.hessianfree.ggnvp", "bpk.hessianfree.rop", "bpk.hessianfree.lop"),
    ),
    "utils": (
        "Helpers.",
        tuple(
            f"bpk.utils.{name}"
            for name in ("kroneckers", "ekfac", "damped", "subsampling", "convert_parameters", "examples")
        ),
    ),
}


def pages() -> dict[str, str]:
    """One page for each group of names."""
    return {f"reference/{name}.md": page(name, *content) for name, content in PAGES.items()}


def page(name: str, intro: str, members: tuple[str, ...]) -> str:
    """Directives that mkdocstrings replaces by docstrings."""
    return "\n\n".join([f"# {name}", intro, *map(directive, members)]) + "\n"


def directive(member: str) -> str:
    """What mkdocstrings replaces; a function that bears the name of its module is named by both, and shown by one."""
    if member not in SAME_NAME:
        return f"::: {member}"
    label = member.rpartition(".")[2]
    return f"::: {SAME_NAME[member]}\n    options:\n      heading: {member}\n      toc_label: {label}"
