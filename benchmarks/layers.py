"""Every rule of the registry in a network of its own: `python -m benchmarks --layers`."""

from __future__ import annotations

import fnmatch
import gc
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.alternative import Job, PlainJob, Result
from benchmarks.layer_check import Check, WrongResult
from benchmarks.layer_networks import LayerProblem, NoNetwork, fallback, problem_of, served
from benchmarks.peers import PackJob
from benchmarks.quantities import QUANTITIES
from benchmarks.timing import Series
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.registering import register
from bpk.rules import REGISTRY

BATCH = 32
COLUMNS = 8
"""Columns that the products are measured with."""

ROUNDS = 11
LEAST_ROUNDS = 3
SECONDS = 0.5
"""Of timing for one layer; three rounds are made in any case."""

MEASURED = ("BatchGrad", "DiagGGNMC", "DiagGGNExact", "KFAC", "DiagHessian", "HMP")
PRODUCTS, FALLBACK = "products", "fallback"


@dataclass
class LayerRow:
    """One rule: ratios to plain forward and backward with `batch` samples; the fallback's products over the rule's."""

    rule: str
    layer: str
    batch: int
    seconds: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    products: float | None = None
    status: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# ---- which rules ----------------------------------------------------------------------------------------
def load_rules(path: Path) -> list[Rule]:
    """Run a file of rules; register its `RULES` and return them with those that it registered itself."""
    before = list(REGISTRY)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"--layers {path}: there is no such Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for rule in vars(module).get("RULES", ()):
        if rule not in REGISTRY:
            register(rule)
    found = [rule for rule in REGISTRY if rule not in before]
    if not found:
        raise SystemExit(f"--layers {path}: the file brings no rule. Write RULES = (Elementwise('tanh(x)', MyTanh),).")
    return found


def names_of(rule: Rule) -> list[str]:
    """What a rule is called: by itself, its family, its modules and its functions."""
    functions = [getattr(f, "__name__", str(f)) for f in rule.functions]
    return [rule.name, type(rule).__name__, *(m.__name__ for m in rule.modules), *functions]


def choose(names: Sequence[str]) -> list[Rule]:
    """The rules that were asked for, in the order of the registry; all where nothing was."""
    loaded = {name: load_rules(Path(name)) for name in names if name.endswith(".py")}
    chosen: list[Rule] = [rule for rules in loaded.values() for rule in rules]
    for name in (n for n in names if n not in loaded):
        found = [r for r in REGISTRY if any(fnmatch.fnmatch(n.lower(), name.lower()) for n in names_of(r))]
        if not found:
            raise SystemExit(f"--layers {name}: no rule of this name. Names are those of modules, such as Linear.")
        chosen += found
    return [rule for rule in REGISTRY if not names or rule in chosen]


# ---- what is timed --------------------------------------------------------------------------------------
class ProductsJob(Job):
    """All products of a rule with `COLUMNS` columns; what a call shares among them is computed anew in each run."""

    def __init__(self, rule: Rule, call: Call) -> None:
        self.rule, self.call = rule, call
        wrts: list[Wrt] = [*self.inputs(), *call.params]
        self.mats = {w: torch.randn(COLUMNS, *call.shape_of(w)) for w in wrts}
        self.cotangents = torch.randn(COLUMNS, *call.output.shape)

    def inputs(self) -> list[int]:
        """The differentiable inputs; of a loss, the prediction."""
        floating = [i for i, x in enumerate(self.call.inputs) if x.is_floating_point()]
        return floating[:1] if isinstance(self.rule, Loss) else floating

    @property
    def device(self) -> torch.device:
        return self.call.output.device

    def run(self) -> Result:
        c, rule = self.call, self.rule
        call = Call(c.options, c.inputs, c.params, c.output)
        with torch.no_grad():
            if isinstance(rule, Loss):
                return {"": [rule.hessian_mat_prod(call, self.mats[0]), rule.hessian_columns(call)]}
            made: list[Tensor] = []
            for wrt, mat in self.mats.items():
                made += [rule.jac_mat_prod(call, mat, wrt), rule.jac_t_mat_prod(call, self.cotangents, wrt)]
                if isinstance(wrt, str):
                    made.append(rule.jac_t_mat_prod(call, self.cotangents, wrt, sum_batch=False))
        return {"": made}

    def clear(self) -> None:
        return


def first_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def jobs_of(problem: LayerProblem, serve: Callable[[nn.Module], None], row: LayerRow) -> dict[str, Job]:
    """What is timed: plain, every quantity that is right, the products of the rule and of the fallback."""
    check = Check(problem, serve)

    def quantity_job(name: str) -> Job:
        if fault := check.fault(name):
            raise WrongResult(fault)
        setup, layer = problem.setup(row.batch)
        serve(layer)
        return PackJob(setup, QUANTITIES[name], "bpk")

    def products_job(rule: Rule) -> Job:
        return ProductsJob(rule, problem.call(rule, row.batch))

    makers: dict[str, Callable[[], Job]] = {name: partial(quantity_job, name) for name in MEASURED}
    if isinstance(problem.rule, Autodiff) and not isinstance(problem.rule, Loss):
        row.status[PRODUCTS] = "generic"
    else:
        makers[PRODUCTS] = partial(products_job, problem.rule)
        makers[FALLBACK] = partial(products_job, fallback(problem.rule))
    jobs: dict[str, Job] = {"plain": PlainJob(problem.setup(row.batch)[0], QUANTITIES["NoContext"])}
    for name, make in makers.items():
        try:
            job = make()
            job.run()
            job.clear()
        except Exception as error:  # the rest of the row is still worth measuring
            kinds = {WrongResult: "wrong", UnsupportedLayer: "refused"}
            row.status[name] = kinds.get(type(error), "failed")
            row.notes.append(f"{name}: {error if type(error) is WrongResult else first_line(error)}")
        else:
            jobs[name] = job
    row.notes += check.remarks
    return jobs


def measure_layer(rule: Rule, batch: int = BATCH, rounds: int = ROUNDS, seconds: float = SECONDS) -> LayerRow:
    """Check and time one rule; whatever cannot be measured is noted in the row."""
    row = LayerRow(rule.name, rule.name, batch)
    try:
        problem = problem_of(rule, batch)
    except NoNetwork as error:
        row.notes.append(f"not measured: {error}")
        return row
    row.layer = problem.title
    with served(rule, type(problem.example.build())) as serve:
        series = rotate(jobs_of(problem, serve, row), rounds, seconds)
    row.seconds = series["plain"].median
    row.ratios = {name: series[name].ratio for name in MEASURED if name in series}
    if PRODUCTS in series and FALLBACK in series:
        row.products = series[FALLBACK].ratio / series[PRODUCTS].ratio
    return row


def rotate(jobs: dict[str, Job], rounds: int, seconds: float) -> dict[str, Series]:
    """Time each job once per round, right after a plain one, in an order that rotates.

    Unlike `timing.interleave` it collects no garbage between measurements, which takes longer than these jobs.
    """
    series = {name: Series(job) for name, job in jobs.items()}
    order = list(series)
    start = time.process_time()
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            if r >= LEAST_ROUNDS and time.process_time() - start > seconds:
                break
            for name in order[r % len(order) :] + order[: r % len(order)]:
                base = series["plain"].measure()
                series[name].seconds.append(base if name == "plain" else series[name].measure())
                series[name].plain.append(base)
    finally:
        gc.enable()
    return series


# ---- the table ------------------------------------------------------------------------------------------
def cells(row: LayerRow) -> list[str]:
    """One line of the table."""
    plain = "–" if row.seconds is None else f"{1e3 * row.seconds:.2f}"
    ratios = [_shown(row.ratios.get(name), row.status.get(name)) for name in MEASURED]
    status = row.status.get(PRODUCTS) or row.status.get(FALLBACK)
    return [row.layer, plain, *ratios, _shown(row.products, status)]


def _shown(ratio: float | None, status: str | None) -> str:
    return status or "–" if ratio is None else f"{ratio:.2f}" if ratio < 20 else f"{ratio:.0f}"


def screen(rows: Sequence[LayerRow], markdown: bool = False) -> str:
    """The table, with what was wrong, refused or not measured below it."""
    head = ["layer", "plain, ms", *MEASURED, "fallback / rule"]
    sizes = ", ".join(map(str, sorted({row.batch for row in rows})))
    lines = [f"Small networks, N={sizes}: ratios to plain forward and backward. {report.machine()['cpu']}, one thread."]
    if markdown:
        lines += ["", *("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *map(cells, rows))), ""]
    else:
        lines.append(report.text([head, *map(cells, rows)]))
    return "\n".join(lines + [f"  {row.layer}, {note}" for row in rows for note in row.notes])


def write_json(rows: Sequence[LayerRow], name: str) -> Path:
    """Write `results/NAME.json`."""
    report.RESULTS.mkdir(exist_ok=True)
    path = report.RESULTS / f"{name}.json"
    content = {"machine": report.machine(), "layers": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read_json(path: Path) -> list[LayerRow] | None:
    """Rows of a file that `write_json` wrote; `None` for one about whole networks."""
    content: dict[str, Any] = json.loads(path.read_text())
    return [LayerRow(**row) for row in content["layers"]] if "layers" in content else None
