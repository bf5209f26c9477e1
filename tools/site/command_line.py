"""The command line: each command, run on small files, and its help."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bpk.command_line.main import main
from tools.site.markdown import code_block, details

MODEL = """import torch
from torch import nn


def problem():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))
    return model.eval(), nn.CrossEntropyLoss(), torch.randn(5, 4), torch.randint(2, (5,))
"""
RULES = """import torch
from bpk.jacobians import Elementwise
from torch import nn


class Swish(nn.Module):
    beta = 1.5

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


RULES = (Elementwise("x*sigmoid(beta*x)", Swish),)
"""
WRONG = RULES.replace("x*sigmoid(beta*x)", "x*sigmoid(x)")
FILES = {"my_model.py": MODEL, "my_rules.py": RULES, "wrong.py": WRONG}
"""What the commands are run on; the last rule forgets `beta`."""


def page() -> str:
    """The page in Markdown."""
    return "\n\n".join(
        [
            "# Command line",
            "Four commands. Each ends with a status that scripts can use, and without a traceback where the user is "
            "mistaken.",
            printed("--help"),
            "The files below:",
            code_block(f"# my_model.py\n{MODEL}", "python"),
            code_block(f"# my_rules.py\n{RULES}", "python"),
            section("verify", "my_model.py:problem", "--quantities", "BatchGrad,DiagGGNExact"),
            section("check", "my_rules.py"),
            "A rule that forgets `beta`, with the expression `x*sigmoid(x)`:",
            printed("check", "wrong.py", status=1),
            section("matrix", "--layers", "Conv*,LSTM,BatchNorm1d", "--extensions", "KF*,BatchGrad"),
            section("support", "my_model.py:problem", "--quantities", "BatchGrad,KFAC"),
        ]
    )


def section(command: str, *arguments: str) -> str:
    """One command: a run, and its help."""
    options = details(f"python -m bpk {command} --help", printed(command, "--help"))
    return "\n\n".join([f"## {command}", printed(command, *arguments), options])


def printed(*arguments: str, status: int = 0) -> str:
    """A command and what it prints."""
    out = io.StringIO()
    with in_a_folder() as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        ended = main(arguments)
    if ended != status:
        raise RuntimeError(f"python -m bpk {' '.join(arguments)} ended with {ended}:\n{out.getvalue()}")
    typed = " ".join(f"'{word}'" if "*" in word else word for word in arguments)
    lines = [line.rstrip().replace(folder, ".") for line in out.getvalue().splitlines()]
    return code_block("\n".join([f"$ python -m bpk {typed}", *lines]), "text")


@contextlib.contextmanager
def in_a_folder() -> Iterator[str]:
    """A folder that holds the files, as the place where commands are typed, in a terminal of 80 columns."""
    place, path, environment = Path.cwd(), list(sys.path), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            (Path(folder) / name).write_text(text)
        os.chdir(folder)
        os.environ["COLUMNS"] = "80"
        try:
            yield folder
        finally:
            os.chdir(place)
            sys.path[:] = path
            os.environ.clear()
            os.environ.update(environment)
