"""One page for each quantity: its docstring, its example with what it prints now, its cost, and where it is refused."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import textwrap
from functools import cache
from typing import Any

import torch

import bpk
from bpk.extensions import HBP
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form
from bpk.extensions.registry import every_extension
from bpk.plan.support import Kind
from bpk.support.table import Cell, SupportTable
from bpk.utils.ekfac import Eigenbasis
from tools.site.definitions import DEFINITIONS, Definition
from tools.site.docstrings import parse, run, shown
from tools.site.examples import scripts
from tools.site.markdown import code_block, math, table
from tools.site.measured import cost

NETWORK = """import torch
import bpk
from {package} import {name}
from torch import nn

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
model, loss_fn = bpk.extend(model.double()), bpk.extend(nn.CrossEntropyLoss())
x, y = torch.rand(16, 1, 8, 8, dtype=torch.float64), torch.randint(3, (16,))
with bpk.backpack({name}({arguments})):
    loss_fn(model(x), y).backward()
"""
CHECK = """

for name, p in model.named_parameters():
    got, want = {value}, by_autograd(name, p)
    error = (got - want).norm() / want.norm()
    print(f"{{name}} {{list(p.shape)}} -> {{{shape}}}, relative difference {{error:.0e}}")
"""

MISTAKES = """import torch
import bpk
from bpk.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact
from torch import nn


def tried(model, loss_fn, *extensions):
    try:
        with bpk.backpack(*extensions):
            loss_fn(bpk.extend(model)(torch.rand(4, 3)), torch.tensor([0, 1, 1, 0])).backward()
    except Exception as error:
        print(f"{type(error).__name__}: {error}\\n")


loss_fn = bpk.extend(nn.CrossEntropyLoss())
tried(nn.Linear(3, 2), loss_fn, BatchGrad)
tried(nn.Linear(3, 2), nn.CrossEntropyLoss(), DiagGGNExact())
tried(nn.Linear(3, 2), loss_fn, BatchGrad(subsampling=[0, 7]))
tried(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), loss_fn, BatchDiagGGNExact())
"""

BETWEEN = r", \quad "
"""What stands between the formulas of a definition."""

GROUPS = {
    "bpk.extensions.firstorder": "First order",
    "bpk.extensions.secondorder": "Second order",
    "bpk.extensions.curvmatprod": "Products with curvature blocks",
    "": "From other packages",
}
"""Titles of the table's parts, by what the modules begin with of those that no title before has taken."""

FUNCTIONS = (Form.PRODUCT, Form.BOUNDED_PRODUCT)


def extensions() -> tuple[BackpropExtension, ...]:
    """All that have a page: those that are described here first, in their order."""
    names = list(DEFINITIONS)

    def place(extension: BackpropExtension) -> int:
        name = type(extension).__name__
        return names.index(name) if name in names else len(names)

    return tuple(sorted((*every_extension(), HBP()), key=place))


def grouped() -> dict[str, list[BackpropExtension]]:
    """By title: the extensions of each part of the table."""
    found: dict[str, list[BackpropExtension]] = {title: [] for title in GROUPS.values()}
    for extension in extensions():
        found[next(title for start, title in GROUPS.items() if type(extension).__module__.startswith(start))].append(
            extension
        )
    return {title: mine for title, mine in found.items() if mine}


def page_of(extension: BackpropExtension) -> str:
    """Where an extension is described."""
    return f"quantities/{type(extension).__name__.lower()}.md"


def small_network(extension: type[BackpropExtension]) -> str:
    """Code that computes a quantity of a small network."""
    name = extension.__name__
    package = "bpk.extensions" if name in bpk.extensions.__all__ else extension.__module__
    arguments = DEFINITIONS[name].arguments if name in DEFINITIONS else ""
    return NETWORK.format(name=name, package=package, arguments=arguments)


@cache
def compared(extension: type[BackpropExtension]) -> tuple[str, str]:
    """Code that compares a quantity of a small network with its definition, and what it prints."""
    name, field = extension.__name__, extension().savefield  # type: ignore[call-arg]
    if name not in DEFINITIONS:
        code = small_network(extension).partition("model, loss_fn")[0]
        code += "x, y = torch.rand(16, 1, 8, 8), torch.randint(3, (16,))\n"
        code += f"print(bpk.verify(model, nn.CrossEntropyLoss(), x, y, {name}()))\n"
        return code, run(code)
    definition = DEFINITIONS[name]
    shape = f"list(p.{field}.shape)"
    if extension.form is Form.FACTORS:
        shape = f"[list(factor.shape) for factor in p.{field}]"
    elif extension.form is Form.EIGENBASIS:
        shape = f"[list(part.shape) for part in (*p.{field}.bases, p.{field}.moments)]"
    elif extension.form in FUNCTIONS:
        shape = "list(got.shape)"
    check = CHECK.format(value=definition.value.format(field=field), shape=shape)
    code = "\n\n".join([small_network(extension), definition.autograd.rstrip() + "\n"]).rstrip() + "\n" + check
    return code, run(code)


def memory(extension: type[BackpropExtension]) -> str:
    """How large the fields of the small network are."""
    if extension.form in FUNCTIONS:
        return "The field is a function."
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng():
        exec(small_network(extension), namespace)
    params = list(namespace["model"].parameters())
    fields = [vars(p)[extension().savefield] for p in params]  # type: ignore[call-arg]
    numbers = sum(x.numel() for field in fields for x in parts_of(field))
    times = numbers / sum(p.numel() for p in params)
    return (
        f"The fields of the network above hold {numbers} numbers, {times:.3g} times the parameters (16 samples, "
        "3 classes)."
    )


def parts_of(field: Any) -> list[torch.Tensor]:
    """The tensors of a field that is one, a list of them, or an eigenbasis."""
    if isinstance(field, Eigenbasis):
        return [*field.bases, field.moments]
    return field if isinstance(field, list) else [field]


def pages() -> dict[str, str]:
    """All pages, and their table."""
    matrix = bpk.support_matrix()
    found = {page_of(e): page(e, matrix) for e in extensions()}
    parts = [
        "# Quantities",
        "What `with bpk.backpack(...)` leaves on each parameter. `N` is the batch size, `C` the columns of the loss "
        "(classes), `M` Monte-Carlo samples, `V` free vectors, `*p` the parameter's shape. Any number of them "
        "share one backward pass.",
    ]
    for title, mine in grouped().items():
        rows = [[f"[{e}]({page_of(e).split('/')[1]})", f"`p.{e.savefield}`", first_sentence(e)] for e in mine]
        parts += [f"## {title}", table(["extension", "field", "value"], rows)]
    parts += ["## What a mistake gets", shown(MISTAKES, run(MISTAKES))]
    found["quantities/index.md"] = "\n\n".join(parts) + "\n"
    return found


def first_sentence(extension: BackpropExtension) -> str:
    """The first line of the docstring."""
    return " ".join((inspect.getdoc(type(extension)) or "").split("\n\n")[0].split())


def page(extension: BackpropExtension, matrix: SupportTable) -> str:
    """One quantity."""
    cls, name, documented = type(extension), type(extension).__name__, parse(type(extension))
    parts = [
        f"# {name}",
        f"Field: `p.{extension.savefield}`",
        documented.text,
        f"**Source**: {documented.source}" if documented.source else "",
        "## Definition",
        *(described(DEFINITIONS[name]) if name in DEFINITIONS else in_code(cls)),
        *shown_costs(cls),
        "## Examples that use it",
        users(name),
        "## Where it is refused",
        refused([c for c in matrix.cells if c.extension == name], name),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def described(definition: Definition) -> list[str]:
    """Formula, words and use."""
    return [
        f'<div class="definition" markdown="0">{"".join(map(math, definition.formula.split(BETWEEN)))}</div>',
        definition.words,
        f"**Used for**: {definition.uses}",
    ]


def in_code(extension: type[BackpropExtension]) -> list[str]:
    """The definition as it is written, where no other words are found for it."""
    form, code = f"`{extension.form.value}`, for a parameter `[*p]` and `N` samples", written(extension)
    if not code:
        return [f"{form}. `bpk.verify` knows what it must be."]
    return [form + ", in terms of what [plain autograd](../reference/extensions.md) says:", code_block(code, "python")]


def written(extension: type[BackpropExtension]) -> str:
    """The code of the definition, which `compared` runs in `bpk.verify` where this is all that is known."""
    if extension.definition is BackpropExtension.definition:
        return ""  # the form says enough
    return textwrap.dedent(inspect.getsource(extension.definition))


def shown_costs(extension: type[BackpropExtension]) -> list[str]:
    """The comparison with the definition, time and memory."""
    name = extension.__name__
    known = DEFINITIONS.get(name)
    of_draws = known is not None and known.arguments
    time, room = (f"{known.time}. ", f"{known.memory}. ") if known is not None else ("", "")
    return [
        "## Held against its definition",
        "Plain autograd gives the expected value, which draws approach:"
        if of_draws
        else "The same numbers by plain autograd, far slower:",
        shown(*compared(extension)),
        "## Cost",
        f"**Time**: {time}Measured: {cost(name)}",
        f"**Memory**: {room}{memory(extension)} [Memory and chunks](../memory.md).",
    ]


def users(name: str) -> str:
    """The scripts of `examples/` that name an extension."""
    using = [s for s in scripts() if re.search(rf"\b{name}\b", s.source)]
    return "\n".join(f"- [{s.name}](../examples/{s.name}.md): {s.title}" for s in using) or "None."


def refused(cells: list[Cell], name: str) -> str:
    """Layers and losses that refuse it, from the support matrix."""
    if not cells:
        return "As the member of the family that it stands for."
    rows = [[c.layer, c.reason, c.do] for c in cells if c.kind is Kind.REFUSED or c.reason.startswith("In some cases")]
    links = "All layers: [support matrix](../matrix.md)."
    if not rows:
        return f"Nowhere among the layers and losses that have a rule. {links}"
    return f"{table(['layer', 'why', 'way out'], rows)}\n\n{links}"
