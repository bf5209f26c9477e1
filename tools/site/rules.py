"""One page for each file of rules: formulas, shapes, examples and obstacles, from the rules themselves."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import bpk.rules
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.example import Example
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from bpk.support.matrix import calls_of
from tools.site.formulas import formulas, hyperparameters
from tools.site.markdown import code_block, details, table
from tools.site.measured import speed
from tools.site.names import function_name, module_name, title

SHORTCUTS = {
    "squared_sum": "squares summed over columns and samples",
    "norm_squared": "norms of individual gradients",
    "outer": "inner products of individual gradients, products with directions, projections, covariances",
    "kron_input": "the factor A",
    "kron_output": "the factor G",
    "congruence": "KFRA's average",
}
"""Optional methods of a family, with what each gives faster than its default."""

ELSEWHERE = "registered"
NONE = "–"
HEAD = ["example", "inputs", "parameters", "output", "second derivative", "remarks"]


def files() -> dict[str, ModuleType]:
    """The files of `rules/`, by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(bpk.rules.__path__))
    return {name: importlib.import_module(f"bpk.rules.{name}") for name in names}


def file_of(rule: Rule) -> str:
    """The name of the file that lists a rule; rules of other packages, or of this process, are in none."""
    for name, module in files().items():
        if any(rule is known for known in module.RULES):
            return name
    return ELSEWHERE


def page_of(rule: Rule) -> str:
    """The page that describes a rule."""
    return f"rules/{file_of(rule)}.md"


def title_of(rule: Rule) -> str:
    """How pages call a rule: by its classes, or its functions."""
    owners = [m.__name__ for m in rule.modules] or [function_name(f) for f in rule.functions]
    return ", ".join(dict.fromkeys(owners)) or type(rule).__name__


def title_of_file(name: str) -> str:
    """How pages call a file of rules."""
    return title(name) if name != ELSEWHERE else "Registered by this process"


def anchor_of(rule: Rule) -> str:
    """Where on its page a rule is described."""
    first = title_of(rule).partition(",")[0]
    return "".join(c if c.isalnum() else "-" for c in first.lower()).strip("-")


def pages() -> dict[str, str]:
    """All pages, and their table."""
    groups: dict[str, list[Rule]] = {}
    for rule in REGISTRY:
        groups.setdefault(file_of(rule), []).append(rule)
    found = {f"rules/{name}.md": page(name, rules) for name, rules in groups.items()}
    rows = [[f"[{name}]({name}.md)", ", ".join(map(title_of, rules))] for name, rules in groups.items()]
    intro = (
        "Each layer is described once, by a rule; every quantity follows from it. "
        f"{sum(map(len, groups.values()))} rules are known, listed by their files in `rules/`. How to write one: "
        "[a layer of your own](../custom_layer.md)."
    )
    found["rules/index.md"] = f"# Rules\n\n{intro}\n\n{table(['file', 'serves'], rows)}\n"
    return found


def page(name: str, rules: Sequence[Rule]) -> str:
    """One file of rules."""
    module = files().get(name)
    parts = [f"# {title_of_file(name)}"]
    if module is not None:
        parts += [inspect.getdoc(module) or "", f"Source: `rules/{name}.py`."]
    parts += [section(rule) for rule in rules]
    if module is not None:
        source = Path(inspect.getfile(module)).read_text()
        parts += ["## Source {#source data-search-exclude}", details(f"rules/{name}.py", code_block(source, "python"))]
    return "\n\n".join(parts) + "\n"


def section(rule: Rule) -> str:
    """One rule."""
    family = type(rule)
    served = [f"`{module_name(m)}`" for m in rule.modules]
    parts = [f"## {title_of(rule)} {{#{anchor_of(rule)}}}", formulas(rule)]
    facts = [f"- Layers: {', '.join(served)}"] if served else []
    if rule.functions:
        names = sorted(dict.fromkeys(function_name(f) for f in rule.functions))
        facts.append(f"- Functions: {', '.join(f'`{n}`' for n in names)}")
    if hyper := hyperparameters(rule):
        facts.append(f"- Hyperparameters, from attributes of the layer: {', '.join(hyper)}")
    if rule.params:
        facts.append(f"- Parameters: {', '.join(f'`{p}`' for p in rule.params)}")
    facts.append(f"- Family: `{family.__name__}`, in `{home_of(family)}`")
    if own := [f"{what} (`{name}`)" for name, what in SHORTCUTS.items() if overrides(family, name)]:
        facts.append(f"- Computed faster than by default: {', '.join(own)}")
    if saved := speed(rule.name):
        facts.append(f"- Cost: {saved}")
    parts.append("\n".join(facts))
    if rows := example_rows(rule):
        used = [k for k in range(len(HEAD)) if any(row[k] not in ("", NONE) for row in rows)]
        rows = list(map(list, dict.fromkeys(tuple(row[k] for k in used) for row in rows)))
        parts.append(table([HEAD[k] for k in used], rows))
    return "\n\n".join(parts)


def home_of(family: type[Rule]) -> str:
    """The file that defines a family."""
    where = Path(inspect.getfile(family)).resolve()
    return "/".join(where.parts[-2:])


def overrides(family: type[Rule], name: str) -> bool:
    """Whether a family has a method of its own."""
    return any(name in vars(c) for c in family.__mro__ if c is not Rule and issubclass(c, Rule))


def example_rows(rule: Rule) -> list[list[str]]:
    """The rule's examples, evaluated."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = calls_of(rule)
    return [example_row(rule, e, call) for e, (_, call) in zip(rule.examples, calls, strict=False)]


def example_row(rule: Rule, example: Example, call: Call) -> list[str]:
    """One example."""
    params = ", ".join(f"`{name}` {shape(p)}" for name, p in call.params.items()) or NONE
    notes = [text for text in (rule.obstacle(call), rule.mixing(call)) if text]
    if isinstance(rule, Loss) and (reason := rule.no_root(call)):
        notes.append(reason)
    mode = ", training" if example.train else ""
    what = " ".join(str(example).rpartition(" on ")[0].removesuffix(".train").split())
    inputs = ", ".join(shape(x) for x in call.inputs)
    return [
        f"`{what}`{mode}",
        inputs,
        params,
        shape(call.output),
        curvature(rule, call),
        "; ".join(dict.fromkeys(notes)),
    ]


def curvature(rule: Rule, call: Call) -> str:
    """The structure of the residual: with respect to the first input, and jointly with all others and parameters."""
    if isinstance(rule, Loss):
        return "loss Hessian"
    alone = rule.residual(call).value
    inputs = [k for k, x in enumerate(call.inputs) if k == 0 or x.is_floating_point()]
    wrts: tuple[Wrt, ...] = (*inputs, *call.params)
    joint = rule.residual(call, wrts).value
    others = " and ".join([*["other inputs"] * (len(inputs) > 1), *["parameters"] * bool(call.params)])
    return alone if joint == alone else f"{alone}; jointly with {others}: {joint}"


def shape(x: Tensor) -> str:
    """A tensor's shape."""
    return f'<span class="shape">[{", ".join(map(str, x.shape))}]</span>'
