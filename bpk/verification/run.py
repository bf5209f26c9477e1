"""`verify`: compare what `bpk` computes for a model with plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from bpk.context import backpack, check_extension
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.options import positive, seeding
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.errors import value_error
from bpk.verification.assemble import rows
from bpk.verification.compare import Effort
from bpk.verification.forward import DERIVATIVES, Derivative, derivatives_of
from bpk.verification.problem import Problem, undisturbed
from bpk.verification.progress import Progress
from bpk.verification.result import Row, Verification
from bpk.verification.whole_model import OF_MODELS, OfModel, of_models

FUNCTIONS = (*DERIVATIVES, *OF_MODELS)
"""Quantities that are named by functions, and not by extensions."""


def effort_of(entries: int, samples: int, passes: int, memory: float, rtol: float | None, atol: float | None) -> Effort:
    """How much is compared, of options that make sense: of nothing, or with no tolerance, nothing would be told."""
    for name, number in {"rtol": rtol, "atol": atol}.items():
        if number is not None and not (isinstance(number, Real) and number >= 0):
            raise ValueError(f"{name} must be a number of at least 0, or None, got {number!r}.")
    if not (isinstance(memory, Real) and memory > 0):
        raise ValueError(f"memory must be a positive number of GiB, got {memory!r}.")
    counts = positive("entries", entries), positive("samples", samples), positive("passes", passes)
    return Effort(*counts, memory, rtol, atol)


def verify(
    model: nn.Module,
    loss: nn.Module | Callable[..., Tensor] | None,
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    targets: Any = None,
    *extensions: BackpropExtension | Derivative | OfModel,
    entries: int = 10,
    samples: int = 2,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    rtol: float | None = None,
    atol: float | None = None,
    use_converter: bool = False,
    batch_axis: int = 0,
    passes: int = 100,
    memory: float = 4.0,
    options: Mapping[str, Any] | None = None,
    raise_on_error: bool = False,
    progress: bool | None = None,
) -> Verification:
    """Check quantities of a model against their definitions, by plain autograd, at random entries and samples.

    An extension says what its field must be by its `definition`, which is evaluated with what plain autograd gives;
    one of your own is compared, too, if it has one.

    Works on copies: model, loss, gradients, fields, hooks and random generators stay as they are. With `L_n` the
    loss as a function of the prediction of sample `n` alone, `J_n` the Jacobian of that prediction, and `H_n` the
    Hessian of the loss with respect to it, the references are `g_n = dL_n/dp` for first-order quantities,
    `J_n^T H_n J_n` for the GGN, double backward passes for the Hessian, and for Kronecker factors the GGN of a bias
    added to the layer's output (`G`) and `sum a a^T / N` over what the weight multiplies (`A`). Sampled quantities are
    compared with `J_n^T S_n` for the columns `S_n` that the loss draws with the same seed, whose mean square must be
    `H_n`; where these cannot be known, the mean of 50 draws must be within 8 standard errors of the exact value. `KFRA`
    is compared for one sample, and `PCHMP` must be symmetric and at least the GGN and the Hessian. What these do not
    cover is said in the table, as are refusals of `bpk`. After each backward pass with an extension, all entries of
    `.grad` are compared, too.

    Derivatives in the input are named by their functions, `bpk.taylor`, `bpk.laplacian`, `bpk.input_hessian_diag`,
    and are compared with reverse mode. They need no loss: `bpk.verify(model, None, x)` checks all three. So are
    `bpk.ntk` and `bpk.predictive_covariance`, which are compared with rows of the Jacobian, where they are named.

    A loss of one's own that adds losses of `torch.nn` up, with constant factors, has the GGN of their sum.

    Args:
        model: The model, extended or not, in the mode (training, evaluation) that is meant.
        loss: The loss, a module that returns a scalar. It is called as `loss(output, *targets)`, or as
            `loss(*output, *targets)` where the model returns a tuple whose parts it takes. Where the model computes
            its loss, a function that picks it: `lambda output: output.loss`; of weighted sums of losses in
            `torch.nn.functional`, samples are told apart. `None` for derivatives in the input alone.
        inputs: A tensor, a tuple of the arguments of `forward`, or a mapping of named ones; they may be nested.
        targets: What the loss takes beside the prediction: a tensor, a tuple of several, or `None`.
        *extensions: Which quantities (by default: all extensions; without a loss, all derivatives in the input).
        entries: How many entries of each parameter are compared.
        samples: For how many samples quantities of single samples are compared.
        seed: For the choice of entries and samples, dropout, and draws.
        dtype: The precision of the copies (`None`: as they are).
        rtol: Largest error relative to the parameter's largest value (by default the precision's: 7e-8 in float64;
            1e-4 where a part of the model computes in float32, whatever it is given).
        atol: Largest error relative to the largest value of all parameters (2e-14 in float64).
        use_converter: Extend with the converter.
        batch_axis: The axis of `inputs` that counts samples.
        passes: About how many backward passes the reference of one costly quantity may take; beyond, fewer entries
            of each parameter (at least one) are compared.
        memory: Limit in GiB for fields; parameters are spread over several backward passes to stay below.
        options: Of `bpk.backpack`, for the passes that are compared: `{"samples": torch.arange(N).repeat(T)}`.
        raise_on_error: Raise `AssertionError` with the table if anything is wrong.
        progress: Show how far it is, and the time left (by default: on terminals and in notebooks).

    Returns:
        A table, which is true if something was compared and nothing is wrong.

    >>> import torch, bpk
    >>> from bpk.extensions import BatchGrad, DiagGGNExact
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2, bias=False))
    >>> X, y = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    >>> result = bpk.verify(model, torch.nn.CrossEntropyLoss(), X, y, BatchGrad(), DiagGGNExact())
    >>> assert result
    >>> print(result.summary())
    6 ok
    >>> [(row.parameter, row.quantity, row.entries) for row in result.rows][:2]
    [('0.weight', 'BatchGrad', 20), ('0.bias', 'BatchGrad', 6)]
    >>> print(bpk.verify(model, None, X).summary())
    3 ok
    """
    if isinstance(targets, BackpropExtension) or any(targets is function for function in FUNCTIONS):
        raise value_error(
            f"verify(...) got {getattr(targets, '__name__', targets)} as targets.",
            "quantities are named behind them.",
            "pass None as targets, where there are none: verify(model, None, x, None, bpk.laplacian).",
        )
    forward = [e for e in extensions if e in DERIVATIVES] if extensions or loss is not None else list(DERIVATIVES)
    kernels = [e for e in extensions if e in OF_MODELS]
    chosen = [e for e in extensions if e not in FUNCTIONS]
    for extension in chosen:
        check_extension(extension)
    wanted = [e for e in chosen if isinstance(e, BackpropExtension)] if extensions or forward else every_extension()
    devices = [p.device for p in model.parameters()] if isinstance(model, nn.Module) else []
    found: list[Row] = []
    gradients = 0
    seed = seeding(seed)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a type of real numbers, such as torch.float64, or None, got {dtype!r}.")
    backpack(extension_hook=None, **(options or {}))  # says what is wrong with them
    effort = effort_of(entries, samples, passes, memory, rtol, atol)
    with undisturbed(dtype, devices):
        if wanted:
            problem = replace(Problem.of(model, loss, inputs, targets, dtype, batch_axis, seed), options=options or {})
            bar = Progress(len(wanted), progress)
            try:
                found, gradients = rows(problem, wanted, effort, use_converter, bar)
            finally:
                bar.close()
        found += derivatives_of(model, inputs, forward, effort, seed, dtype)
        found += of_models(model, inputs, kernels, effort, batch_axis, seed, dtype)
    result = Verification(tuple(found), gradients)
    if raise_on_error and result.wrong:
        raise AssertionError(f"quantities are wrong:\n{result}")
    return result
