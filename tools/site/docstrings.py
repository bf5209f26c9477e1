"""From a docstring to Markdown: paragraphs, arguments as a list, and its example, run."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import re
from dataclasses import dataclass
from typing import Any

import torch

from tools.site.markdown import code_block

SECTION = re.compile(r"^(Args|Raises|Returns):\s*$")
ITEM = re.compile(r"^    (?P<name>[*\w, ]+): (?P<text>.*)$")
TITLES = {"Args": "Arguments", "Raises": "Raises", "Returns": "Returns"}


@dataclass(frozen=True)
class Docstring:
    """The parts of a docstring."""

    text: str
    """Prose with its sections, as Markdown."""
    source: str
    """What follows `Source:`."""
    code: str
    """The code of its example, without prompts."""


def parse(documented: Any) -> Docstring:
    """The docstring of a class or function."""
    text = inspect.getdoc(documented) or ""
    examples = doctest.DocTestParser().get_examples(text)
    prose = text.split("\n>>> ")[0] if examples else text
    code = "".join(example.source for example in examples)
    prose, _, source = prose.partition("\nSource: ")
    return Docstring("\n".join(to_markdown(prose)), " ".join(source.split()), code)


def to_markdown(prose: str) -> list[str]:
    """Sections of arguments become lists; all else stays."""
    lines, section = [], ""
    for line in prose.splitlines():
        heading, item = SECTION.match(line), ITEM.match(line)
        if heading:
            section = heading[1]
            lines += ["", f"**{TITLES[section]}**", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            lines += ["", line]
        elif section and item:
            lines.append(f"- `{item['name']}`: {item['text']}")
        elif section and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            lines.append(line)
    return lines


def run(code: str) -> str:
    """What lines of code print, as in an interactive session: values of expressions are shown."""
    printed = io.StringIO()
    namespace: dict[str, Any] = {"__name__": "example"}
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        torch.manual_seed(0)
        for example in doctest.DocTestParser().get_examples(with_prompts(code)):
            exec(compile(example.source, "example", "single"), namespace)
    return printed.getvalue()


def with_prompts(code: str) -> str:
    """Code as an interactive session would show it."""
    return "\n".join(f"{'...' if line[:1] in ('', ' ') else '>>>'} {line}" for line in code.splitlines())


def shown(code: str, output: str) -> str:
    """Code and what it printed."""
    blocks = [code_block(code, "python")]
    if output.strip():
        blocks.append(code_block(output, "text"))
    return "\n\n".join(blocks)
