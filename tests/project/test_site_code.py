"""Every block of code on the site has been run: those of generated pages, and commands on written ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.project.built_site import ROOT, generated_pages

for package in ("mkdocs", "latex2mathml"):
    pytest.importorskip(package, reason="the site needs it: pip install -e '.[docs]'")

from bpk import extensions  # noqa: E402
from bpk.command_line import main  # noqa: E402
from bpk.extensions.backprop_extension import BackpropExtension  # noqa: E402
from bpk.extensions.registry import every_extension  # noqa: E402
from bpk.support.table import SupportTable  # noqa: E402
from tools.notebooks import cells_of  # noqa: E402
from tools.site import command_line, drawing, notebooks, quantities  # noqa: E402
from tools.site.definitions import DEFINITIONS  # noqa: E402
from tools.site.docstrings import run  # noqa: E402

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)(?P=fence)$", re.M | re.S
)
COMMAND = re.compile(r"^(?:\$ )?python -m bpk (?P<words>.*?)(?:\s{2,}#.*)?$", re.MULTILINE)
OWN_TEST = "custom_layer.md"  # test_custom_rule_guide.py
NET = """

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 10))
"""
"""A model that a command names."""


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages, also those inside of others that open on demand."""
    found = []
    for match in FENCE.finditer(page):
        lines = match["body"].splitlines()
        if match["language"] in languages:
            found.append("\n".join(line.removeprefix(match["indent"]) for line in lines).strip("\n"))
    return found


def test_blocks_of_a_page_are_found() -> None:
    page = "```python\nx = 1\n```\n\n??? note\n\n    ````python\n    y = '''\n    ```\n    '''\n    ````\n\n"
    page += "```text\n1\n```\n"
    assert blocks(page, "python") == ["x = 1", "y = '''\n```\n'''"] and blocks(page, "text") == ["1"]


def test_python_on_generated_pages_is_a_file_or_has_been_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = [path for folder in ("rules", "examples") for path in (ROOT / folder).glob("*.py")]
    known = {path.read_text().strip("\n") for path in files}
    for listed in (*every_extension(), extensions.HBP()):
        known |= {quantities.compared(type(listed))[0].strip("\n"), quantities.written(type(listed)).strip("\n")}
    known |= {f"# {name}\n{text}".strip("\n") for name, text in command_line.FILES.items()}
    known |= {quantities.MISTAKES.strip("\n"), drawing.EXAMPLE.strip("\n")}
    for script in notebooks.SCRIPTS:  # test_notebooks.py runs them
        known |= {text.strip("\n") for _, text in cells_of(script.read_text(encoding="utf-8"))}
    count = 0
    for path, text in generated_pages(tmp_path_factory).items():
        for block in blocks(text, "python"):
            count += 1
            assert block in known, f"{path} shows code that nothing runs:\n{block}"
    assert count > 90


@pytest.mark.parametrize("extension", [extensions.WeightedGrad, extensions.EKFLR, extensions.HMP])
def test_a_quantity_without_an_entry_has_a_page_that_is_right(
    extension: type[BackpropExtension], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the definition that `bpk.verify` has held the field against, or that `verify` knows it."""
    monkeypatch.delitem(DEFINITIONS, extension.__name__)
    monkeypatch.setattr(quantities, "compared", quantities.compared.__wrapped__)  # without what is remembered
    page = quantities.page(extension(), SupportTable(()))
    code, printed = quantities.compared(extension)
    written = quantities.written(extension)
    assert blocks(page, "python") == [part.strip("\n") for part in (written, code) if part]
    assert "4 ok" in printed and f"`{extension.form.value}`" in page
    assert "has no definition" not in page and bool(written) == ("`bpk.verify` knows" not in page)


def test_what_is_shown_below_code_is_what_it_prints(tmp_path_factory: pytest.TempPathFactory) -> None:
    for page in ("quantities/index.md", "quantities/kflr.md", "quantities/diaghessian.md"):
        text = generated_pages(tmp_path_factory)[page]
        [code], [printed] = blocks(text, "python"), blocks(text, "text")
        assert run(code + "\n").strip("\n") == printed


def commands() -> list[tuple[str, str]]:
    """Each command of a page that is not generated, with the page."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in blocks(path.read_text(), "", "console"):
            found += [(path.name, match["words"]) for match in COMMAND.finditer(block) if path.name != OWN_TEST]
    return found


@pytest.mark.parametrize(("page", "words"), commands())
def test_commands_on_pages_run(page: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with command_line.in_a_folder() as folder:
        model = Path(folder) / "my_model.py"
        model.write_text(model.read_text() + NET)
        status = main(shlex.split(words))
    assert status == 0, capsys.readouterr()
    assert len(capsys.readouterr().out.splitlines()) > 1


def test_there_are_commands_on_pages() -> None:
    assert {words.split()[0] for _, words in commands()} == {"verify", "support", "matrix", "check"}
