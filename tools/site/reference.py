"""The API reference: which names of which modules, in which order; the texts are their docstrings."""

from __future__ import annotations

import sys

import bpk

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

KRONECKERS = (
    "kfac_mat_prod",
    "inv_kfac_mat_prod",
    "apply_kfac_mat_prod",
    "apply_inv_kfac_mat_prod",
    "inv_kfacs",
    "kfacs_to_mat",
    "two_kfacs_to_mat",
)
EIGENBASES = ("Eigenbasis", "ekfac_mat_prod", "inv_ekfac_mat_prod", "ekfac_to_mat", "kfacs_to_ekfac")
EXAMPLES = ("load_one_batch_mnist", "autograd_diag_ggn_exact", "autograd_diag_hessian")

FAMILIES = (
    "Elementwise",
    "Multilinear",
    "Contraction",
    "LinearMap",
    "Selection",
    "Affine",
    "Chain",
    "Sum",
    "Concat",
    "SeveralOutputs",
    "Autodiff",
    "PointwiseLoss",
    "AutodiffLoss",
    "Loss",
)
"""What a rule is made with: what they take is shown, and their methods, which are those of `Rule`, are not."""
AROUND = ("check_rule", "case", "Example", "Rule", "Call", "Residual", "submodule", "same")
LAST_OF_RULES = ("Registry", "RuleError", "UnsupportedLayer")

MEMBERS: dict[str, tuple[str, ...]] = {
    "bpk.backpack": (),
    "bpk.disable": (),
    **{f"bpk.jacobians.{name}": () for name in (*FAMILIES, "Example", "Registry")},
    "bpk.recording.context.state.Context": ("get_active_exts", "get_extension_hook", "get_debug", "get_retain_graph"),
}
"""Of classes of which not all public methods are for users: those that are."""

TITLES = {"bpk": "bpk", "rules": "bpk.jacobians"}
"""Headings of pages, if not `bpk.` and the name."""

PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bpk": ("The package `bpk`.", tuple(f"bpk.{name}" for name in (*FIRST, *LAST))),
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
    "plot": (
        "Pictures of a model's quantities, with matplotlib: [guide](../plot.md).",
        tuple(f"bpk.plot.{name}" for name in bpk.plot.__all__),
    ),
    "utils": (
        "To calculate with fields: [Kronecker factors](../recurrent_and_attention.md), [eigenbases](../ekfac.md).",
        (
            *(f"bpk.utils.kroneckers.{name}" for name in KRONECKERS),
            *(f"bpk.utils.ekfac.{name}" for name in EIGENBASES),
            "bpk.utils.damped.DampedInverse",
            "bpk.utils.subsampling.subsample",
            "bpk.utils.convert_parameters.vector_to_parameter_list",
            "bpk.utils.convert_parameters.parameter_list_to_vector",
            *(f"bpk.utils.examples.{name}" for name in EXAMPLES),
        ),
    ),
    "hessianfree": (
        "Products with the full Hessian, GGN and Jacobians, by plain autograd.",
        (
            "bpk.hessianfree.hvp.hessian_vector_product",
            "bpk.hessianfree.ggnvp.ggn_vector_product",
            "bpk.hessianfree.ggnvp.ggn_vector_product_from_plist",
            "bpk.hessianfree.rop.jacobian_vector_product",
            "bpk.hessianfree.rop.R_op",
            "bpk.hessianfree.lop.transposed_jacobian_vector_product",
            "bpk.hessianfree.lop.L_op",
        ),
    ),
    "support": (
        "The answers of `bpk.support` and `bpk.support_matrix`.",
        ("bpk.support.table.SupportTable", "bpk.support.table.Cell", "bpk.plan.support.Support"),
    ),
    "rules": (
        "Families of rules, for layers of your own: [guide](../custom_layer.md).",
        tuple(f"bpk.jacobians.{name}" for name in (*FAMILIES, *AROUND, *LAST_OF_RULES)),
    ),
    "extensions": (
        "What extensions have in common, for quantities of your own. Each is described on a page of its own: "
        "[quantities](../quantities/index.md).",
        (
            "bpk.extensions.firstorder.base.GradientExtension",
            "bpk.extensions.secondorder.base.SquareRootExtension",
            "bpk.extensions.secondorder.base.SampledRootExtension",
            "bpk.extensions.definition.Form",
            "bpk.extensions.definition.PlainAutograd",
            "bpk.extensions.backprop_extension.BackpropExtension",
            "bpk.extensions.firstorder.base.FirstOrderBackpropExtension",
            "bpk.extensions.firstorder.base.FirstOrderModuleExtension",
            "bpk.extensions.secondorder.base.SecondOrderBackpropExtension",
            "bpk.extensions.module_extension.ModuleExtension",
        ),
    ),
    "custom_module": (
        "Modules for graphs written by hand.",
        ("bpk.custom_module.branching", "bpk.custom_module.permute", "bpk.custom_module.slicing"),
    ),
    "context": (
        "What an extension hook of BackPACK asks for the settings of the context it is called in: `bpk.CTX`.",
        ("bpk.recording.context.state.Context",),
    ),
}


def pages() -> dict[str, str]:
    """One page for each group of names."""
    return {f"reference/{name}.md": page(name, *content) for name, content in PAGES.items()}


def page(name: str, intro: str, members: tuple[str, ...]) -> str:
    """Directives that mkdocstrings replaces by docstrings."""
    return "\n\n".join([f"# {TITLES.get(name, f'bpk.{name}')}", intro, *map(directive, members)]) + "\n"


def directive(member: str) -> str:
    """What mkdocstrings replaces.

    A function of `bpk` that bears the name of a module is named by the file that defines it.
    """
    home, _, name = member.rpartition(".")
    options: list[str] = []
    if member in MEMBERS:
        options.append(f"members: {list(MEMBERS[member]) or 'false'}")
    module = str(vars(bpk).get(name).__module__) if home == "bpk" else ""
    if module.rpartition(".")[2] == name or (module and f"bpk.{name}" in sys.modules):
        options += [f"heading: {member}", f"toc_label: {name}"]
        member = f"{module}.{name}"
    return "\n".join([f"::: {member}", *["    options:"] * bool(options), *(f"      {o}" for o in options)])
