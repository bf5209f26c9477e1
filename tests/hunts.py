"""What the commands share that try many seeds, and print those that fail."""

from __future__ import annotations

import argparse


def parser_of_seeds(description: str | None) -> argparse.ArgumentParser:
    """The options of all of them: how many seeds, and the first."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser
