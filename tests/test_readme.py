"""Every Python block of the README runs, one after another in the same namespace, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run() -> None:
    text = README.read_text()
    namespace: dict[str, Any] = {"__name__": "readme"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks, "the README shows code"
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        source = "\n" * line + block[1]  # a traceback names the line of the README
        exec(compile(source, str(README), "exec"), namespace)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", README.read_text()):
        if not target.startswith("http"):
            assert (README.parent / target).exists(), target
