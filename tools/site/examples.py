"""Examples as pages: docstring, printed output, code.

    python -m tools.site.examples [--all] [NAME ...]    (make docs-examples)

runs the scripts whose stored output does not belong to the present source, and stores what they print in
`docs/examples/NAME.txt`, and what they draw in the same run in `docs/examples/NAME.svg`. The first line of the text
holds a hash of the script and of the helpers that it imports, so that a test sees where a script has changed since.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.site.markdown import code_block, details, escape, table
from tools.site.names import title

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples"
STORED = ROOT / "docs" / "examples"
MARK = "source "
PLOTS = "_plots.py"
"""Scripts that import it draw where they get `--plot FILE`."""
PANEL = 500
"""Points: wider pictures have several panels."""
DEMO = ROOT / "docs" / "demo.png"
"""What the demo draws, which the README and the start page show, too."""


@dataclass(frozen=True)
class Script:
    """One script of `examples/` and what it printed."""

    path: Path

    @property
    def name(self) -> str:
        """Without `.py`."""
        return self.path.stem

    @property
    def source(self) -> str:
        """The code."""
        return self.path.read_text()

    @property
    def docstring(self) -> str:
        """What it shows, in the script's own words."""
        return ast.get_docstring(ast.parse(self.source)) or ""

    @property
    def title(self) -> str:
        """The docstring's first sentence."""
        return self.docstring.partition("\n")[0]

    @property
    def helpers(self) -> list[Path]:
        """Modules of `examples/` that the script imports, directly or not."""
        found: dict[Path, None] = {}
        waiting = [self.path]
        while waiting:
            for path in imported(waiting.pop()):
                if path not in found:
                    found[path] = None
                    waiting.append(path)
        return sorted(found)

    @property
    def digest(self) -> str:
        """A hash of the script and of its helpers."""
        joined = "\0".join(path.read_text() for path in (self.path, *self.helpers))
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    @property
    def stored(self) -> Path:
        """Where its output is kept."""
        return STORED / f"{self.name}.txt"

    @property
    def picture(self) -> Path | None:
        """Where its picture is kept, if it draws one."""
        if self.name == "demo":
            return DEMO
        draws = any(helper.name == PLOTS for helper in self.helpers)
        return STORED / f"{self.name}.svg" if draws else None

    @property
    def is_current(self) -> bool:
        """Whether the stored output and picture belong to the present source."""
        if not self.stored.exists() or (self.picture and not self.picture.exists()):
            return False
        return self.stored.read_text().partition("\n")[0] == MARK + self.digest

    @property
    def output(self) -> str:
        """The stored output."""
        return self.stored.read_text().partition("\n")[2]

    def run(self) -> None:
        """Run the script, and store what it prints and draws; raise where it fails."""
        draw: list[str] = []
        if self.picture:
            where = str(self.picture.relative_to(ROOT))
            draw = ["--out", where, "--variants"] if self.picture == DEMO else ["--plot", where]
        done = subprocess.run(
            [sys.executable, f"examples/{self.path.name}", *draw],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1", "COLUMNS": "110"},
            check=False,
        )
        if done.returncode or done.stderr.startswith("skipped:"):
            raise SystemExit(f"{self.path.name} failed:\n{done.stdout}{done.stderr}")
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        STORED.mkdir(exist_ok=True)
        self.stored.write_text("\n".join([MARK + self.digest, *lines, ""]))

    def page(self) -> str:
        """The page in Markdown."""
        parts = [f"# {title(self.name)}", self.docstring]
        if self.picture:
            parts.append(f"![What it draws]({os.path.relpath(self.picture, STORED)})")
        parts += ["## What it prints", code_block(self.output, "text")]
        parts += ["## Code {data-search-exclude}", f"`examples/{self.path.name}`", code_block(self.source, "python")]
        parts += [details(f"Helper: examples/{h.name}", code_block(h.read_text(), "python")) for h in self.helpers]
        return "\n\n".join(parts) + "\n"


def imported(path: Path) -> list[Path]:
    """The modules of the same folder that a file imports."""
    found = [path.parent / f"{name}.py" for name in names_imported(path.read_text())]
    return [file for file in found if file.exists()]


@cache
def names_imported(source: str) -> tuple[str, ...]:
    """All modules that a source imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return tuple(names)


def scripts() -> list[Script]:
    """All examples, by name."""
    return [Script(path) for path in sorted(SCRIPTS.glob("[a-z]*.py"))]


def card(script: Script) -> str:
    """A picture that leads to the page of its script, with the title and what it shows."""
    assert script.picture is not None
    small = script.picture.with_name(f"{script.picture.stem}-phone.png")
    shown = os.path.relpath(small if small.exists() else script.picture, STORED)
    words = "".join(f"<code>{escape(w)}</code>" if k % 2 else escape(w) for k, w in enumerate(script.title.split("`")))
    panels = ' class="panels"' if intrinsic_width(script.picture) > PANEL else ""
    picture = f'<img{panels} src="{shown}" alt="" loading="lazy">'
    return f'<a href="{script.name}/">{picture}<b>{escape(title(script.name))}</b><span>{words}</span></a>'


def intrinsic_width(picture: Path) -> float:
    """Points, as an SVG says in its first lines; 0 for others."""
    found = re.search(r'width="([\d.]+)pt"', picture.read_text()[:1000]) if picture.suffix == ".svg" else None
    return float(found[1]) if found else 0.0


def pages() -> dict[str, str]:
    """The pages of all examples that have been run, and their table."""
    known = [script for script in scripts() if script.stored.exists()]
    rows = [[f"[{title(s.name)}]({s.name}.md)", s.title] for s in known]
    intro = "Each script checks itself against plain autograd. `make examples` runs them all."
    cards = "\n".join(card(script) for script in known if script.picture)
    gallery = f'## What they draw\n\n<div class="gallery" markdown="0">\n{cards}\n</div>'
    index = f"# Examples\n\n{intro}\n\n{table(['script', 'what it shows'], rows)}\n\n{gallery}\n"
    return {"examples/index.md": index} | {f"examples/{s.name}.md": s.page() for s in known}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named scripts, or all whose output is out of date."""
    parser = argparse.ArgumentParser(prog="python -m tools.site.examples", description="Run examples for the site.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts to run (default: those out of date)")
    parser.add_argument("--all", action="store_true", help="run all")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - {s.name for s in scripts()}:
        parser.error(f"no such example: {', '.join(sorted(unknown))}")
    for script in scripts():
        if script.name in given.names or given.all or not (given.names or script.is_current):
            print(f"examples/{script.path.name} ...", flush=True)
            script.run()


if __name__ == "__main__":
    main()
