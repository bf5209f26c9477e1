"""How it works, as one drawing and one recorded run: from `loss.backward()` to `p.diag_ggn_exact`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    ("forward", 20, 40, "bpk.extend(model)", "bpk/extending.py", "a hook on every layer"),
    ("forward", 20, 125, "loss_fn(model(x), y)", "bpk/recording/recorder.py", "the hooks write each call down"),
    ("backward", 20, 245, "loss.backward()", "bpk/context.py, bpk/backward.py", "visits the recorded calls in reverse"),
    ("backward", 20, 330, "at the loss", "bpk/at_losses.py, bpk/plan/inspection.py", "a plan: calls in order, samples"),
    (
        "backward",
        20,
        415,
        "S with S Sᵀ = H",
        "bpk/sweeps/starts/square_root.py, bpk/sweeps/sweep.py",
        "Jᵀ S at each call",
    ),
    (
        "backward",
        20,
        500,
        "uses of a parameter",
        "bpk/fields/parameters.py, bpk/fields/squares.py",
        "each statistic, once",
    ),
    (
        "field",
        20,
        620,
        "p.diag_ggn_exact",
        "bpk/extensions/secondorder/base.py",
        "value(uses) = uses.squared_sum()",
    ),
    ("forward", 370, 125, "Record", "bpk/recording/record.py", "layer, inputs, output of one call"),
    ("backward", 370, 330, "is it supported?", "bpk/plan/support.py", "if not, an error: what, why, what to do"),
    ("rules", 370, 415, "jac_t_mat_prod(call, S, 0)", "jacobians/*.py", "the rule that rules/ declares: to the input"),
    ("rules", 370, 500, "squared_sum(call, S, name)", "jacobians/*.py", "the same rule: to a parameter"),
)
"""Kind, place, and three lines of text of each box."""
WIDTH, HEIGHT, LABEL = 310, 70, 76
ARROWS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (1, 7), (3, 8), (4, 9), (5, 10))
PHASES = (
    (8, 195, "forward pass: what happens is written down"),
    (213, 365, "backward pass: autograd runs, and bpk along with it"),
    (588, 110, "an extension: a few lines"),
)
"""Top and height of the bands behind the boxes, with what they say."""
ON_A_PHONE = ((0, 1, 7), (2, 3, 8, 4, 9, 5, 10), (6,))
"""The boxes one below another, by band; those of the right column are set in."""
NARROW, IN = 340, 34


@dataclass(frozen=True)
class Placed:
    """A box in its place."""

    x: int
    y: int
    width: int
    height: int
    lines: tuple[tuple[str, str], ...]
    """Style and text."""
    kind: str

    def svg(self) -> str:
        """Frame and text."""
        frame = f'<rect class="box box-{self.kind}" x="{self.x}" y="{self.y}" rx="5"'
        text = [
            f'<text class="{style}" x="{self.x + 12}" y="{self.y + 22 + 20 * k}">{escape(text)}</text>'
            for k, (style, text) in enumerate(self.lines)
        ]
        return "\n".join([f'{frame} width="{self.width}" height="{self.height}"/>', *text])


def wide() -> str:
    """Two columns: what happens, and whom it asks."""
    placed, arrows = [], []
    for kind, x, y, *texts in BOXES:
        lines = tuple(zip(("strong", "file", "small"), texts, strict=True))
        placed.append(Placed(x, y, WIDTH, HEIGHT, lines, kind))
    for start, end in ((placed[start], placed[end]) for start, end in ARROWS):
        if start.x == end.x:
            arrows.append((start.x + 40, start.y + HEIGHT, end.x + 40, end.y - 2))
        else:
            arrows.append((start.x + WIDTH, start.y + HEIGHT // 2, end.x - 2, end.y + HEIGHT // 2))
    return svg("wide-screen", 700, PHASES, arrows, placed, LABEL)


def narrow() -> str:
    """One column: whom a box asks stands below it, set in."""
    placed: dict[int, Placed] = {}
    phases, y = [], 0
    for boxes, (_, _, label) in zip(ON_A_PHONE, PHASES, strict=True):
        top, y = y, y + 36
        for k in boxes:
            kind, x, _, title, files, what = BOXES[k]
            lines = (("strong", title), *(("file", f) for f in files.replace(", ", ",\n").split("\n")), ("small", what))
            inset = IN if x != BOXES[0][1] else 0
            placed[k] = Placed(8 + inset, y, NARROW - 16 - inset, 10 + 20 * len(lines), lines, kind)
            y += placed[k].height + 18
        phases.append((top, y - top - 8, label.partition(":")[0]))
    arrows = []
    for start, end in ((placed[start], placed[end]) for start, end in ARROWS):
        along = 24 if start.x == end.x else 180
        arrows.append((along, start.y + start.height, along, end.y - 2))
    return svg("phone", NARROW, phases, arrows, list(placed.values()), 36)


def svg(
    name: str,
    width: int,
    phases: Sequence[tuple[int, int, str]],
    arrows: Sequence[tuple[int, int, int, int]],
    boxes: Sequence[Placed],
    label: int,
) -> str:
    """Bands, arrows and boxes as SVG that follows the colours of the page."""
    height = phases[-1][0] + phases[-1][1] + 8
    lines = [
        f'<svg class="drawing {name}" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="From forward pass to field">',
        f'<defs><marker id="tip-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    for top, tall, text in phases:
        lines.append(f'<rect class="phase" x="4" y="{top}" width="{width - 8}" height="{tall}" rx="6"/>')
        lines.append(f'<text class="label" x="{label}" y="{top + 20}">{text}</text>')
    tip = f'marker-end="url(#tip-{name})"'
    lines += [f'<line class="arrow" x1="{a}" y1="{b}" x2="{c}" y2="{d}" {tip}/>' for a, b, c, d in arrows]
    return "\n".join([*lines, *(box.svg() for box in boxes), "</svg>"])


def drawing() -> str:
    """For wide screens and for phones: the page shows one of them."""
    return f'<div markdown="0">\n{wide()}\n{narrow()}\n</div>'


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
