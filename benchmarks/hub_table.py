"""The results of `benchmarks.hub_check` as lines on the screen, and as the page `docs/hub_models.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.hub_models import MODELS, SAMPLES
from benchmarks.hub_result import VERDICTS, HubResult
from benchmarks.own_process import commits
from benchmarks.report import RESULTS

FILE = RESULTS / "hub.json"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "hub_models.md"

QUANTITIES = ("BatchGrad", "DiagGGNExact", "DiagHessian", "KFAC")

INTRODUCTION = f"""# Models of transformers and timm

Small models with random weights, of the classes in [transformers](https://github.com/huggingface/transformers) and
[timm](https://github.com/huggingface/pytorch-image-models), extended as they are (`bpk.extend(model)`), in evaluation
mode and float64, with {SAMPLES} samples and cross-entropy on their logits, positions flattened. Each quantity is
compared with plain autograd. This page is written by `python -m benchmarks.hub_check --write`.

- *BatchGrad*: all entries of all parameters, against a loop over the losses of samples.
- *DiagGGNExact*, *DiagHessian*: two entries of each of up to sixty parameters, the largest and a random one.
- *KFAC*: factors are finite, and their sizes are those of the parameter.
- *ratio*: processor time of forward and backward pass with `BatchGrad`, divided by that of plain ones. These models are
  tiny, so it is one of overheads, not of arithmetic.

`ok`: right, with the largest error of an entry divided by the largest entry of its tensor (some models normalise in
float32 always). `refused`: an error that says why, and what to do. `slow`: not done within a minute; `skipped`: more
parameters than it is tried for."""


def line(result: HubResult) -> str:
    """A result on the screen."""
    found = " ".join(f"{q} {cell(result, q)}" for q in QUANTITIES)
    faults = "".join(
        f"\n    {q}: {f.reason.splitlines()[0]}" + "".join(f"\n      {why}" for why in f.reason.splitlines()[1:2])
        for q, f in result.findings.items()
        if f.verdict not in ("ok", "skipped")
    )
    problem = f"\n    {result.problem.splitlines()[0]}" if result.problem else ""
    told = "".join(f"\n    told: {message[:200]}" for message in result.warnings)
    return (
        f"{result.model:40} {result.verdict:8} {result.params:9,} x{result.ratio:5.1f} {found}{faults}{problem}{told}"
    )


def cell(result: HubResult, quantity: str) -> str:
    """One quantity."""
    found = result.findings.get(quantity)
    if found is None:
        return "–"
    if found.verdict == "ok":
        return "ok" if quantity == "KFAC" else f"ok ({found.error:.0e})"
    return found.verdict


def page(results: Sequence[HubResult]) -> str:
    """The page of the documentation."""
    parts = [INTRODUCTION]
    for package in ("transformers", "timm"):
        mine = [r for r in results if r.package == package]
        if not mine:
            continue
        counts = [f"{n} {v}" for v in VERDICTS if (n := sum(r.verdict == v for r in mine))]
        versions = " and ".join(sorted({r.version for r in mine if r.version}))
        parts += [
            f"## {package}",
            f"{package} {versions}, {len(mine)} models, by their worst quantity: {', '.join(counts)}. Checked with the "
            f"code of {commits(r.commit for r in mine)}.",
        ]
        left = [m.title for m in MODELS if m.package == package and m.title not in {r.model for r in mine}]
        if left:
            parts += ["Not run: " + ", ".join(f"`{name}`" for name in left) + "."]
        head = f"| model | parameters | {' | '.join(QUANTITIES)} | ratio |"
        rule = "|---|---:|" + "---|" * len(QUANTITIES) + "---:|"
        parts += ["\n".join([head, rule, *(row(r) for r in mine)])]
        parts += ["\n".join(notes(mine))] if notes(mine) else []
    return "\n\n".join(parts) + "\n"


def row(result: HubResult) -> str:
    """A line of the table."""
    cells = [f"`{result.model}`", f"{result.params:,}", *(cell(result, q) for q in QUANTITIES)]
    return f"| {' | '.join(cells)} | {result.ratio:.1f} |" if result.ratio else f"| {' | '.join(cells)} | – |"


def notes(results: Sequence[HubResult]) -> list[str]:
    """Why something is not ok."""
    found = []
    for r in results:
        if r.problem:
            found.append(f"- `{r.model}`: {r.problem.splitlines()[0]}")
        for quantity, f in r.findings.items():
            if f.verdict not in ("ok", "skipped"):
                lines = f.reason.splitlines()
                why = " ".join(part.strip() for part in lines[:2])
                found.append(f"- `{r.model}`, {quantity}: {f.verdict}: {why}")
    return found
