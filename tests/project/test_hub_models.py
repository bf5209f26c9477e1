"""The check of models of transformers and timm: three small models, and that it notices what is wrong."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from benchmarks import hub_run
from benchmarks.hub_check import read
from benchmarks.hub_models import MODELS
from benchmarks.hub_result import Finding, HubResult
from benchmarks.hub_table import PAGE, line, page
from benchmarks.own_process import Failed, commit, commits, in_own_process
from bpk.extensions import BatchGrad

NUMBERS = {model.title: k for k, model in enumerate(MODELS)}


def test_the_table() -> None:
    assert len(NUMBERS) == len(MODELS)
    assert sum(model.package == "transformers" for model in MODELS) >= 60
    assert sum(model.package == "timm" for model in MODELS) >= 40


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2LMHeadModel", "convnext.ConvNeXt"])
def test_a_model_is_right(name: str) -> None:
    if find_spec(MODELS[NUMBERS[name]].package) is None:
        pytest.skip(f"needs {MODELS[NUMBERS[name]].package}")
    result = hub_run.check(NUMBERS[name])
    assert result.verdict == "ok", line(result)
    assert set(result.findings) == {"BatchGrad", "DiagGGNExact", "DiagHessian", "KFAC"}
    assert result.ratio > 1


def test_the_verdict_is_the_worst() -> None:
    findings = {
        "BatchGrad": Finding(),
        "KFAC": Finding("refused", reason="what\n  Why: why"),
        "DiagGGNExact": Finding(),
    }
    result = HubResult("name", "timm", findings=findings)
    assert result.verdict == "refused" and "why" in page([result])
    findings["DiagGGNExact"] = Finding("wrong")
    assert result.verdict == "wrong"
    assert HubResult("name", "timm", problem="killed").verdict == "crashed"
    assert HubResult.of_dict(result.as_dict()) == result


def test_wrong_values_are_noticed() -> None:
    one = torch.ones(2)
    assert hub_run.worst({"w": (one, one)}, 0.0) == 0
    assert hub_run.worst({"w": (1.01 * one, one), "v": (one, one)}, 0.0) == pytest.approx(0.01)
    for found in (2 * one, one * torch.nan, torch.ones(1)):
        with pytest.raises(hub_run.Wrong):
            hub_run.worst({"w": (found, one)}, 0.0)
    with pytest.raises(hub_run.Wrong, match="no field"):
        hub_run.require_fields({}, {"w"})


def test_a_time_limit() -> None:
    with pytest.raises(hub_run.Slow), hub_run.within(0.05):
        while True:
            BatchGrad()


def returns() -> int:
    return 1


def raises() -> None:
    raise ValueError("no")


def sleeps() -> None:
    torch.ones(1)
    while True:
        pass


def allocates() -> None:
    torch.ones(1 << 34)


def test_a_process_of_its_own() -> None:
    assert in_own_process(returns, preload="torch") == 1
    with pytest.raises(Failed, match="ValueError: no"):
        in_own_process(raises, preload="torch")
    with pytest.raises(Failed, match="more than 3 s"):
        in_own_process(sleeps, preload="torch", seconds=3.0)
    with pytest.raises(Failed, match=r"alloc|memory"):
        in_own_process(allocates, preload="torch", gib=16.0)


def test_pages_name_the_commit() -> None:
    assert commit() == "unknown" or len(commit().rstrip("+")) == 10
    assert commits(["abc", "abc"]) == "commit `abc`"
    assert commits(["abc", ""]) == "an unknown commit and `abc`"


def test_the_page_shows_what_was_found() -> None:
    results = read()
    assert {r.model for r in results} <= set(NUMBERS) and len(results) >= 60
    assert PAGE.read_text() == page(results)
