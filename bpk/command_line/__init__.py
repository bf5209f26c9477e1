"""The command line, `python -m bpk`: one file for each group of commands."""

from bpk.command_line.main import main

__all__ = ["main"]
