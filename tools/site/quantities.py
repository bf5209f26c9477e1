"""One page for each quantity: its docstring, its example with what it prints now, its cost, and where it is refused."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from typing import Any

import torch

import bpk
from bpk.extensions import HBP
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.curvmatprod import MatrixProduct
from bpk.support import Kind
from bpk.support_table import Cell, SupportTable
from bpk.verification.run import every_extension
from tools.site.benchmarks import cost
from tools.site.docstrings import parse, run, shown
from tools.site.examples import scripts
from tools.site.markdown import table

NETWORK = """import torch
import bpk
from bpk.extensions import {name}
from torch import nn

model = bpk.extend(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)))
loss_fn = bpk.extend(nn.CrossEntropyLoss())
x, y = torch.rand(16, 1, 8, 8), torch.randint(3, (16,))
with bpk.backpack({name}()):
    loss_fn(model(x), y).backward()

for name, p in model.named_parameters():
    print(name, list(p.shape), "->", {shape})
"""

MISTAKES = """import torch
import bpk
from bpk.extensions import BatchGrad, DiagGGNExact
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
tried(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), loss_fn, DiagGGNExact())
"""

GROUPS = {"firstorder": "First order", "secondorder": "Second order", "curvmatprod": "Products with curvature blocks"}


def extensions() -> tuple[BackpropExtension, ...]:
    """All that have a page."""
    return (*every_extension(), HBP())


def page_of(extension: BackpropExtension) -> str:
    """Where an extension is described."""
    return f"quantities/{type(extension).__name__.lower()}.md"


def small_network(extension: type[BackpropExtension]) -> tuple[str, str]:
    """Code that computes a quantity of a small network, and what it prints."""
    field = extension().savefield  # type: ignore[call-arg]
    shape = f"list(p.{field}.shape)"
    if issubclass(extension, HBP):
        shape = f"[list(factor.shape) for factor in p.{field}]"
    elif issubclass(extension, MatrixProduct):
        shape = f"list(p.{field}(torch.randn(5, *p.shape)).shape)"
    code = NETWORK.format(name=extension.__name__, shape=shape)
    return code, run(code)


def memory(extension: type[BackpropExtension]) -> str:
    """How large the fields of the small network are."""
    if issubclass(extension, MatrixProduct):
        return "the field is a function; it keeps the tensors of the forward pass, in place of numbers of its own."
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng():
        exec(small_network(extension)[0], namespace)
    params = list(namespace["model"].parameters())
    fields = [vars(p)[extension().savefield] for p in params]  # type: ignore[call-arg]
    numbers = sum(x.numel() for field in fields for x in (field if isinstance(field, list) else [field]))
    times = numbers / sum(p.numel() for p in params)
    return (
        f"the fields of this network hold {numbers} numbers, {times:.3g} times the parameters (16 samples, 3 classes). "
        "What travels meanwhile: [memory and chunks](../memory.md)."
    )


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
    for group, title in GROUPS.items():
        mine = [e for e in extensions() if type(e).__module__.split(".")[2] == group]
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
    name, documented = type(extension).__name__, parse(type(extension))
    code, output = small_network(type(extension))
    first = f"from bpk.extensions import {name}\n{documented.code}"  # docstrings see the names of their module
    parts = [
        f"# {name}",
        f"Field: `p.{extension.savefield}`",
        documented.text,
        f"**Source**: {documented.source}",
        "## Example",
        shown(first, run(first)),
        "## Of a small network",
        shown(code, output),
        "## Cost",
        f"Time: {cost(name)}",
        f"Memory: {memory(type(extension))}",
        "## Examples that use it",
        users(name),
        "## Where it is refused",
        refused([c for c in matrix.cells if c.extension == name], name),
    ]
    return "\n\n".join(parts) + "\n"


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
