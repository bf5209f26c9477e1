"""What is measured: the quantities, the form of their results, and the ratios to reach."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Form(Enum):
    """What a result holds for each parameter, and so how it is compared with the reference."""

    NONE = "only the gradient"
    ROWS = "[N, *p]"
    NORMS = "[N]"
    DIAGONAL = "[*p]"
    SQRT = "[V, N, *p], unique up to a rotation of V"
    KRON = "[G, A] or [G]"
    PRODUCT = "[1, *p]"
    MANY = "one result for each of several quantities"


@dataclass(frozen=True)
class Quantity:
    """A quantity: the extensions that give it, the field it is saved in, the form of its result.

    `sampled` marks Monte-Carlo quantities, whose mean over draws is what is checked. `parts` names the
    quantities of a row that asks for several at once. `extension` names the class if it is not called as the quantity
    is, and `options` are what it is made with.
    """

    name: str
    field: str = ""
    form: Form = Form.NONE
    sampled: bool = False
    parts: tuple[str, ...] = ()
    extension: str = ""
    options: tuple[tuple[str, str], ...] = ()

    @property
    def extensions(self) -> tuple[str, ...]:
        """Names of the extension classes that are active together."""
        if self.parts:
            return self.parts
        return (self.extension or self.name,) if self.form is not Form.NONE else ()

    @property
    def results(self) -> tuple[str, ...]:
        """The quantities that these give, one each."""
        return self.parts or ((self.name,) if self.form is not Form.NONE else ())


QUANTITIES = {
    q.name: q
    for q in (
        Quantity("NoContext"),
        Quantity("BatchGrad", "grad_batch", Form.ROWS),
        Quantity("BatchL2Grad", "batch_l2", Form.NORMS),
        Quantity("SumGradSquared", "sum_grad_squared", Form.DIAGONAL),
        Quantity("Variance", "variance", Form.DIAGONAL),
        Quantity("DiagGGNExact", "diag_ggn_exact", Form.DIAGONAL),
        Quantity("DiagGGNMC", "diag_ggn_mc", Form.DIAGONAL, sampled=True),
        Quantity("BatchDiagGGNExact", "diag_ggn_exact_batch", Form.ROWS),
        Quantity("BatchDiagGGNMC", "diag_ggn_mc_batch", Form.ROWS, sampled=True),
        Quantity("DiagHessian", "diag_h", Form.DIAGONAL),
        Quantity("BatchDiagHessian", "diag_h_batch", Form.ROWS),
        Quantity("SqrtGGNExact", "sqrt_ggn_exact", Form.SQRT),
        Quantity("SqrtGGNMC", "sqrt_ggn_mc", Form.SQRT, sampled=True),
        Quantity("KFAC", "kfac", Form.KRON, sampled=True),
        Quantity("KFLR", "kflr", Form.KRON),
        Quantity("KFRA", "kfra", Form.KRON),
        Quantity("KFACExpand", "kfac", Form.KRON, True, extension="KFAC", options=(("approximation", "expand"),)),
        Quantity("KFLRExpand", "kflr", Form.KRON, extension="KFLR", options=(("approximation", "expand"),)),
        Quantity("HMP", "hmp", Form.PRODUCT),
        Quantity("GGNMP", "ggnmp", Form.PRODUCT),
        Quantity("PCHMP", "pchmp", Form.PRODUCT),
        Quantity(
            "FirstOrderTogether",
            form=Form.MANY,
            parts=("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"),
        ),
        Quantity("DiagGGNExactWithKFLR", form=Form.MANY, parts=("DiagGGNExact", "KFLR")),
    )
}

TARGETS: dict[str, dict[str, float]] = {
    "logreg": {},
    "mlp": {
        "BatchL2Grad": 1.2,
        "SumGradSquared": 1.6,
        "Variance": 1.7,
        "DiagGGNExact": 3.8,
        "KFAC": 2.2,
        "KFLR": 8,
    },
    "3c3d": {
        "BatchGrad": 1.9,
        "BatchL2Grad": 1.5,
        "SumGradSquared": 1.6,
        "Variance": 1.7,
        "DiagGGNExact": 6.8,
        "DiagGGNMC": 1.9,
        "BatchDiagGGNExact": 9,
        "DiagHessian": 8,
        "BatchDiagHessian": 10,
        "SqrtGGNExact": 16,
        "KFAC": 2.3,
        "KFLR": 6.2,
        "HMP": 5,
        "GGNMP": 5,
        "PCHMP": 5,
    },
    "3c3d_sigmoid": {"DiagHessian": 150},
    "lenet5": {"DiagHessian": 70, "BatchDiagHessian": 80},
    "allcnnc": {"BatchGrad": 1.4, "SumGradSquared": 1.5, "Variance": 1.5, "KFAC": 3, "HMP": 7},
    "allcnnc_n4": {"DiagGGNExact": 80},
    "charrnn": {"BatchGrad": 2.7, "BatchL2Grad": 2.2, "SumGradSquared": 2.4, "Variance": 2.8, "DiagGGNMC": 3},
    "charrnn_n4": {"DiagGGNExact": 450, "BatchDiagGGNExact": 350},
    "wrn16_4": {"BatchGrad": 1.3, "SumGradSquared": 1.5, "Variance": 1.5, "DiagGGNExact": 10, "DiagGGNMC": 2.2},
    "resnet18": {"BatchGrad": 3.3, "SumGradSquared": 2.0, "Variance": 2.8, "DiagGGNExact": 10.5, "DiagGGNMC": 2.2},
    "transformer": {"BatchGrad": 2.0, "Variance": 2.4, "DiagGGNExact": 9, "DiagGGNMC": 2.5},
    "gru": {"BatchGrad": 3.5, "DiagGGNMC": 3},
}
"""Ratios to plain forward and backward that `bpk` must not exceed, by problem and quantity."""

MEGABYTES: dict[str, dict[str, float]] = {"charrnn_n4": {"DiagGGNExact": 200}}
"""The same for peak memory."""

EVERYWHERE = {"NoContext": 1.03}
"""The same for rows that every problem has."""

RELATIVE: dict[str, tuple[tuple[str, ...], float]] = {
    "FirstOrderTogether": (("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"), 1.2),
    "DiagGGNExactWithKFLR": (("KFLR",), 1.4),
}
"""Rows of several quantities: at most this factor times the dearest of these alone."""

WRITE_FACTOR = 1.1
"""On the MLP, rows that write `[N, *p]` stay within this factor of writing it (the column `write`)."""

IMPORT_SECONDS = 0.3
"""What importing `bpk` may add to importing torch."""


def target(problem: str, quantity: str) -> float | None:
    """The ratio that a row must not exceed, or `None` where only the peers count."""
    known = TARGETS.get(problem)
    return None if known is None else known.get(quantity, EVERYWHERE.get(quantity))
