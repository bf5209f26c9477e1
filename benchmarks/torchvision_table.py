"""The results of `benchmarks.torchvision_models` as lines on the screen, and as the page `docs/models.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.own_process import commits
from benchmarks.torchvision_check import CLASSES, ERROR, GIB, SAMPLES, SECONDS, TRAINED, Result, names

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"

INTRODUCTION = f"""# Models of torchvision

All classification models of `torchvision.models`, with random weights and {CLASSES} classes, in evaluation mode and
float64: individual gradients (`BatchGrad`) and the exact GGN diagonal (`DiagGGNExact`) of {SAMPLES} images in one
backward pass. Every entry of every parameter is compared with plain autograd. This page is written by
`python -m benchmarks.torchvision_models --write` (see [benchmarks](../benchmarks/README.md)).

- *parameters*: in models of more than {TRAINED // 10**6} million the largest tensors are frozen; in parentheses, how
  many are trained. Frozen parameters get no field, and neither do those that take no part (the auxiliary heads of
  GoogLeNet and Inception v3 in evaluation mode).
- *s*: processor time of `extend`, forward and backward pass on one thread (at most {SECONDS:.0f} s).
- *GiB*: peak of the resident memory meanwhile, model included (at most {GIB:.0f} GiB).
- *plain*: the same for the reference: a forward pass of each sample, with a backward pass for its gradient and for each
  column of its square root.
- *errors*: the largest difference of an entry, divided by the largest entry of its tensor (below {ERROR:.0e}).
- *by rule*, *generic*: layers that have a rule, and layers and functions between them that autograd carries columns
  through."""

HEAD = (
    "| model | parameters | images | s | GiB | plain: s | plain: GiB | error of gradients | error of the GGN | by rule "
    "| generic |"
)
RULE = "|---|" + "---:|" * 10


def line(result: Result) -> str:
    """A result on the screen."""
    how = "converter" if result.converter else "as it is"
    verdict = "; ".join(result.faults) or "right"
    return (
        f"{result.model:20} {how:9} {result.params / 1e6:6.1f} M {result.seconds:5.1f} s {result.gib:5.2f} GiB "
        f"(plain {result.plain_seconds:5.1f} s {result.plain_gib:5.2f} GiB) errors {result.gradient_error:.0e} "
        f"{result.ggn_error:.0e} layers {result.by_rule}/{result.generic} {verdict}"
    )


def page(results: Sequence[Result]) -> str:
    """The page of the documentation."""
    parts = [INTRODUCTION]
    for converter, call in ((True, "bpk.extend(model, use_converter=True)"), (False, "bpk.extend(model)")):
        mine = [r for r in results if r.converter is converter]
        right = sum(not r.faults for r in mine)
        left = sorted(set(names()) - {r.model for r in mine})
        checked = f"Checked with the code of {commits(r.commit for r in mine)}."
        parts += [f"## `{call}`", f"{right} of {len(mine)} models are right, and within the limits. {checked}"]
        if left:
            parts += ["Not run since the last change of this page: " + ", ".join(f"`{name}`" for name in left) + "."]
        parts += ["\n".join([HEAD, RULE, *(row(r) for r in mine)])]
        parts += [f"- {r.model}: {'; '.join(r.faults)}" for r in mine if r.faults]
    return "\n\n".join(parts) + "\n"


def row(result: Result) -> str:
    """A line of the table."""
    cells = [
        f"`{result.model}`",
        f"{result.params / 1e6:.1f} M" + (f" ({result.trained / 1e6:.1f} M)" if result.trained < result.params else ""),
        f"{result.size} × {result.size}",
        f"{result.seconds:.1f}",
        f"{result.gib:.1f}",
        f"{result.plain_seconds:.1f}",
        f"{result.plain_gib:.1f}",
        "0" if result.gradient_error == 0 else f"{result.gradient_error:.0e}",
        "0" if result.ggn_error == 0 else f"{result.ggn_error:.0e}",
        str(result.by_rule),
        str(result.generic),
    ]
    return "| " + " | ".join(cells) + " |"
