"""The benchmarks measure what they say: every alternative is compared with the reference. No timing is asserted."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    beyond,
    beyond_quantities,
    convolution_choices,
    generic,
    input_derivatives,
    layers,
    limits,
    report,
)
from benchmarks.alternative import Job
from benchmarks.architectures import LanguageModel
from benchmarks.memory import measure
from benchmarks.overview import overview
from benchmarks.problems import LARGE, PROBLEMS, TEST_PROBLEMS
from benchmarks.quantities import QUANTITIES, RELATIVE, TARGETS
from benchmarks.reference import Reference, check
from benchmarks.row import ALTERNATIVES, Cell, Row, judge, measure_row
from benchmarks.run import main
from benchmarks.timing import interleave
from bpk.rules import REGISTRY

REFERENCES = {name: Reference(problem) for name, problem in TEST_PROBLEMS.items()}
CASES = [
    (problem, quantity, alternative)
    for problem in TEST_PROBLEMS
    for quantity in TEST_PROBLEMS[problem].quantities
    for alternative in ("bpk", "bpk plain", "torch.func", "loop")
    if ALTERNATIVES[alternative].reason(TEST_PROBLEMS[problem], QUANTITIES[quantity]) is None
    and (problem, alternative) != ("tiny_gru", "torch.func")  # vmap does not pass through a GRU
]


@pytest.mark.parametrize("problem, quantity, alternative", CASES)
def test_alternative_equals_reference(problem: str, quantity: str, alternative: str) -> None:
    setup = TEST_PROBLEMS[problem].check_setup()
    assert check(ALTERNATIVES[alternative].prepare(setup, QUANTITIES[quantity]), REFERENCES[problem]) is None


@pytest.mark.parametrize("problem", ["evaluate", "train"])
def test_laplacians_agree(problem: str) -> None:
    threads = torch.get_num_threads()
    names = [name for name in input_derivatives.ALTERNATIVES if name != "forward pass"]
    names += ["autograd.grad twice"] if problem == "train" else []
    found = [input_derivatives.prepared(problem, 2, name)() for name in names]
    torch.set_num_threads(threads)
    assert all(torch.allclose(x, found[0], rtol=1e-3, atol=1e-6) for x in found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", beyond_quantities.QUANTITIES)
def test_ways_beyond_agree(name: str) -> None:
    """`bpk` and what is written by hand; packages are left out, which need not be installed."""
    quantity = beyond_quantities.QUANTITIES[name]
    ways = {key: way for key, way in quantity.ways.items() if "beyond_peers" not in way.prepare.__module__}
    cells: dict[str, Cell] = {}
    jobs = beyond.prepared(replace(quantity, ways=ways), "tiny_tanh" if "tanh" in quantity.problems else "tiny", cells)
    assert set(jobs) == set(ways) and {cell.status for cell in cells.values()} == {"ok"}, cells


def test_what_is_wrong_beyond_is_not_timed() -> None:
    threads = torch.get_num_threads()
    right = beyond_quantities.QUANTITIES["GradGram"]
    wrong = replace(right.ways["bpk"], values=lambda found: [2 * found[0]], reference=lambda found: found)
    cells: dict[str, Cell] = {}
    jobs = beyond.prepared(replace(right, ways={**right.ways, "bpk": wrong}), "tiny", cells)
    assert "bpk" not in jobs and cells["bpk"].status == "wrong" and "off by 1.0e+00" in cells["bpk"].reason
    assert torch.get_num_threads() == threads


def test_quantities_beyond_are_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    options = ["--only", "GradGram", "--problem", "tiny_tanh", "--rounds", "1", "--budget", "0.1", "--name", "some"]
    try:
        assert beyond.main(options) == 0
        assert beyond.megabytes("GradGram", "tiny_tanh", "bpk") >= 0
    finally:
        torch.set_num_threads(threads)
    written = json.loads((tmp_path / "some.json").read_text())
    cells = written["rows"][0]["cells"]
    assert written["machine"]["torch"] == torch.__version__ and written["machine"]["commit"]
    assert set(cells) == {"plain", "limit", "bpk", "vmap(grad)"} and cells["bpk"]["freed"] > 0
    assert "GradGram, A small tanh network, N=3" in capsys.readouterr().out


def test_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = type(ALTERNATIVES["loop"].prepare(TEST_PROBLEMS["tiny"].setup(), QUANTITIES["BatchGrad"]))
    right = job.first_order
    monkeypatch.setattr(job, "first_order", lambda self, name: [2 * v for v in right(self, name)])
    reference = Reference(TEST_PROBLEMS["tiny_mlp"])
    reference.gradients = [g / 2 for g in reference.gradients]  # computed by the loop that was changed
    row = measure_row(TEST_PROBLEMS["tiny_mlp"], "BatchGrad", [ALTERNATIVES["loop"]], reference, 1, 1.0)
    assert row.cells["loop"].status == "wrong" and row.cells["loop"].ratio is None
    assert "off by 1.0e+00" in row.cells["loop"].reason


@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExactWithKFLR"])
def test_row_is_reported(quantity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    problem = TEST_PROBLEMS["tiny_mlp"]
    chosen = [ALTERNATIVES[name] for name in ("bpk", "torch.func")]
    row = measure_row(problem, quantity, chosen, REFERENCES["tiny_mlp"], rounds=1, budget=1.0)
    assert row.cells["plain"].ratio == 1.0
    assert row.cells["bpk"].status == "ok" and row.cells["bpk"].ratio is not None
    assert row.cells["bpk"].freed is not None and row.cells["bpk"].freed > 0
    assert set(row.parts) == set(RELATIVE.get(quantity, ((),))[0])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    run = report.Run([row], 0.1)
    assert report.read_json(report.write_json(run, "one")) == run
    assert quantity in report.screen(run) and f"| {quantity} |" in report.markdown(run)
    assert torch.get_num_threads() == threads


def test_runs_that_keep_fields_find_them_and_runs_that_free_them_do_not() -> None:
    """Also where one run makes a measurement, and both ways take turns."""

    class Noted(Job):
        def __init__(self, seconds: float) -> None:
            super().__init__(TEST_PROBLEMS["tiny_mlp"].setup(), QUANTITIES["BatchGrad"])
            self.seconds, self.field, self.found = seconds, False, list[bool]()

        def run(self) -> dict[str, list[Any]]:
            self.found.append(self.field)
            self.field = True
            start = time.process_time()
            while time.process_time() - start < self.seconds:
                pass
            return {}

        def drop(self) -> None:
            self.field = False

    job = Noted(0.021)
    interleave({"plain": Noted(0.0), "job": job}, "plain", rounds=3, budget=1.0, freed=", freed")
    assert job.found == [False, False, True, False, True, False, False, True]  # twice to warm up; three rounds


def test_overview_counts_where_a_peer_is_ahead() -> None:
    rows = [
        Row(
            "3c3d",
            "BatchGrad",
            64,
            None,
            {"bpk": Cell("ok", ratio=3.0, freed=1.0), "loop": Cell("ok", ratio=2.0, freed=2.0)},
        ),
        Row(
            "3c3d",
            "KFAC",
            64,
            None,
            {"bpk": Cell("ok", ratio=2.0, freed=2.0), "backpack": Cell("ok", ratio=8.0, freed=8.0)},
        ),
        Row(
            "3c3d",
            "NoContext",
            64,
            None,
            {"bpk": Cell("ok", ratio=1.2, freed=1.2), "backpack": Cell("ok", ratio=1.0, freed=1.0)},
        ),
    ]
    _, line, every = overview(rows)
    assert line[1:] == ["2", "1 / 2", "4.00", f"{(8 / 3) ** 0.5:.2f}", "BatchGrad 3 (loop 2)"]
    assert every[:2] == ["all", "2"]
    runs = [report.Run(rows[:1]), report.Run(rows[1:], machine={**report.machine(), "commit": "another"})]
    together = report.joined([*runs, runs[0]])
    assert [(row.quantity, row.commit) for row in together.rows] == [
        (rows[0].quantity, runs[0].machine["commit"]),
        *((row.quantity, "another") for row in rows[1:]),
    ]
    assert "another" in report.setting(together)
    with pytest.raises(SystemExit, match="cpu differ"):
        report.joined([runs[0], report.Run(rows[1:], machine={**report.machine(), "cpu": "another"})])


def test_verdict_names_every_fault() -> None:
    cells = {"bpk": Cell("ok", ratio=3.0, megabytes=9.0), "loop": Cell("ok", ratio=2.0, megabytes=8.0)}
    row = Row("3c3d", "BatchGrad", 64, 1.9, cells)
    assert judge(row) == "over target 1.9; slower than loop; more memory than loop"
    cells["bpk"] = Cell("ok", ratio=1.5, megabytes=8.0)
    assert judge(row) == "reached"
    cells["bpk"].freed, cells["loop"].freed = 2.1, 2.0
    assert judge(row) == "slower than loop where fields are freed"


def test_memory_of_written_rows() -> None:
    threads = torch.get_num_threads()
    try:
        found = measure(ALTERNATIVES["write"], PROBLEMS["logreg"], "BatchGrad")
    finally:
        torch.set_num_threads(threads)
    assert found.seconds > 0 and found.first > 0 and found.tenth is not None and found.tenth > 0
    assert found.megabytes > 0.8 * 512 * 7850 * 4 / 2**20  # [N, p] in float32 is among what it takes


def test_targets_name_measured_rows() -> None:
    for problem, goals in TARGETS.items():
        assert set(goals) <= set(PROBLEMS[problem].quantities)


MY_RULES = """
import torch
from bpk.jacobians import Elementwise, Multilinear, case


class Swish(torch.nn.Module):
    beta = 1.5

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Mixer(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x):
        return torch.einsum("nti,oi->nto", x, self.weight)


class Wrong(torch.nn.Module):
    def forward(self, x):
        return x**3


RULES = (
    Elementwise("x*sigmoid(beta*x)", Swish),
    Multilinear("n t i, o i -> n t o", Mixer, params=("weight",), examples=[case(Mixer, 3, 2, shape=(4, 5, 3))]),
    Elementwise("x**2", Wrong),
)
"""


def test_new_rules_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    threads, before = torch.get_num_threads(), list(REGISTRY)
    (tmp_path / "my_rules.py").write_text(MY_RULES)
    try:
        assert (
            main(
                [
                    "--layers",
                    str(tmp_path / "my_rules.py"),
                    "sqrt",
                    "MSELoss",
                    "--quick",
                    "--batch",
                    "6",
                    "--name",
                    "mine",
                ]
            )
            == 0
        )
    finally:
        torch.set_num_threads(threads)
        for rule in [rule for rule in REGISTRY if rule not in before]:
            REGISTRY.remove(rule)
    assert list(REGISTRY) == before
    rows = {row.layer.split("(")[0].split()[0]: row for row in layers.read_json(tmp_path / "mine.json") or []}
    assert list(rows) == ["Sqrt", "MSELoss", "Swish", "Mixer", "Wrong"]
    for name in ("Sqrt", "MSELoss", "Swish", "Mixer"):
        assert set(rows[name].ratios) == set(layers.MEASURED) and not rows[name].notes
        assert rows[name].products is not None and rows[name].batch == 6
    assert rows["Wrong"].status and set(rows["Wrong"].status.values()) <= {"wrong", "refused"}
    assert "Swish() on 4" in capsys.readouterr().out


@pytest.mark.parametrize("quantity, same", [("DiagHessian", True), ("KFAC", False)])
def test_generic_family_is_compared(quantity: str, same: bool) -> None:
    layer = next(layer for layer in generic.LAYERS if layer.name == ("Tanh" if same else "Embedding"))
    before = list(REGISTRY)
    found = generic.ratio(layer, quantity, 1, 0.1)
    assert list(REGISTRY) == before
    assert (found > 0) if same else found == "another result: no Kronecker structure is known"


def test_limits_are_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rows = [limits.Limit("one", "kept", 1.0, 1.5), limits.Limit("one", "not kept", 300.0, 200.0, "MiB", 2.0)]
    monkeypatch.setattr(limits, "GROUPS", {"one": lambda rounds: iter(rows)})
    try:
        assert limits.main(["--only", "one"]) == 1
        assert limits.main(["--show", str(tmp_path / "limits.json"), "--markdown"]) == 1
    finally:
        torch.set_num_threads(threads)
    assert limits.read_json(tmp_path / "limits.json") == rows
    assert "| one | not kept | 300 | 200 | MiB | 2.00 | missed |" in capsys.readouterr().out


def test_functions_and_modules_are_the_same_network() -> None:
    setups = [LARGE[name].setup(batch=2) for name in ("encoder", "encoder_modules")]
    torch.testing.assert_close(*[s.model(s.inputs) for s in setups])


def test_flat_language_model_is_the_same() -> None:
    small = TEST_PROBLEMS["tiny_lm"]
    results = []
    for flat in (False, True):
        problem = replace(small, flat=flat, build=partial(LanguageModel, 5, 3, flat=flat))
        job = ALTERNATIVES["bpk plain"].prepare(problem.setup(), QUANTITIES["DiagGGNExact"])
        results.append(job.run()["DiagGGNExact"])
    torch.testing.assert_close(*results)


def test_unknown_layer_is_refused() -> None:
    with pytest.raises(SystemExit, match="no rule of this name"):
        layers.choose(["Lienar"])


def test_choices_for_convolutions_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    convolution_choices.main(1, [(2, 16, 6, 3, 1)])
    printed = capsys.readouterr().out
    assert all(way in printed for way in ("chosen", "shared rows", "one product", "largest regret"))
