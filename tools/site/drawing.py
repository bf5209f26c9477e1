"""How it works, as one drawing and one recorded run: from `loss.backward()` to `p.diag_ggn_exact`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import bpk
from bpk.extensions import DiagGGNExact
from tools.site.markdown import code_block, escape, table

PACKAGE = Path(bpk.__file__).parent
BOXES = (
    ("forward", 20, 20, "bpk.extend(model)", "bpk/extending.py", "hooks on every layer"),
    ("forward", 20, 110, "loss_fn(model(x), y)", "bpk/recorder.py", "one Record for each call"),
    ("backward", 20, 225, "loss.backward()", "bpk/context.py, bpk/backward.py", "visits each recorded call"),
    ("backward", 20, 315, "at the loss", "bpk/placement.py, bpk/survey.py", "where are the samples? is it supported?"),
    ("backward", 20, 405, "S with S Sᵀ = H", "bpk/sweeps.py", "columns travel back: Jᵀ S at each call"),
    ("rules", 370, 405, "jac_t_mat_prod(call, mat, 0)", "rules/*.py, jacobians/*.py", "the rule of the layer"),
    ("rules", 370, 495, "squared_sum(call, mat, name)", "rules/*.py, jacobians/*.py", "of a parameter's Jacobian"),
    (
        "backward",
        20,
        495,
        "Uses of a parameter",
        "bpk/parameters.py, bpk/statistics.py",
        "each statistic is computed once",
    ),
    (
        "field",
        20,
        585,
        "p.diag_ggn_exact",
        "bpk/extensions/secondorder/diag_ggn.py",
        "value(uses) = uses.squared_sum()",
    ),
)
"""Kind, place, and three lines of text of each box."""
WIDTH, HEIGHT = 310, 70
ARROWS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 7), (7, 8), (4, 5), (7, 6))


def drawing() -> str:
    """The boxes and arrows as SVG that follows the colours of the page."""
    lines = [
        '<div class="wide">',
        '<svg class="drawing" viewBox="0 0 700 675" role="img" aria-label="From forward pass to field">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    for start, end in ARROWS:
        (_, x1, y1, *_), (_, x2, y2, *_) = BOXES[start], BOXES[end]
        if x1 == x2:
            ends = (x1 + 40, y1 + HEIGHT, x2 + 40, y2 - 2)
        else:
            ends = (x1 + WIDTH, y1 + HEIGHT // 2, x2 - 2, y2 + HEIGHT // 2)
        lines.append('<line class="arrow" x1="{}" y1="{}" x2="{}" y2="{}" marker-end="url(#tip)"/>'.format(*ends))
    for kind, x, y, *texts in BOXES:
        lines.append(f'<rect class="box box-{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>')
        for k, (text, style) in enumerate(zip(texts, ("strong", "file", "small"), strict=True)):
            lines.append(f'<text class="{style}" x="{x + 12}" y="{y + 22 + 20 * k}">{escape(text)}</text>')
    return "\n".join([*lines, "</svg></div>"])


PAGE = """# How it works

A layer is described once, by a rule. During `loss.backward()` a dispatcher composes rules into every quantity: here
into the diagonal of the GGN. Each box names what happens, and the file.

{drawing}

## The same, recorded

This code was run when the page was made,

{code}

and these files had a part in it, in the order in which they were first called, each with its first calls:

{table}

What each file is for, and what was turned down: [architecture](architecture.md).
"""

EXAMPLE = """model = bpk.extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
loss_fn = bpk.extend(nn.CrossEntropyLoss())
with bpk.backpack(DiagGGNExact()):
    loss_fn(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
"""


def page() -> str:
    """The page in Markdown."""
    rows = [[f"`{file}`", ", ".join(f"`{call}`" for call in calls)] for file, calls in recorded().items()]
    parts = {"drawing": drawing(), "code": code_block(EXAMPLE, "python"), "table": table(["file", "first calls"], rows)}
    return PAGE.format(**parts)


def recorded(most: int = 4) -> dict[str, list[str]]:
    """By file: the first functions that the example calls in it, in the order of their calls."""
    found: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        file = Path(code.co_filename).resolve()
        name = qualified(code)
        if event == "call" and PACKAGE.parent in file.parents and "<" not in name:
            calls = found.setdefault(str(file.relative_to(PACKAGE.parent)), [])
            if name not in calls and len(calls) < most:
                calls.append(name)

    names = {"bpk": bpk, "nn": nn, "torch": torch, "DiagGGNExact": DiagGGNExact}
    with torch.random.fork_rng():
        exec(EXAMPLE, dict(names))  # loads the rules and derives what is derived once
        profiled(note, lambda: exec(EXAMPLE, names))
    return {file: calls for file, calls in found.items() if file.split("/")[0] in ("bpk", "rules", "jacobians")}


def qualified(code: CodeType) -> str:
    """The name of a function, with its class where Python tells it."""
    if sys.version_info >= (3, 11):
        return code.co_qualname
    return code.co_name


def profiled(note: Callable[[FrameType, str, Any], None], action: Callable[[], None]) -> None:
    """Call `action` while every call of a Python function is noted."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
