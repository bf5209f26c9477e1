"""What a user's factory gives: a model, and what it takes to evaluate a loss."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bpk.command_line.errors import UserError, described
from bpk.command_line.locate import find

KEYS = ("model", "loss", "inputs", "targets")
CONVENTION = "a factory returns (model, loss, inputs, targets), a dict with these keys, or a model"


@dataclass(frozen=True)
class Given:
    """A model, and perhaps a loss and data."""

    model: nn.Module
    loss: nn.Module | None = None
    inputs: Any = None
    targets: Any = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How to name a factory, and data for one that returns only a model."""
    parser.add_argument("factory", help="module:factory or path/to/file.py:factory; " + CONVENTION)
    parser.add_argument(
        "--input-shape", type=numbers, metavar="3,64,64", help="of one sample, if there is only a model"
    )
    parser.add_argument("--classes", type=int, help="number of classes, if there is only a model")
    parser.add_argument("--batch", type=int, default=2, help="number of samples, if there is only a model (default: 2)")
    parser.add_argument("--eval", action="store_true", help="put the model into evaluation mode")
    parser.add_argument("--seed", type=int, default=0, help="for the factory, data, and the choice of entries")


def numbers(text: str) -> tuple[int, ...]:
    """`3,64,64` as numbers."""
    return tuple(int(part) for part in text.replace("x", ",").split(","))


def given(options: argparse.Namespace) -> Given:
    """What the factory returns, in evaluation mode if asked."""
    found = unpacked(options)
    if options.eval:
        found.model.eval()
    return found


def unpacked(options: argparse.Namespace) -> Given:
    """Call the factory.

    Raises:
        UserError: If there is none, it raises, or returns something else.
    """
    name, made = options.factory, find(options.factory)
    torch.manual_seed(options.seed)
    if callable(made) and not isinstance(made, nn.Module):
        made = called(name, made)
    if isinstance(made, nn.Module):
        return Given(made)
    if isinstance(made, Mapping):
        unknown = [str(key) for key in made if key not in KEYS]
        if unknown:
            raise UserError(f"{name} returned a dict with the key '{unknown[0]}': {CONVENTION}")
        parts = dict(made)
    elif isinstance(made, (tuple, list)) and 1 <= len(made) <= len(KEYS):
        parts = dict(zip(KEYS, made, strict=False))
    else:
        raise UserError(f"{name} returned {described_value(made)}: {CONVENTION}")
    for key in ("model", "loss"):
        if key in parts and not isinstance(parts[key], nn.Module):
            raise UserError(f"{name} returned {described_value(parts[key])} as {key}, which is no module (nn.Module)")
    if "model" not in parts:
        raise UserError(f"{name} returned no model: {CONVENTION}")
    return Given(**parts)


def called(name: str, factory: Any) -> Any:
    """The result of a factory."""
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UserError(f"{name} is called without arguments, but {error}") from error
    except ValueError:  # a callable without a signature
        pass
    try:
        return factory()
    except Exception as error:  # whatever the user's code raises
        raise UserError(f"{name} raised: {described(error)}") from error


def described_value(value: object) -> str:
    """A short description of a value that is not what it should be."""
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{size}"


def completed(options: argparse.Namespace) -> Given:
    """What the factory gives, with data and a loss for classification where it returns only a model."""
    found = given(options)
    if found.loss is not None:
        if found.inputs is None:
            raise UserError(f"{options.factory} returned no inputs: {CONVENTION}")
        return found
    missing = [
        flag for flag, value in (("--input-shape", options.input_shape), ("--classes", options.classes)) if not value
    ]
    if missing:
        raise UserError(
            f"{options.factory} returned a model without loss and data: give {' and '.join(missing)} "
            "for classification with cross-entropy, or return (model, loss, inputs, targets)"
        )
    torch.manual_seed(options.seed)
    inputs = torch.randn(options.batch, *options.input_shape)
    targets = torch.randint(options.classes, (options.batch,))
    return Given(found.model, nn.CrossEntropyLoss(), inputs, targets)
