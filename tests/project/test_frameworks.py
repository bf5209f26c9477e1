"""Frameworks that run the training loop, as `docs/frameworks.md` shows it: all give the norms of plain autograd."""

from __future__ import annotations

import contextlib
import io
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from examples._torchvision import import_torchvision

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
COMMON, *BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
SHOWN = re.findall(r"^```text\n(.*?)\n```", PAGE, re.M | re.S)
NEEDED = ("lightning", "accelerate", "transformers")
"""What the blocks need, in their order."""


@pytest.mark.parametrize(("package", "block", "shown"), list(zip(NEEDED, BLOCKS, SHOWN, strict=True)), ids=NEEDED)
@pytest.mark.filterwarnings("ignore")
def test_framework(package: str, block: str, shown: str) -> None:
    if find_spec("torchvision"):  # which these packages import, if it is there
        import_torchvision()
    pytest.importorskip(package, reason=f"the page needs it: pip install {package}")
    known: dict[str, Any] = {"__name__": f"of_{package}"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(COMMON, known)
        exec(block, known)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("largest norms")]
    assert lines == [shown] == [expected(known)]


def expected(known: dict[str, Any]) -> str:
    """The line of a page by plain autograd, one sample after the other."""
    model, norms = known["network"](), []
    for x, y in zip(known["x"], known["y"], strict=True):
        loss = cross_entropy(model(x[None]), y[None]) / len(known["x"])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))
    return f"largest norms {[round(norm, 4) for norm in sorted(norms, reverse=True)[:3]]}"
