"""Results show themselves as short tables."""

from __future__ import annotations

import pytest
from torch import nn

import bpk
from bpk.extensions import HMP, KFAC, BatchGrad
from bpk.jacobians.core.tabular import AT_PROMPT, Table


def test_a_long_table_is_cut_at_the_prompt_only() -> None:
    table = bpk.support_matrix()
    assert len(repr(table).splitlines()) == AT_PROMPT + 3 < len(str(table).splitlines())
    assert "more rows" in repr(table).splitlines()[-1] and "more rows" not in str(table)


def test_results_are_short_at_the_prompt() -> None:
    table = bpk.support(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert repr(table) == str(table) and len(repr(table)) < 200


def test_notebooks_show_tables_and_no_code_of_users() -> None:
    page = Table(["a", "b"], [["<script>", ""], ["2", ""]], ["x < y"], numbers=(0,)).html()
    assert "<script>" not in page and "&lt;script&gt;" in page and "x &lt; y" in page
    assert page.count("<tr>") == 3 and page.count("<td") == 2  # nothing stands in the second column
    assert bpk.support(nn.ReLU())._repr_html_().startswith("<table>")


def test_a_table_without_rows_shows_its_notes() -> None:
    assert Table(["a"], [], ["nothing to do"]).text() == "nothing to do"


@pytest.mark.parametrize(
    ("extension", "shown"),
    [
        (KFAC(mc_samples=7), "KFAC(mc_samples=7)"),
        (KFAC(), "KFAC()"),
        (BatchGrad(subsampling=[0, 2]), "BatchGrad(subsampling=(0, 2))"),
        (HMP("products"), "HMP(savefield='products')"),
    ],
)
def test_extensions_show_their_arguments(extension: object, shown: str) -> None:
    assert repr(extension) == shown and str(extension) == shown.split("(")[0]
