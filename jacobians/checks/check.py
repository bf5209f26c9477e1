"""`check_rule`: one call tests a rule completely against plain autograd, over its examples and precisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from bpk.jacobians.checks import conventions as check_conventions
from bpk.jacobians.checks import overrides as check_overrides
from bpk.jacobians.checks import products as check_products
from bpk.jacobians.checks.case import Case, evaluate, product_of, raised
from bpk.jacobians.checks.loss import couples, divisor, loss_hessian
from bpk.jacobians.checks.reference import Reference
from bpk.jacobians.checks.report import Report
from bpk.jacobians.checks.taylor import taylor
from bpk.jacobians.core.errors import RuleError, explain, raised_at
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.families.several import SeveralOutputs
from bpk.jacobians.losses.by_autograd import COUPLES
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule

__all__ = ["Report", "check_rule"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16)

SHOWN = 8
"""How many findings an error spells out."""


def check_rule(
    rule: Rule,
    examples: Iterable[Example] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seed: int = 0,
    used: Sequence[int] | None = None,
) -> Report:
    """Check everything that a rule claims, on its examples, against plain autograd in float64.

    For every example and precision: shapes, dtypes and values of both Jacobian products with respect
    to each input and parameter, `<J v, u> = <v, J^T u>`, the per-sample form, the declared structure of the
    residual, its products and columns (also jointly over inputs and parameters), Taylor coefficients, every overridden
    shortcut against the default in `Rule`, gradients through a product, subsets of the samples, that no
    product writes to what it was given, that NaN stays in its sample, and that samples do not mix where the rule
    does not say so. For a `Loss`, all forms of its Hessian, and what it divides by.

    Args:
        rule: The rule, registered or not.
        examples: Small layers with input shapes (`case(...)`). Default: the rule's own.
        dtypes: Low precision is compared with float64 at the same (rounded) values.
        seed: Seeds inputs, parameters and directions; the global generator is left as it was.
        used: Of a layer with several results, those that matter. Default: the first, the last, then all of them.

    Returns:
        A `Report`: what was checked, how often, and what was skipped.

    Raises:
        RuleError: A product disagrees. The message names the product, the example, the entry, both values.

    >>> from bpk.jacobians.families.autodiff import Autodiff
    >>> from bpk.jacobians.core.example import case
    >>> check_rule(Autodiff(nn.Tanh), [case(nn.Tanh, shape=(3, 2))]).checks > 30
    True
    """
    if not isinstance(rule, Rule):
        do = "pass the rule, such as Elementwise('tanh(x)', MyTanh), not the layer or a class."
        raise RuleError(f"{rule!r} is no rule.", "it is rules that have derivatives and examples.", do)
    chosen = tuple(rule.examples if examples is None else examples)
    report = Report(rule.name)
    if not chosen:
        raise RuleError(
            f"{rule.name} has no examples, so nothing of it can be checked.",
            "tests and documentation are generated from a rule's examples.",
            "give examples=[case(Layer, *arguments, shape=(3, 4))], or pass them to check_rule.",
        )
    with RandomState.now().again():
        built = [example for example in chosen if _builds(example, report)]
        if len(built) == len(chosen):
            try:
                _require_names(rule, chosen)
            except RuleError:
                raise
            except Exception as error:  # of `params_of`
                finding = raised(product_of(rule, error), f"'{chosen[0]}'", error)
                raise RuleError(finding) from error
        for example in built:
            for dtype in dtypes:
                about = f"'{example}' in {str(dtype).removeprefix('torch.')}"
                try:
                    for some in [used] if used is not None else _uses(rule, example, dtype):
                        _check_example(rule, example, dtype, seed, report, about, some)
                except Exception as error:  # any error of a rule is a finding, whatever its class
                    product = product_of(rule, error)
                    if not product and isinstance(error, RuleError):
                        raise
                    report.failures.append(raised(product or f"the layer of {rule.name}", about, error))
    if report.failures:
        raise RuleError(report.message(SHOWN))
    if not report.checks and torch.float64 in dtypes:  # torch evaluates some layers in no shorter format
        what, do = f"Nothing of {rule.name} could be checked.", "give examples to which this does not apply."
        raise RuleError(what, f"{'; '.join(report.skipped)}.", do)
    return report


def _builds(example: Example, report: Report) -> bool:
    """Whether the layer of an example can be built; if not, that is a finding."""
    try:
        example.build()
    except Exception as error:  # whatever the layer's class raises
        what = f"the layer of '{example}' cannot be built."
        why = f"it raised {type(error).__name__}: {error}"
        report.failures.append(explain(what, why, "correct the arguments in case(...).", raised_at(error, False)))
        return False
    return True


def _require_names(rule: Rule, chosen: Sequence[Example]) -> None:
    """Refuse a parameter that no example has (some may lack it, as a bias): it would get no quantity and no check."""
    named: set[str] = set()
    known: set[str] = set()
    for example in (*chosen, *rule.examples):
        module = example.build()
        named |= set(() if isinstance(rule, Loss) else rule.params_of(module))
        children = ((f"{prefix}." if prefix else "", child) for prefix, child in module.named_modules())
        known |= {
            prefix + name for prefix, child in children for name in child._parameters
        }  # some registered as `None`
        if named <= known:
            return
    missing = sorted(named - known)
    raise RuleError(
        f"{rule.name} names a parameter that no module of its examples has: {', '.join(map(repr, missing))}.",
        f"a layer's parameters are found by name; the modules here have {sorted(known) or 'none'}.",
        "correct the name in params=(...), or give an example whose module has the parameter.",
    )


def _uses(rule: Rule, example: Example, dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Which results of a layer matter: its only one, or its first, its last, and all of them together."""
    if not isinstance(rule, SeveralOutputs):
        return [(0,)]
    with torch.no_grad():
        count = len(tensors_in(example.build().to(dtype)(*example.inputs(dtype))))
    everything = tuple(range(count))
    return list(dict.fromkeys([(0,), everything[-1:], everything])) if dtype == torch.float64 else [everything]


def _check_example(
    rule: Rule,
    example: Example,
    dtype: torch.dtype,
    seed: int,
    report: Report,
    about: str,
    used: Sequence[int] = (0,),
) -> None:
    torch.manual_seed(seed)
    module, inputs = example.build().to(dtype), example.inputs(dtype)
    try:
        draws = _draws_random_numbers(module, inputs)
        torch.manual_seed(seed)
        call = evaluate(rule, module, inputs, used)
    except (RuntimeError, NotImplementedError) as error:
        if product := product_of(rule, error):
            report.failures.append(raised(product, about, error))
        elif dtype == torch.float64:
            report.failures.append(explain(f"the forward of {about} raised.", str(error), "correct the example."))
        else:
            report.skipped[f"torch does not evaluate {example} in {str(dtype).removeprefix('torch.')}"] += 1
        return
    for name in unnamed(rule, module, inputs) if dtype == torch.float64 else ():
        report.failures.append(
            explain(
                f"{about} uses its parameter '{name}', which the rule does not name.",
                "it would get no quantity.",
                f"name it (params=(..., '{name}')), in a family that has Jacobians for parameters.",
            )
        )
    live = rule.predictions if isinstance(rule, Loss) else range(len(inputs))
    reference = Reference(rule, module, call, dtype if draws else torch.float64, seed, live)
    case = Case(rule, module, call, reference, about, report)
    torch.manual_seed(seed + 1)
    case.run("capture", rule.capture, call)
    obstacle = rule.obstacle(call)
    if isinstance(rule, Loss):
        if obstacle is None:
            check_products.forward(case)
            loss_hessian(case, rule)
            if case.exact:
                divisor(case, rule)
        elif obstacle == COUPLES and case.exact:
            couples(case)
    else:
        _check_layer(case, obstacle)
    if obstacle is not None:
        report.skipped[f"second order of {example}: {obstacle}"] += 1


def _check_layer(case: Case, obstacle: str | None) -> None:
    if check_conventions.mixes(case):
        return
    check_products.first_order(case)
    if obstacle is None:
        check_products.second_order(case)
    check_overrides.shortcuts(case)
    if case.exact:
        check_conventions.conventions(case)
        if not case.draws:
            check_conventions.differentiable(case)
        taylor(case)


def unnamed(rule: Rule, module: nn.Module, inputs: Sequence[Tensor]) -> list[str]:
    """Parameters that a layer uses and its rule does not name."""
    known = set(() if isinstance(rule, Loss) else rule.params_of(module))
    named = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if n in known}
    others = {n: p for n, p in module.named_parameters() if id(p) not in named and p.requires_grad}
    if not others:
        return []
    with torch.enable_grad():
        results = [out.sum() for out in tensors_in(module(*[x.clone() for x in inputs])) if out.requires_grad]
    grads = torch.autograd.grad(results, list(others.values()), allow_unused=True) if results else []
    return [name for name, grad in zip(others, grads, strict=False) if grad is not None]


def _draws_random_numbers(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether evaluating the layer moves the global generator."""
    before = RandomState.now()
    with torch.no_grad():
        module(*[x.clone() for x in inputs])
    return before.moved()
